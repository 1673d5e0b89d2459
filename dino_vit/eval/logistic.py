"""Logistic regression on frozen features: the optimum of |W|² / 2 + C · Σ cross-entropy, as scikit-learn's.

The bias is not penalised. Where images have several labels, each is learned for itself, by a sigmoid.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core import log
from dino_vit.core.text import progress
from dino_vit.models.classifiers import LinearHeads

STANDARD_CS = tuple(10 ** (-5 + step / 2) for step in range(13))  # for standardised features
_CONVERGED = 1e-4  # the largest gradient of the objective, divided by n·C, that counts as the optimum
_MAX_SCORES = 1 << 22  # in memory at a time; autograd holds them about three times


@torch.no_grad()
def train_logistic(
    features: Tensor,
    targets: Tensor,
    *,
    cs: Sequence[float],
    classes: int,
    max_iterations: int = 1000,
    tolerance: float = 1e-6,
) -> LinearHeads:
    """Return the optimum for each C, the smallest first, by L-BFGS that starts from the previous optimum.

    Works on the device and in the precision of `features` (images, width). Targets are
    classes from 0 on, or a 0 or 1 for each of several labels, (images, classes).
    """
    if len(features) < features.shape[1]:  # no optimal weight leaves the span of the centred features
        axes = torch.linalg.svd(features - features.mean(dim=0), full_matrices=False).Vh
        train = partial(train_logistic, cs=cs, classes=classes, max_iterations=max_iterations)
        heads = train(features @ axes.T, targets, tolerance=tolerance)
        return LinearHeads(heads.weight @ axes, heads.bias)
    # L-BFGS takes far fewer steps on centred features, with each weight measured in a unit as large as its
    # curvature allows. Neither moves the optimum: the free bias absorbs the centering, and the penalty is
    # computed from the weights themselves.
    features = features.contiguous()
    variance, mean = torch.var_mean(features, dim=0, correction=0)
    weight, bias = features.new_zeros(classes, features.shape[1]), features.new_zeros(classes)
    # A sigmoid is curved like the softmax of two classes; one class, as a fold may have, not at all.
    curved = 2 if targets.ndim == 2 else max(2, classes)
    weights, biases = [], []
    with progress("Fitting logistic regressions", len(cs)) as advance:
        for c in sorted(cs):
            penalty = 1 / (len(features) * c)
            unit = (variance + penalty * curved**2 / (curved - 1)).rsqrt()
            scaled = [(weight / unit).requires_grad_(), bias.clone().requires_grad_()]
            optimizer = torch.optim.LBFGS(
                scaled,
                max_iter=max_iterations,
                tolerance_grad=tolerance,
                tolerance_change=1e-12,
                history_size=20,
                line_search_fn="strong_wolfe",
            )
            objective = partial(_objective, scaled, features, targets, unit=unit, mean=mean, penalty=penalty)
            optimizer.step(objective)  # type: ignore[no-untyped-call]
            objective()  # the last evaluation may have been at a point that the line search rejected
            slope = max(float(part.grad.abs().max()) for part in scaled if part.grad is not None)
            if slope > _CONVERGED:
                text = "L-BFGS stopped before the optimum for C = %.1e: the largest gradient is %.1e"
                log.warning(text, c, slope)
            weight, bias = scaled[0].detach() * unit, scaled[1].detach()
            weights.append(weight)
            biases.append(bias - weight @ mean)
            advance(1)
    return LinearHeads(torch.stack(weights), torch.stack(biases))


@torch.enable_grad()
def _objective(
    scaled: Sequence[Tensor], features: Tensor, targets: Tensor, *, unit: Tensor, mean: Tensor, penalty: float
) -> Tensor:
    """Return the objective divided by n·C, and set the gradients of the scaled weight and the bias.

    That is the mean cross-entropy on centred features plus penalty / 2 · |W|², a block of images at a time.
    """
    cross_entropy = F.binary_cross_entropy_with_logits if targets.ndim == 2 else F.cross_entropy
    size = max(1, _MAX_SCORES // len(scaled[1]))
    total = torch.zeros_like(mean[0])
    for parameter in scaled:
        parameter.grad = None
    for x, y in zip(torch.split(features, size), torch.split(targets, size), strict=True):
        weight = scaled[0] * unit
        loss = cross_entropy(F.linear(x, weight, scaled[1] - weight @ mean), y, reduction="sum")
        value = (loss + len(x) * penalty / 2 * weight.square().sum()) / len(features)
        torch.autograd.backward(value)
        total += value.detach()
    return total

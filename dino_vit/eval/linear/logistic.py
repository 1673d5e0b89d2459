"""Multinomial logistic regression: the optimum for each strength of the penalty.

The objective is scikit-learn's, |W|² / 2 + C · Σ cross-entropy, with an unpenalised bias.

n images of a block, d features, c classes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dino_vit.eval.linear.probes import LinearHeads
from dino_vit.models.onednn import linear

_MAX_SCORES = 1 << 24  # in memory at a time


class Fit(NamedTuple):
    """A classifier, its C, and how close to the optimum it is."""

    c: float
    head: LinearHeads
    iterations: int
    gradient: float  # largest entry of the objective's gradient, divided by n·C; 0 at the optimum


@torch.no_grad()
def sweep(
    features: Tensor,
    targets: Tensor,
    *,
    cs: Sequence[float],
    classes: int,
    max_iterations: int = 1000,
    tolerance: float = 1e-6,
) -> Iterator[Fit]:
    """Yield the optimum for each C, the smallest first, by L-BFGS that starts from the previous optimum.

    Works on the device and in the precision of `features` (images, width).
    """
    # L-BFGS takes far fewer steps on centred features, with each weight measured in a unit as large as its
    # curvature allows. Neither moves the optimum: the free bias absorbs the centring, and the penalty is
    # computed from the weights themselves.
    features = features.contiguous()
    variance, mean = torch.var_mean(features, dim=0, correction=0)
    weight, bias = features.new_zeros(classes, features.shape[1]), features.new_zeros(classes)
    for c in sorted(cs):
        penalty = 1 / (len(features) * c)
        unit = (variance + penalty * classes**2 / (classes - 1)).rsqrt()
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
        weight, bias = scaled[0].detach() * unit, scaled[1].detach()
        head = LinearHeads(weight[None], (bias - weight @ mean)[None])
        yield Fit(c, head, optimizer.state[scaled[0]]["n_iter"], slope)


def _objective(
    scaled: Sequence[Tensor], features: Tensor, targets: Tensor, *, unit: Tensor, mean: Tensor, penalty: float
) -> Tensor:
    """Return the objective divided by n·C, and set the gradients of the scaled weight and the bias.

    That is the mean cross-entropy on centred features plus penalty / 2 · |W|². The gradient is written out,
    in place: autograd would hold a block's scores three times.
    """
    weight, bias = scaled[0].detach() * unit, scaled[1].detach()
    shifted = bias - weight @ mean
    value, slope = penalty / 2 * weight.square().sum(), penalty * weight
    bias_slope = torch.zeros_like(shifted)
    size = max(1, _MAX_SCORES // len(bias))
    for start in range(0, len(features), size):
        x, y = features[start : start + size], targets[start : start + size, None]
        logs = linear(x, weight, shifted).log_softmax(dim=-1)  # (n, c)
        value -= logs.gather(1, y).sum() / len(features)
        errors = logs.exp_().scatter_add_(1, y, -torch.ones_like(y, dtype=logs.dtype))
        errors /= len(features)
        slope += linear(errors.t(), x.t())
        bias_slope += errors.sum(dim=0)
    scaled[0].grad = (slope - torch.outer(bias_slope, mean)) * unit
    scaled[1].grad = bias_slope
    return value

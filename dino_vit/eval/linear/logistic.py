"""Multinomial logistic regression: an optimum for each strength of its penalty, whatever the way there.

The objective is scikit-learn's, |W|² / 2 + C · Σ cross-entropy, with a bias that costs nothing.

n images of a block, d features, c classes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dino_vit.eval.linear.probes import Heads
from dino_vit.models.onednn import linear

_SCORES = 1 << 24  # held at a time
_HISTORY = 20  # steps from which L-BFGS knows the curvature


class Fit(NamedTuple):
    """A classifier, its C, and how near to the optimum it came."""

    c: float
    head: Heads
    iterations: int
    gradient: float  # largest entry of the objective's, over n·C; 0 at the optimum


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
    """Yield the optimum for each C, from the smallest on, each found by L-BFGS from the one before.

    Works where `features` (images, width) are, in their precision.
    """
    # A free bias takes up any shift of the features, and a penalty is told apart from the unit that weights
    # are measured in: centred features and, of each weight, as large a unit as its curvature allows leave the
    # optimum where it is, but L-BFGS finds it in far fewer steps.
    features = features.contiguous()
    variance, middle = torch.var_mean(features, dim=0, correction=0)
    weight, bias = features.new_zeros(classes, features.shape[1]), features.new_zeros(classes)
    for c in sorted(cs):
        penalty = 1 / (len(features) * c)
        unit = (variance + penalty * classes**2 / (classes - 1)).rsqrt()
        measured = [(weight / unit).requires_grad_(), bias.clone().requires_grad_()]
        optimizer = torch.optim.LBFGS(
            measured,
            max_iter=max_iterations,
            tolerance_grad=tolerance,
            tolerance_change=1e-12,
            history_size=_HISTORY,
            line_search_fn="strong_wolfe",
        )
        objective = partial(
            _objective, measured, features, targets, unit=unit, middle=middle, penalty=penalty
        )
        optimizer.step(objective)  # type: ignore[no-untyped-call]
        objective()  # as the last evaluation may have been of a step that was not taken
        slope = max(float(part.grad.abs().max()) for part in measured if part.grad is not None)
        weight, bias = measured[0].detach() * unit, measured[1].detach()
        head = Heads(slice(None), weight[None], (bias - weight @ middle)[None])
        yield Fit(c, head, optimizer.state[measured[0]]["n_iter"], slope)


def _objective(
    measured: Sequence[Tensor],
    features: Tensor,
    targets: Tensor,
    *,
    unit: Tensor,
    middle: Tensor,
    penalty: float,
) -> Tensor:
    """Return the objective over n·C and leave its gradient with the parameters.

    That is the mean cross-entropy on centred features, and penalty / 2 · |W|². W is measured in units; the
    bias stands beside it.
    """
    weight, bias = measured[0].detach() * unit, measured[1].detach()
    shifted = bias - weight @ middle
    value, slope = penalty / 2 * weight.square().sum(), penalty * weight
    bias_slope = torch.zeros_like(shifted)
    size = max(1, _SCORES // len(bias))
    for start in range(0, len(features), size):
        x, truth = features[start : start + size], targets[start : start + size, None]
        logs = linear(x, weight, shifted).log_softmax(dim=-1)  # (n, c)
        value -= logs.gather(1, truth).sum() / len(features)
        errors = logs.exp_().scatter_add_(1, truth, -torch.ones_like(truth, dtype=logs.dtype))
        errors /= len(features)
        slope += linear(errors.t(), x.t())
        bias_slope += errors.sum(dim=0)
    measured[0].grad = (slope - torch.outer(bias_slope, middle)) * unit
    measured[1].grad = bias_slope
    return value

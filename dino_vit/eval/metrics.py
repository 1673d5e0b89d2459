"""Figures of several labels an image, of two classes, and of numbers, with how sure they are.

Each is a function of weights of the images (r, n), such as those of a bootstrap, and of outputs and targets
(n, c). It returns (r, c), NaN where a column has nothing to judge by. An output is the score of a label, from
0 to 1, or a number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.config.settings import Task
from dino_vit.eval.accuracy import Measured

Metric = Callable[[Tensor, Tensor, Tensor], Tensor]


def _at_least(weights: Tensor, scores: Tensor) -> Tensor:
    """Return for each image the weight of all that score as high or higher: (r, n)."""
    ordered, order = scores.sort(descending=True)
    last = torch.searchsorted(-ordered, -scores, right=True) - 1  # rank of the last with the same score
    return weights[:, order].cumsum(1)[:, last]


def average_precision(weights: Tensor, scores: Tensor, targets: Tensor) -> Tensor:
    """Average, over the images with a label, the precision among all that score as high or higher."""
    columns = []
    for of_label, target in zip(scores.T, targets.T, strict=True):
        positive = weights * target
        precision = _at_least(positive, of_label) / _at_least(weights, of_label).clamp(min=1)
        columns.append((positive * precision).sum(1) / positive.sum(1))
    return torch.stack(columns, dim=1)


def auroc(weights: Tensor, scores: Tensor, targets: Tensor) -> Tensor:
    """Return how often one with the label (n, 1) scores higher than one without; equal scores count half."""
    positive, negative, scores = weights * targets[:, 0], weights * (1 - targets[:, 0]), scores[:, 0]
    total = positive.sum(1, keepdim=True)
    higher = (_at_least(positive, scores) + total - _at_least(positive, -scores)) / 2
    return (negative * higher / total).sum(1, keepdim=True) / negative.sum(1, keepdim=True)


def f1(weights: Tensor, scores: Tensor, targets: Tensor) -> Tensor:
    predicted = (scores > 0.5).float()
    values = 2 * (weights @ (predicted * targets)) / (weights @ (predicted + targets))
    return values.where(weights @ targets > 0, torch.nan)  # as of precision


def r2(weights: Tensor, predicted: Tensor, targets: Tensor) -> Tensor:
    """Return the share of the variance that is explained."""
    variance = _covariance(weights, targets, targets)
    return 1 - _mean(weights, (predicted - targets).square()) / variance.where(variance > 0, torch.nan)


def mae(weights: Tensor, predicted: Tensor, targets: Tensor) -> Tensor:
    return _mean(weights, (predicted - targets).abs())


def correlation(weights: Tensor, predicted: Tensor, targets: Tensor) -> Tensor:
    spread = _covariance(weights, predicted, predicted) * _covariance(weights, targets, targets)
    return _covariance(weights, predicted, targets) / spread.sqrt()


def _mean(weights: Tensor, x: Tensor) -> Tensor:
    return weights @ x / weights.sum(1, keepdim=True)


def _covariance(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x[:1], y - y[:1]  # the covariance of equal numbers is exactly 0
    return _mean(weights, x * y) - _mean(weights, x) * _mean(weights, y)


# What outputs are judged by; the first decides.
METRICS: dict[Task, dict[str, Metric]] = {
    "multiclass": {"AUROC": auroc},  # of two classes
    "multilabel": {"AP": average_precision, "F1": f1},
    "regression": {"R²": r2, "MAE": mae, "correlation": correlation},
}
Title = Literal["top-1", "mAP", "R²"]
TITLES: dict[Task, Title] = {
    "multiclass": "top-1",
    "multilabel": "mAP",
    "regression": "R²",
}


def number_text(value: float) -> str:
    """Return a number with three digits, or all of a large one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}"


@dataclass(frozen=True)
class Estimate:
    """A figure of one column with its 95 % confidence interval over images."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = map(number_text, (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


def measure(task: Task, images: NDArray[np.int64], outputs: Tensor, targets: Tensor) -> list[Measured]:
    """Return all figures of outputs (n, c) of images; the first decides."""
    parts = [outputs.cpu().double(), targets.cpu().double()]
    return [
        Measured(title=title, images=images, parts=parts, figure=metric)
        for title, metric in METRICS[task].items()
    ]


def estimates(figure: Measured) -> list[Estimate | None]:
    """Return the figure of each column, None without anything to judge by."""
    limits = figure.draws.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.double), 0)
    rows = torch.stack([figure.columns, *limits], dim=1).tolist()
    return [None if math.isnan(row[0]) else Estimate(*row) for row in rows]

"""Figures of several labels an image, of two classes, and of numbers, with how sure they are.

Each is a function of weights of the images (r, n), such as those of a bootstrap, and of outputs and targets
(n, c). It returns (r, c), NaN where a column has nothing to judge by. An output is the score of a label, from
0 to 1, or a number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.commands import Task
from dino_vit.eval.accuracy import Measured, resample_weights

_WEIGHTS = 2**22  # in memory at a time
Rows = NDArray[np.int64]
Metric = Callable[[Tensor, Tensor, Tensor], Tensor]


def average_precision(weights: Tensor, scores: Tensor, targets: Tensor) -> Tensor:
    """Average, over the images with a label, the precision among all that score as high or higher."""

    def of_label(scores: Tensor, targets: Tensor) -> Tensor:
        ordered, order = scores.sort(descending=True)
        last = torch.searchsorted(-ordered, -ordered, right=True) - 1  # rank of the last with the same score
        images, positive = weights[:, order], weights[:, order] * targets[order]
        precision = positive.cumsum(1) / images.cumsum(1).clamp(min=1)
        return (positive * precision[:, last]).sum(1) / positive.sum(1)

    return torch.stack(list(map(of_label, scores.T, targets.T)), dim=1)


def auroc(weights: Tensor, scores: Tensor, targets: Tensor) -> Tensor:
    """Return how often an image with the label scores higher than one without; equal scores count half."""

    def of_label(scores: Tensor, targets: Tensor) -> Tensor:
        ordered, order = scores.sort()
        positive, negative = weights[:, order] * targets[order], weights[:, order] * (1 - targets[order])
        below = F.pad(negative.cumsum(1), (1, 0))
        lower, upto = (below[:, torch.searchsorted(ordered, ordered, right=end)] for end in (False, True))
        return (positive * (lower + upto) / 2).sum(1) / (positive.sum(1) * negative.sum(1))

    return torch.stack(list(map(of_label, scores.T, targets.T)), dim=1)


def f1(weights: Tensor, scores: Tensor, targets: Tensor) -> Tensor:
    predicted = (scores > 0.5).float()
    return 2 * (weights @ (predicted * targets)) / (weights @ (predicted + targets))


def r2(weights: Tensor, predicted: Tensor, targets: Tensor) -> Tensor:
    """Return the share of the variance that is explained."""
    errors = weights @ (predicted - targets).square()
    return 1 - errors / (_variance(weights, targets) * weights.sum(1, keepdim=True))


def mae(weights: Tensor, predicted: Tensor, targets: Tensor) -> Tensor:
    return weights @ (predicted - targets).abs() / weights.sum(1, keepdim=True)


def correlation(weights: Tensor, predicted: Tensor, targets: Tensor) -> Tensor:
    spread = _variance(weights, predicted) * _variance(weights, targets)
    return _covariance(weights, predicted, targets) / spread.sqrt()


def _covariance(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    x, y, share = x - x[:1], y - y[:1], weights / weights.sum(1, keepdim=True)
    return share @ (x * y) - (share @ x) * (share @ y)


def _variance(weights: Tensor, x: Tensor) -> Tensor:
    """Return the variance of each column, NaN where there is none."""
    variance = _covariance(weights, x, x)
    return variance.where(variance > 0, torch.nan)  # of one value it is 0, as x - x[:1] is


# What images are judged by; the first decides.
METRICS: dict[Task, dict[str, Metric]] = {
    "multilabel": {"AP": average_precision, "F1": f1},
    "regression": {"R²": r2, "MAE": mae, "correlation": correlation},
}
TITLES: dict[Task, str] = {"multiclass": "top-1", "multilabel": "mAP", "regression": "R²"}


def number_text(value: float) -> str:
    """Return a number with three digits, or all of a large one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}"


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % confidence interval over images."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = map(number_text, (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


@dataclass(frozen=True, kw_only=True)
class MeasuredColumns(Measured):
    """A metric of outputs and targets, its parts: the mean of the columns that have something to judge by."""

    figure: Metric

    @property
    def value(self) -> float:
        return float(self.values.nanmean())

    @property
    def values(self) -> Tensor:
        return self._of(torch.ones(1, len(self.images)))[0]

    def resampled(self) -> Tensor:
        return self._resamples.nanmean(1)

    @property
    def estimates(self) -> list[Estimate | None]:
        """The figure of each column, None without anything to judge by."""
        limits = self._resamples.nanquantile(torch.tensor([0.025, 0.975], dtype=self._resamples.dtype), 0)
        rows = zip(self.values.tolist(), *limits.tolist(), strict=True)
        return [None if math.isnan(row[0]) else Estimate(*row) for row in rows]

    @property
    def standard_error(self) -> float:
        """That of the mean, in per cent."""
        weights = torch.stack([*islice(resample_weights(len(self.images)), 100)])
        return 100 * float(self._of(weights).nanmean(1).std())

    @property
    def mean(self) -> Estimate:
        interval = self.interval
        return Estimate(interval.percent / 100, interval.low / 100, interval.high / 100)

    @cached_property
    def _resamples(self) -> Tensor:
        """The figures of all columns of images drawn with replacement, (r, c)."""
        weights, size = resample_weights(len(self.images)), max(1, _WEIGHTS // len(self.images))
        blocks = iter(lambda: list(islice(weights, size)), [])
        return torch.cat([self._of(torch.stack(block)) for block in blocks])

    def _of(self, weights: Tensor) -> Tensor:
        return self.figure(weights.to(self.parts[0].dtype), *self.parts)


def measure(metric: Metric, title: str, images: Rows, outputs: Tensor, targets: Tensor) -> MeasuredColumns:
    """Measure outputs (n, c) of images."""
    parts = [outputs.cpu().double(), targets.cpu().double()]
    return MeasuredColumns(title=title, images=images, parts=parts, figure=metric)


def measure_main(task: Task, title: str, images: Rows, outputs: Tensor, targets: Tensor) -> MeasuredColumns:
    """Measure what decides: the mean AP of labels, the mean R² of numbers."""
    metric = next(iter(METRICS[task].values()))
    return measure(metric, f"{title} {TITLES[task]}", images, outputs, targets)


def require_value(measured: MeasuredColumns) -> MeasuredColumns:
    """Raise an error if no column has anything to judge by."""
    if math.isnan(measured.value):
        what = f"the {len(measured.images):,} images to judge by have no labels, or all the same numbers"
        raise ValueError(f"{what}: give more images (or select=source, if heads are chosen by so few)")
    return measured

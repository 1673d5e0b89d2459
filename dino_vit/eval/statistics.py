"""Figures with how sure they are, and whether two of the same images differ.

Metrics take weights of the images (r, n), such as those of a bootstrap, and outputs and targets (n, c). They
return (r, c), NaN where a column has nothing to judge by. An output is the score of a label, from 0 to 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Binomial

from dino_vit.config.settings import Task, Title

Z = NormalDist().inv_cdf(0.975)  # half the width of a 95 % confidence interval, in standard errors
RESAMPLES = 1000  # of the images
TOP_K = 5  # of fewer classes, or as many, the right one is always among the first five
_WEIGHTS = 2**22  # of images, in memory at a time


@dataclass(frozen=True)
class Figure:
    """A number in per cent with its 95 % confidence interval over images."""

    value: float
    low: float
    high: float
    images: int
    correct: int | None = None  # images that are right, of a share of images

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def as_json(self) -> dict[str, float]:
        """Return what files of results hold."""
        return {name: round(number, 4) for name, number in asdict(self).items() if number is not None}


def wilson_interval(share: float, images: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share of images, which is valid near 0 and 1 too (1927)."""
    middle = (share + Z * Z / (2 * images)) / (1 + Z * Z / images)
    reach = Z / (1 + Z * Z / images) * math.sqrt(share * (1 - share) / images + (Z / (2 * images)) ** 2)
    # At the ends the bound is the share itself up to rounding.
    return 0.0 if share == 0 else middle - reach, 1.0 if share == 1 else middle + reach


def accuracy(correct: int, images: int) -> Figure:
    """Return the accuracy of `correct` predictions out of `images`, with Wilson's interval."""
    if not images:
        raise ValueError("none of the images to evaluate on can be read")
    low, high = wilson_interval(correct / images, images)
    return Figure(100 * correct / images, 100 * low, 100 * high, images, correct=correct)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The classes that images are taken for, as numbers of `classes`; of those that could be read."""

    images: NDArray[np.int64]  # (n,), in the source
    ranked: NDArray[np.int64]  # (n, at least 1), best first
    targets: NDArray[np.int64]  # (n,)
    classes: Sequence[str]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which images were classified rightly."""
        return self.ranked[:, 0] == self.targets

    def top(self, k: int) -> Figure:
        """Return how often the class is among the first k."""
        correct = (self.ranked[:, :k] == self.targets[:, None]).any(axis=1)
        return accuracy(int(correct.sum()), len(correct))

    def mean_of_classes(self) -> Figure:
        """Return the mean of the classes' accuracies, as Pets, Flowers and Aircraft are published."""
        present, targets = torch.unique(torch.from_numpy(self.targets), return_inverse=True)

        def metric(weights: Tensor, right: Tensor, targets: Tensor) -> Tensor:
            counts, correct = (
                weights.new_zeros(len(weights), len(present)).index_add(1, targets, each)
                for each in (weights, weights * right)
            )
            return correct / counts

        parts = [torch.from_numpy(self.right).double(), targets]
        return PerImageMetric(title="mean of classes", images=self.images, parts=parts, metric=metric).figure

    def per_class(self) -> dict[str, Figure]:
        """Return the accuracy of each class that an image has."""
        present, counts = np.unique(self.targets, return_counts=True)
        correct = np.bincount(self.targets[self.right], minlength=len(self.classes))[present]
        rows = zip(present.tolist(), correct.tolist(), counts.tolist(), strict=True)
        return {self.classes[target]: accuracy(right, images) for target, right, images in rows}


def largest_class(targets: NDArray[np.int64], classes: Sequence[str]) -> tuple[str, float]:
    """Return the largest class, and what always guessing it comes to in per cent."""
    counts = np.bincount(targets, minlength=len(classes))
    return classes[int(counts.argmax())], 100 * int(counts.max()) / max(len(targets), 1)


@dataclass(frozen=True, kw_only=True)
class PerImageMetric:
    """A figure of a backbone on images, with what each image contributes.

    `metric` takes weights of the images (r, n), such as those of a bootstrap, and the parts. It returns
    (r, c), NaN where a column has nothing to judge by; what counts is the mean of the others, from 0 to 1.
    """

    title: str
    images: NDArray[np.int64]  # (n,), in the source
    parts: Sequence[Tensor]  # (n, ...) each, on the CPU
    metric: Callable[..., Tensor]

    def subset(self, images: NDArray[np.int64]) -> "PerImageMetric":
        """Return the same of some of the images, which must be among them, in the order given."""
        order = np.argsort(self.images)
        rows = torch.from_numpy(order[np.searchsorted(self.images[order], images)])
        return replace(self, images=images, parts=[part[rows] for part in self.parts])

    @property
    def mean(self) -> float:
        return float(self.columns.nanmean())

    @property
    def columns(self) -> Tensor:
        return self.metric(torch.ones(1, len(self.images), dtype=torch.double), *self.parts)[0]

    @cached_property
    def figure(self) -> Figure:
        if self.parts[0].dtype == torch.bool:  # as of any accuracy, not that of a bootstrap
            return accuracy(int(self.parts[0].sum()), len(self.images))
        return Figure(100 * self.mean, *percent_interval(self.resampled()), len(self.images))

    @property
    def column_figures(self) -> list[Figure | None]:
        """The figure of each column, None without anything to judge by."""
        limits = self.draws.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.double), 0)
        rows, images = (100 * torch.stack([self.columns, *limits], dim=1)).tolist(), len(self.images)
        return [None if math.isnan(x) else Figure(x, low, high, images) for x, low, high in rows]

    def resampled(self) -> Tensor:
        return self.draws.nanmean(1)

    @cached_property
    def draws(self) -> Tensor:
        return self.draw(RESAMPLES)

    def draw(self, resamples: int) -> Tensor:
        """Return all columns for images drawn with replacement; the draws are the same for as many images."""
        weights = _resample_weights(len(self.images), resamples)
        return torch.cat([self.metric(block, *self.parts) for block in weights])


def _resample_weights(images: int, resamples: int) -> Iterator[Tensor]:
    """Yield how often each of so many images is drawn, (r, images), for some resamples at a time."""
    generator, size = torch.Generator().manual_seed(0), max(1, _WEIGHTS // images)
    for start in range(0, resamples, size):
        rows = torch.randint(images, (min(size, resamples - start), images), generator=generator)
        once = torch.ones((), dtype=torch.double).expand_as(rows)
        yield torch.zeros(rows.shape, dtype=torch.double).scatter_add_(1, rows, once)


def summed(figure: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Turn a figure of the sums of parts over images into a metric of weights and parts."""

    def metric(weights: Tensor, *parts: Tensor) -> Tensor:
        return figure(*(weights @ part.double() for part in parts)).view(len(weights), -1)

    return metric


def measured_share(title: str, images: NDArray[np.int64], shares: Tensor) -> PerImageMetric:
    """Return the mean of what each image has (n,): from 0 to 1, or whether it was judged rightly."""
    metric = summed(lambda total, count: total / count)
    return PerImageMetric(title=title, images=images, parts=[shares, torch.ones(len(shares))], metric=metric)


def percent_interval(resampled: Tensor) -> tuple[float, float]:
    return float(100 * resampled.nanquantile(0.025)), float(100 * resampled.nanquantile(0.975))


@dataclass(frozen=True)
class Difference:
    """The first figure minus the second, in points, and how probable so large a one is by chance."""

    points: float
    low: float
    high: float
    p: float


def difference(first: PerImageMetric, second: PerImageMetric) -> Difference:
    """Compare two backbones on the images that both have judged.

    Where an image is right or wrong, p is of the exact test of McNemar, otherwise of the bootstrap: twice
    the share of the resamples in which the difference has the other sign, or, where none has, of a normal
    distribution as wide as theirs, as so many cannot show how small it is. The interval is the bootstrap's.
    """
    images = np.intersect1d(first.images, second.images)
    first, second = first.subset(images), second.subset(images)
    resampled = first.resampled() - second.resampled()
    right, other = first.parts[0], second.parts[0]
    if right.dtype == torch.bool:
        p = mcnemar(int((right & ~other).sum()), int((other & ~right).sum()))
    else:
        beyond = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
        p = min(1.0, 2 * (beyond + 1) / (RESAMPLES + 1))
        if not beyond:
            tail = math.erfc(float(resampled.mean().abs() / resampled.std()) / math.sqrt(2))
            p = min(p, max(tail, 0.5 ** (len(images) - 1)))  # of few images no test can be surer
    return Difference(100 * (first.mean - second.mean), *percent_interval(resampled), p)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the probability of so uneven a split of the images that only one of two gets right.

    McNemar's test in its exact form: if both were as good, each such image would fall to either with 1/2.
    """
    splits = Binomial(only_first + only_second, torch.tensor(0.5, dtype=torch.double), validate_args=False)
    fewer = torch.arange(min(only_first, only_second) + 1, dtype=torch.double)
    logs: Tensor = splits.log_prob(fewer)  # type: ignore[no-untyped-call]
    return min(1.0, 2 * float(logs.exp().sum()))


Metric = Callable[[Tensor, Tensor, Tensor], Tensor]


def _at_least(weights: Tensor, scores: Tensor) -> Tensor:
    """Return for each image the weight of all that score as high or higher: (r, n)."""
    ordered, order = scores.sort(descending=True)
    last = torch.searchsorted(-ordered, -scores, right=True) - 1  # rank of the last with the same score
    return weights[:, order].cumsum(1)[:, last]


def average_precision(weights: Tensor, scores: Tensor, targets: Tensor) -> Tensor:
    """Average, over the images with a label, the precision among all that score as high or higher."""
    columns = []
    for column, target in zip(scores.T, targets.T, strict=True):
        positive = weights * target
        precision = _at_least(positive, column) / _at_least(weights, column).clamp(min=1)
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


# What outputs are judged by; the first decides.
METRICS: dict[Task, dict[str, Metric]] = {
    "multiclass": {"AUROC": auroc},  # of two classes
    "multilabel": {"AP": average_precision, "F1": f1},
}
TITLES: dict[Task, Title] = {"multiclass": "top-1", "multilabel": "mAP"}


def measure(task: Task, images: NDArray[np.int64], outputs: Tensor, targets: Tensor) -> list[PerImageMetric]:
    """Return all figures of outputs (n, c) of images; the first decides."""
    parts = [outputs.cpu().double(), targets.cpu().double()]
    return [
        PerImageMetric(title=title, images=images, parts=parts, metric=metric)
        for title, metric in METRICS[task].items()
    ]

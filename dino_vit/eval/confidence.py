"""How sure a figure is, and whether two backbones differ that judged the same images."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RESAMPLES = 1000  # of the images


class Interval(NamedTuple):
    """A figure in per cent with its 95 % confidence interval over images."""

    percent: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.percent:.2f} ({self.low:.2f} to {self.high:.2f})"


class Difference(NamedTuple):
    """The first figure minus the second, in points, and how probable so large a one is by chance."""

    points: float
    low: float
    high: float
    p: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure of a backbone on images, with what each image contributes.

    The figure, from 0 to 1, is a function of the sums of `parts` over the images.
    """

    title: str
    images: NDArray[np.int64]  # (n,), in the source
    parts: Sequence[Tensor]  # (n, ...) each
    figure: Callable[..., Tensor]

    def of(self, images: NDArray[np.int64]) -> "Measured":
        """Return the figure of some of the images, which must be among them, in the order given."""
        order = np.argsort(self.images)
        rows = torch.from_numpy(order[np.searchsorted(self.images[order], images)])
        parts = [part.cpu()[rows] for part in self.parts]
        return Measured(title=self.title, images=images, parts=parts, figure=self.figure)

    @property
    def value(self) -> float:
        return float(self.figure(*(part.cpu().double().sum(0) for part in self.parts)))

    @property
    def interval(self) -> Interval:
        return with_confidence(self.parts, self.figure)

    @property
    def right(self) -> Tensor | None:
        """Which images were judged rightly (n,), if an image is either right or wrong."""
        right, count = self.parts[0], self.parts[-1]
        is_share = len(self.parts) == 2 and right.ndim == 1 and bool((count == 1).all())
        return right.bool() if is_share and bool(((right == 0) | (right == 1)).all()) else None


def measured_share(title: str, images: NDArray[np.int64], shares: Tensor) -> Measured:
    """Return the mean of what each image has (n,), from 0 to 1, such as 1 if it was classified rightly."""
    parts = [shares.cpu().double(), torch.ones(len(shares), dtype=torch.double)]
    return Measured(title=title, images=images, parts=parts, figure=_mean)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    return total / count


def difference(first: Measured, second: Measured) -> Difference:
    """Compare two backbones on the images that both have judged.

    Where an image is right or wrong, p is of the exact test of McNemar, otherwise of the bootstrap: twice
    the share of the resamples in which the difference has the other sign. The interval is the bootstrap's.
    """
    images = np.intersect1d(first.images, second.images)
    first, second = first.of(images), second.of(images)
    resampled = torch.stack([a - b for a, b in zip(*map(_resampled, (first, second)), strict=True)])
    low, high = (float(100 * resampled.nanquantile(q)) for q in (0.025, 0.975))
    right, other = first.right, second.right
    if right is not None and other is not None:
        p = mcnemar(int((right & ~other).sum()), int((other & ~right).sum()))
    else:
        beyond = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
        p = min(1.0, 2 * (beyond + 1) / (RESAMPLES + 1))
    return Difference(100 * (first.value - second.value), low, high, p)


def _resampled(measured: Measured) -> Iterator[Tensor]:
    return resample(measured.parts, measured.figure)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the probability of so uneven a split of the images that only one of two gets right.

    McNemar's test in its exact form: if both were as good, each such image would fall to either with 1/2.
    """
    count, fewer = only_first + only_second, min(only_first, only_second)
    k = torch.arange(fewer + 1, dtype=torch.double)
    total = torch.tensor(float(count), dtype=torch.double)
    logs = torch.lgamma(total + 1) - torch.lgamma(k + 1) - torch.lgamma(total - k + 1)
    return min(1.0, 2 * float((logs - count * math.log(2)).exp().sum()))


def with_confidence(parts: Sequence[Tensor], figure: Callable[..., Tensor]) -> Interval:
    """Return a figure of sums over images, and its quantiles over images drawn with replacement."""
    resampled = torch.stack(list(resample(parts, figure)))
    low, high = (float(100 * resampled.nanquantile(q)) for q in (0.025, 0.975))
    return Interval(float(100 * figure(*(part.cpu().double().sum(0) for part in parts))), low, high)


def resample(parts: Sequence[Tensor], figure: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Yield a figure of images drawn with replacement; the draws are the same for as many images."""
    whole = [part.cpu().double() for part in parts]
    images = len(whole[0])
    generator = torch.Generator().manual_seed(0)
    for _ in range(RESAMPLES):
        rows = torch.randint(images, (images,), generator=generator)
        weights = rows.bincount(minlength=images).double()
        yield figure(*(torch.tensordot(weights, part, dims=1) for part in whole))

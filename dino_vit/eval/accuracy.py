"""Figures of backbones: how sure they are, and which of several is best by them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Binomial

from dino_vit.core.text import plural

RESAMPLES = 1000  # of the images
TOP_K = 5  # of fewer classes, or as many, the right one is always among the first five
CHANCE = 0.05  # how often a backbone as good as the best may look worse, whatever the number of backbones
_WEIGHTS = 2**22  # of images, in memory at a time
_Z = NormalDist().inv_cdf(0.975)  # of a 95 % confidence interval


@dataclass(frozen=True)
class Interval:
    """A figure in per cent with its 95 % confidence interval over images."""

    percent: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.percent:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Accuracy(Interval):
    """A share of correct predictions."""

    correct: int
    images: int


def accuracy(correct: int, images: int) -> Accuracy:
    """Return the accuracy of `correct` predictions out of `images`.

    The interval is Wilson's (1927), which is valid for few or all correct too.
    """
    if not images:
        raise ValueError("none of the images to evaluate on can be read")
    share = correct / images
    middle = (share + _Z * _Z / (2 * images)) / (1 + _Z * _Z / images)
    reach = _Z / (1 + _Z * _Z / images) * math.sqrt(share * (1 - share) / images + (_Z / (2 * images)) ** 2)
    # At the ends the bound is the share itself up to rounding.
    low = 0.0 if correct == 0 else middle - reach
    high = 1.0 if correct == images else middle + reach
    return Accuracy(100 * correct / images, 100 * low, 100 * high, correct, images)


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

    def top(self, k: int) -> Accuracy:
        """Return how often the class is among the first k."""
        correct = (self.ranked[:, :k] == self.targets[:, None]).any(axis=1)
        return accuracy(int(correct.sum()), len(correct))

    def figures(self) -> dict[str, Any]:
        """Return the top-1, top-5 and per-class accuracy for a results file, beside those of guesses.

        Top-5 is None where it is right whatever the answers.
        """
        present, counts = np.unique(self.targets, return_counts=True)
        correct = np.bincount(self.targets[self.right], minlength=len(self.classes))[present]
        rows = zip(present.tolist(), correct.tolist(), counts.tolist(), strict=True)
        return {
            "top1": self.top(1),
            "top5": self.top(TOP_K) if len(self.classes) > TOP_K else None,
            **trivial_baselines(self.targets, self.classes),
            "per_class": {self.classes[target]: accuracy(*of_class) for target, *of_class in rows},
        }

    def summary(self) -> str:
        """Return the top-1 and top-5 accuracy as a text, beside that of guesses."""
        top5 = f", top-5 {self.top(TOP_K)} %" if len(self.classes) > TOP_K else ""
        images, classes = plural(len(self.targets), "image"), plural(len(self.classes), "class", "classes")
        return f"top-1 {self.top(1)} %{top5} of {images} of {classes}; {self.guesses()}"

    def guesses(self) -> str:
        """Return the accuracy of guesses as a text."""
        trivial = trivial_baselines(self.targets, self.classes)
        name, percent = trivial["largest_class"].values()
        random = f"random guessing {trivial['chance']:.1f} %"
        return f"always guessing {name} scores {percent:.1f} %, {random}"


def trivial_baselines(targets: NDArray[np.int64], classes: Sequence[str]) -> dict[str, Any]:
    """Return what a guess by chance, and always the largest class, come to in per cent."""
    counts = np.bincount(targets, minlength=len(classes))
    largest = int(counts.argmax())
    percent = 100 * int(counts[largest]) / max(len(targets), 1)
    return {"chance": 100 / len(classes), "largest_class": {"name": classes[largest], "percent": percent}}


@dataclass(frozen=True)
class Difference:
    """The first figure minus the second, in points, and how probable so large a one is by chance."""

    points: float
    low: float
    high: float
    p: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure of a backbone on images, with what each image contributes.

    `figure` takes weights of the images (r, n), such as those of a bootstrap, and the parts. It returns
    (r, c), NaN where a column has nothing to judge by; what counts is the mean of the others, from 0 to 1.
    """

    title: str
    images: NDArray[np.int64]  # (n,), in the source
    parts: Sequence[Tensor]  # (n, ...) each, on the CPU
    figure: Callable[..., Tensor]

    def of(self, images: NDArray[np.int64]) -> "Measured":
        """Return the figure of some of the images, which must be among them, in the order given."""
        order = np.argsort(self.images)
        rows = torch.from_numpy(order[np.searchsorted(self.images[order], images)])
        return replace(self, images=images, parts=[part[rows] for part in self.parts])

    @property
    def value(self) -> float:
        return float(self.columns.nanmean())

    @property
    def columns(self) -> Tensor:
        return self.figure(torch.ones(1, len(self.images), dtype=torch.double), *self.parts)[0]

    @cached_property
    def interval(self) -> Interval:
        if self.parts[0].dtype == torch.bool:  # as of any accuracy, not that of a bootstrap
            exact = accuracy(int(self.parts[0].sum()), len(self.images))
            return Interval(exact.percent, exact.low, exact.high)
        return Interval(100 * self.value, *_quantiles(self.resampled()))

    def resampled(self) -> Tensor:
        return self.draws.nanmean(1)

    @cached_property
    def draws(self) -> Tensor:
        return self.draw(RESAMPLES)

    def draw(self, resamples: int) -> Tensor:
        """Return all columns for images drawn with replacement; the draws are the same for as many images."""
        weights = _resample_weights(len(self.images), resamples)
        return torch.cat([self.figure(block, *self.parts) for block in weights])


def _resample_weights(images: int, resamples: int) -> Iterator[Tensor]:
    """Yield how often each of so many images is drawn, (r, images), for some resamples at a time."""
    generator, size = torch.Generator().manual_seed(0), max(1, _WEIGHTS // images)
    for start in range(0, resamples, size):
        rows = torch.randint(images, (min(size, resamples - start), images), generator=generator)
        once = torch.ones((), dtype=torch.double).expand_as(rows)
        yield torch.zeros(rows.shape, dtype=torch.double).scatter_add_(1, rows, once)


def of_sums(figure: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a figure of the sums of parts over images as one of weights and parts."""

    def of_weights(weights: Tensor, *parts: Tensor) -> Tensor:
        return figure(*(weights @ part.double() for part in parts)).view(len(weights), -1)

    return of_weights


def measured_share(title: str, images: NDArray[np.int64], shares: Tensor) -> Measured:
    """Return the mean of what each image has (n,): from 0 to 1, or whether it was judged rightly."""
    figure = of_sums(lambda total, count: total / count)
    return Measured(title=title, images=images, parts=[shares, torch.ones(len(shares))], figure=figure)


def _quantiles(resampled: Tensor) -> tuple[float, float]:
    return float(100 * resampled.nanquantile(0.025)), float(100 * resampled.nanquantile(0.975))


def difference(first: Measured, second: Measured) -> Difference:
    """Compare two backbones on the images that both have judged.

    Where an image is right or wrong, p is of the exact test of McNemar, otherwise of the bootstrap: twice
    the share of the resamples in which the difference has the other sign, or, where none has, of a normal
    distribution as wide as theirs, as so many cannot show how small it is. The interval is the bootstrap's.
    """
    images = np.intersect1d(first.images, second.images)
    first, second = first.of(images), second.of(images)
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
    return Difference(100 * (first.value - second.value), *_quantiles(resampled), p)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the probability of so uneven a split of the images that only one of two gets right.

    McNemar's test in its exact form: if both were as good, each such image would fall to either with 1/2.
    """
    splits = Binomial(only_first + only_second, torch.tensor(0.5, dtype=torch.double), validate_args=False)
    fewer = torch.arange(min(only_first, only_second) + 1, dtype=torch.double)
    logs: Tensor = splits.log_prob(fewer)  # type: ignore[no-untyped-call]
    return min(1.0, 2 * float(logs.exp().sum()))


@dataclass(frozen=True)
class Pair:
    """Two backbones by one figure."""

    figure: str
    better: str
    other: str
    difference: Difference
    corrected_p: float  # its p, times the pairs by this figure (Bonferroni)


Figures = Mapping[str, Mapping[str, Measured]]  # by title, then by the name of the backbone


def compare_pairs(figures: Figures) -> list[Pair]:
    """Compare all pairs by every figure, image by image."""
    pairs = []
    for title, backbones in figures.items():
        best_first = sorted(backbones, key=lambda name: backbones[name].value, reverse=True)
        by_figure = list(combinations(best_first, 2))
        for better, other in by_figure:
            found = difference(backbones[better], backbones[other])
            pairs.append(Pair(title, better, other, found, min(1.0, len(by_figure) * found.p)))
    return pairs


def standings(figures: Figures, pairs: Sequence[Pair]) -> dict[str, tuple[str, ...]]:
    """Return who is best by each figure, followed by those not significantly worse on these images."""
    by_title = {}
    for title, backbones in figures.items():
        best = max(backbones, key=lambda name: backbones[name].value)
        others = [pair for pair in pairs if (pair.figure, pair.better) == (title, best)]
        by_title[title] = (best, *(pair.other for pair in others if pair.corrected_p >= CHANCE))
    return by_title


def verdict(by_title: Mapping[str, tuple[str, ...]]) -> str:
    """Say which backbone to take, or that it depends."""
    if not by_title:
        text = "There are no labels and no masks to judge by: use a folder for each class, or labels=FILE."
        return f"{text} The effective rank alone does not tell which features are better."
    top = [*by_title.values()]
    everywhere = [name for name in top[0] if all(name in names for names in top)]
    if everywhere:
        titles = " and ".join(by_title)
        if all(names == (everywhere[0],) for names in top):
            return f"Take {everywhere[0]}: on these images it is the best by {titles}."
        return f"Take {' or '.join(everywhere)}: on these images none is surely better by {titles}."
    wins = "; ".join(f"by {title} {best}" for title, (best, *_) in by_title.items())
    return f"It depends on the figure. The best is {wins}."

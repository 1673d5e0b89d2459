"""Figures of backbones: how sure they are, which of several is best by them, and their JSON files."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Binomial

from dino_vit.core.storage import write_bytes

RESAMPLES = 1000  # of the images
CHANCE = 0.05  # how often a backbone as good as the best may look worse, whatever the number of backbones
_Z = NormalDist().inv_cdf(0.975)  # of a 95 % confidence interval


class Accuracy(NamedTuple):
    """A share of correct predictions in per cent, with its 95 % confidence interval."""

    percent: float
    low: float
    high: float
    correct: int
    images: int

    def __str__(self) -> str:
        return f"{self.percent:.2f} % ({self.low:.2f} to {self.high:.2f})"


class Predictions(NamedTuple):
    """The class of each image that could be read, as numbers of `classes`."""

    images: NDArray[np.int64]  # in the source
    predicted: NDArray[np.int64]
    targets: NDArray[np.int64]
    classes: tuple[str, ...]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which images were classified rightly."""
        return self.predicted == self.targets


def accuracy(correct: int, images: int) -> Accuracy:
    """Return the accuracy of `correct` predictions out of `images`; NaN for none.

    The interval is Wilson's (1927), which is valid for few or all correct too.
    """
    if not images:
        return Accuracy(math.nan, 0.0, 100.0, correct, images)
    share = correct / images
    middle = (share + _Z * _Z / (2 * images)) / (1 + _Z * _Z / images)
    reach = _Z / (1 + _Z * _Z / images) * math.sqrt(share * (1 - share) / images + (_Z / (2 * images)) ** 2)
    # At the ends the bound is the share itself up to rounding.
    low = 0.0 if correct == 0 else middle - reach
    high = 1.0 if correct == images else middle + reach
    return Accuracy(100 * correct / images, 100 * low, 100 * high, correct, images)


def top_k_accuracy(ranked: Tensor, labels: Tensor, k: int = 1) -> Accuracy:
    """Return how often the label is among the first k of `ranked` (n, at least 1), best first."""
    correct = (ranked[:, :k] == labels[:, None]).any(dim=1)
    return accuracy(int(correct.sum()), len(labels))


def per_class_accuracy(ranked: Tensor, labels: Tensor) -> dict[int, Accuracy]:
    """Return the top-1 accuracy on the images of each label, by label."""
    classes, row = torch.unique(labels, return_inverse=True)
    correct = torch.bincount(row[ranked[:, 0] == labels], minlength=len(classes))
    counts = torch.bincount(row, minlength=len(classes))
    rows = zip(classes.tolist(), correct.tolist(), counts.tolist(), strict=True)
    return {label: accuracy(of_label, count) for label, of_label, count in rows}


def classification_results(ranked: Tensor, targets: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """Return the top-1, top-5 and per-class accuracy for a results file, beside those of guesses."""
    per_class = per_class_accuracy(ranked, targets)
    return {
        "top1": top_k_accuracy(ranked, targets, 1)._asdict(),
        "top5": top_k_accuracy(ranked, targets, 5)._asdict(),
        **trivial_baselines(targets, classes),
        "per_class": {classes[target]: of_class._asdict() for target, of_class in per_class.items()},
    }


def trivial_baselines(targets: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """Return what a guess by chance, and always the largest class, come to in per cent."""
    counts = torch.bincount(targets, minlength=len(classes))
    largest = int(counts.argmax())
    share = 100 * int(counts[largest]) / max(len(targets), 1)
    return {"chance": 100 / len(classes), "largest_class": {"name": classes[largest], "percent": share}}


def summary(results: Mapping[str, Any], classes: int) -> str:
    """Return the top-1 and top-5 accuracy of a results file as a text."""
    top1, top5 = Accuracy(**results["top1"]), Accuracy(**results["top5"])
    accuracies = f"top-1 {top1}, top-5 {top5} of {top1.images:,} images of {classes} classes"
    return f"{accuracies}; {describe_guess(results)}"


def describe_guess(results: Mapping[str, Any]) -> str:
    """Return the accuracy of guesses as a text."""
    largest = results["largest_class"]
    guess = f"always guessing {largest['name']}, the largest class, is right in {largest['percent']:.1f} %"
    return f"{guess}, chance in {results['chance']:.1f} %"


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

    def __neg__(self) -> "Difference":
        return Difference(-self.points, -self.high, -self.low, self.p)


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
        return Interval(100 * self.value, *_quantiles(self.resampled()))

    def resampled(self) -> Tensor:
        """Return the figure of images drawn with replacement; the draws are the same for as many images."""
        parts = [part.cpu().double() for part in self.parts]
        images = len(parts[0])
        generator = torch.Generator().manual_seed(0)
        figures = []
        for _ in range(RESAMPLES):
            rows = torch.randint(images, (images,), generator=generator)
            weights = rows.bincount(minlength=images).double()
            figures.append(self.figure(*(torch.tensordot(weights, part, dims=1) for part in parts)))
        return torch.stack(figures)

    @property
    def right(self) -> Tensor | None:
        """Which images were judged rightly (n,), if an image is either right or wrong."""
        shares = self.parts[0]
        is_share = self.figure is _mean and bool(((shares == 0) | (shares == 1)).all())
        return shares.bool() if is_share else None


def measured_share(title: str, images: NDArray[np.int64], shares: Tensor) -> Measured:
    """Return the mean of what each image has (n,), from 0 to 1, such as 1 if it was classified rightly."""
    parts = [shares.cpu().double(), torch.ones(len(shares), dtype=torch.double)]
    return Measured(title=title, images=images, parts=parts, figure=_mean)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    return total / count


def with_confidence(parts: Sequence[Tensor], figure: Callable[..., Tensor]) -> Interval:
    """Return a figure of sums over images with its confidence interval."""
    return Measured(title="", images=np.arange(len(parts[0])), parts=parts, figure=figure).interval


def _quantiles(resampled: Tensor) -> tuple[float, float]:
    return float(100 * resampled.nanquantile(0.025)), float(100 * resampled.nanquantile(0.975))


def difference(first: Measured, second: Measured) -> Difference:
    """Compare two backbones on the images that both have judged.

    Where an image is right or wrong, p is of the exact test of McNemar, otherwise of the bootstrap: twice
    the share of the resamples in which the difference has the other sign. The interval is the bootstrap's.
    """
    images = np.intersect1d(first.images, second.images)
    first, second = first.of(images), second.of(images)
    resampled = first.resampled() - second.resampled()
    right, other = first.right, second.right
    if right is not None and other is not None:
        p = mcnemar(int((right & ~other).sum()), int((other & ~right).sum()))
    else:
        beyond = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
        p = min(1.0, 2 * (beyond + 1) / (RESAMPLES + 1))
    return Difference(100 * (first.value - second.value), *_quantiles(resampled), p)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the probability of so uneven a split of the images that only one of two gets right.

    McNemar's test in its exact form: if both were as good, each such image would fall to either with 1/2.
    """
    splits = Binomial(only_first + only_second, torch.tensor(0.5, dtype=torch.double), validate_args=False)
    fewer = torch.arange(min(only_first, only_second) + 1, dtype=torch.double)
    logs: Tensor = splits.log_prob(fewer)  # type: ignore[no-untyped-call]
    return min(1.0, 2 * float(logs.exp().sum()))


class Pair(NamedTuple):
    """Two backbones by one figure."""

    figure: str
    better: str
    other: str
    difference: Difference


Figures = Mapping[str, Mapping[str, Measured]]  # by title, then by the name of the backbone


def compare_pairs(figures: Figures) -> list[Pair]:
    """Compare all pairs by every figure, image by image."""
    pairs = []
    for title, backbones in figures.items():
        for first, second in combinations(backbones, 2):
            gain = difference(backbones[first], backbones[second])
            pair = Pair(title, first, second, gain)
            pairs.append(pair if gain.points >= 0 else Pair(title, second, first, -gain))
    return pairs


def standings(figures: Figures, pairs: Sequence[Pair]) -> dict[str, tuple[str, ...]]:
    """Return who is best by each figure, followed by those who cannot be told from the best on these images.

    The best is compared with all others, so each p is multiplied by their number (Bonferroni).
    """
    by_title = {}
    for title, backbones in figures.items():
        limit = CHANCE / max(1, len(backbones) - 1)
        best = max(backbones, key=lambda name: backbones[name].value)
        p_of = {frozenset(pair[1:3]): pair.difference.p for pair in pairs if pair.figure == title}
        tied = [name for name in backbones if name != best and p_of[frozenset((best, name))] >= limit]
        by_title[title] = (best, *tied)
    return by_title


def verdict(by_title: Mapping[str, tuple[str, ...]]) -> str:
    """Say which backbone to take, or that it depends."""
    top = by_title.values()
    everywhere = [name for name in dict.fromkeys(sum(top, ())) if all(name in names for names in top)]
    if not everywhere:
        wins = "; ".join(f"by {title} {names[0]}" for title, names in by_title.items())
        return f"It depends on what you need. The best is {wins}."
    wins_of = {name: sum(names[0] == name for names in top) for name in everywhere}
    best = max(everywhere, key=lambda name: wins_of[name])
    tied = [name for name in everywhere if name != best]
    quality = "the best" if wins_of[best] == len(by_title) else "the best or as good as the best"
    text = f"Take {best}: it is {quality} by {' and '.join(by_title)}."
    if tied:
        text += f" On these images {' and '.join(tied)} cannot be told from it."
    return text


def results_path(name: str, *, weights: str, output: str | None = None) -> Path:
    """Return `output`, or eval/NAME.json in the run's folder, or a file beside the weights."""
    if output is not None:
        return Path(output)
    from dino_vit.weights.reading import is_name  # a run that trains reads no weights

    if is_name(weights):
        return Path(f"{weights.replace(':', '-').replace('/', '-')}.{name}.json")
    path = Path(weights)
    if path.is_dir():
        return path / "eval" / f"{name}.json"
    if path.parent.name == "checkpoints":
        return path.parent.parent / "eval" / f"{path.stem}.{name}.json"
    return path.with_name(f"{path.stem}.{name}.json")


def write_results(path: Path, results: Mapping[str, object]) -> None:
    """Write results as JSON atomically."""
    write_bytes(path, (json.dumps(results, indent=2, allow_nan=False) + "\n").encode())

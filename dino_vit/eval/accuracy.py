"""Accuracies with confidence intervals, and the JSON files that hold them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.storage import write_bytes

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

    def by_image(self) -> dict[int, tuple[str, bool]]:
        """Return the predicted class of each image, and whether it is right."""
        rows = zip(self.images.tolist(), self.predicted, self.right.tolist(), strict=True)
        return {image: (self.classes[number], right) for image, number, right in rows}


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

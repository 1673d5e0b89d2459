"""Accuracies with their uncertainty: how many answers are right, of how many, and what that is worth."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor


class Accuracy(NamedTuple):
    """A share of right answers in per cent, with its 95 % confidence interval."""

    percent: float
    low: float
    high: float
    correct: int
    images: int

    def __str__(self) -> str:
        return f"{self.percent:.2f} % ({self.low:.2f} to {self.high:.2f})"


def accuracy(correct: int, images: int) -> Accuracy:
    """Return the accuracy of `correct` right answers about so many images; NaN for none."""
    percent = 100 * correct / images if images else math.nan
    low, high = wilson_interval(correct, images)
    return Accuracy(percent, 100 * low, 100 * high, correct, images)


def top_k_accuracy(ranked: Tensor, labels: Tensor, k: int = 1) -> Accuracy:
    """Count as right where the label is among the first k of the ranked ones, (n, at least 1), best first."""
    right = (ranked[:, :k] == labels[:, None]).any(dim=1)
    return accuracy(int(right.sum()), len(labels))


def per_class_accuracy(ranked: Tensor, labels: Tensor) -> dict[int, Accuracy]:
    """Return the top-1 accuracy of the queries of each label, by label."""
    classes, place = torch.unique(labels, return_inverse=True)
    right = torch.zeros(len(classes), dtype=torch.long, device=labels.device)
    right = right.index_add(0, place, (ranked[:, 0] == labels).long())
    counts = torch.bincount(place, minlength=len(classes))
    rows = zip(classes.tolist(), right.tolist(), counts.tolist(), strict=True)
    return {label: accuracy(correct, count) for label, correct, count in rows}


def wilson_interval(correct: int, count: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the shares between which the true one lies; honest for few answers and for all or none right.

    Wilson's interval of a binomial share (1927).
    """
    if not 0 <= correct <= count:
        raise ValueError(f"{correct} right answers out of {count} is no share")
    if count == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    # At the ends the bound is the share itself, but for rounding.
    low = 0.0 if correct == 0 else middle - reach
    high = 1.0 if correct == count else middle + reach
    return low, high

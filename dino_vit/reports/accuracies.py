"""The accuracies of a run beside those of earlier steps and of what needs no training."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from dino_vit.config.sections import BASELINES
from dino_vit.eval.online import OnlineFigures
from dino_vit.eval.statistics import Z, mcnemar, wilson_interval
from dino_vit.reports.metrics import Baseline, MetricsRecord

UNLIKELY = 0.01  # the chance of a difference that is taken for real, whatever the number of differences
QUERIES = 1000  # where a run did not record how many images an accuracy is of
KnnFigure = Literal["knn", "levelled_knn"]  # by the CLS token, by CLS and levelled cells


class AccuracyChange(NamedTuple):
    """A k-NN accuracy beside another one on the same images."""

    now: OnlineFigures
    before: OnlineFigures
    images: int
    figure: KnnFigure = "knn"

    def both(self, suffix: str = "") -> list[Any]:
        """Return the accuracy now and before, or what is recorded of it under a suffix."""
        return [getattr(each, self.figure + suffix) for each in (self.now, self.before)]

    @property
    def rise(self) -> float:
        """How much higher it is, in points; NaN if one is not measured."""
        now, before = self.both()
        return math.nan if now is None or before is None else now - before

    @property
    def p(self) -> float:
        """The probability that networks which are equally good differ as much on these images."""
        now, before = (int(answers, 16) if answers else None for answers in self.both("_answers"))
        if now is not None and before is not None:
            return mcnemar((now & ~before).bit_count(), (before & ~now).bit_count())
        # Without recorded answers, as if the two were of different images, which is cautious.
        squares = [error * error for error in self.both("_error") if error is not None]
        if len(squares) == 2:
            return math.erfc(abs(self.rise) / math.sqrt(2 * sum(squares))) if any(squares) else 1.0
        shares = (min(max(percent / 100, 0.0), 1.0) for percent in self.both())
        variance = sum(share * (1 - share) for share in shares) / self.images
        return math.erfc(abs(self.rise) / (100 * math.sqrt(2 * variance))) if variance else 1.0

    @property
    def rose(self) -> bool:
        """Whether it is higher, and not by chance."""
        return self.rise > 0 and self.p < UNLIKELY

    def fell(self, among: int = 1) -> bool:
        """Tell whether it is lower, and not by chance; the other was chosen among so many (Bonferroni)."""
        return self.rise < 0 and among * self.p < UNLIKELY


def better_baseline(baseline: Baseline) -> tuple[str, float] | None:
    """Return the name and the k-NN accuracy of the better of pixels and edges, if any is known."""
    levels = baseline.figures()
    known = [(levels[name], name) for name in BASELINES if name in levels]
    return max(known)[::-1] if known else None


def evaluations_of(history: Sequence[MetricsRecord]) -> list[MetricsRecord]:
    return [metrics for metrics in history if metrics.rankme is not None and math.isfinite(metrics.rankme)]


def accuracies(metrics: MetricsRecord, baseline: Baseline) -> dict[str, str]:
    """Return both k-NN accuracies of a record and what they compare with, as far as they were measured."""
    name, level = better_baseline(baseline) or ("", None)
    levels = {
        "by the CLS token": knn_text(metrics, baseline, "knn"),
        "before training": baseline.knn,
        "by CLS and levelled cells": knn_text(metrics, baseline, "levelled_knn"),
        "the same before training": baseline.levelled_knn,
        f"{name} without a network": level,
        "chance": baseline.chance,
    }
    return {
        name: level if isinstance(level, str) else f"{level:.1f} %"
        for name, level in levels.items()
        if level not in (None, "")
    }


def describe_knn(baseline: Baseline) -> str:
    """Say what k-NN accuracies are, and of which images."""
    kind = "accuracy" if baseline.metric == "top-1" else baseline.metric
    # Photos of one place or moment are easy neighbours: on new images the figure may be far lower.
    images = {True: "training images", False: "held-out images", None: "images"}[baseline.leave_one_out]
    images = f"{baseline.queries:,} {images}" if baseline.queries else images
    return f"k-NN {kind} on {images}, each labelled by those most similar to it"


def knn_text(metrics: MetricsRecord, baseline: Baseline, figure: KnnFigure) -> str:
    """Return a k-NN accuracy with its 95 % confidence; nothing without labels."""
    knn, error = getattr(metrics, figure), getattr(metrics, f"{figure}_error")
    if knn is None:
        return ""
    margin = Z * (error or 0.0)
    if error is None:
        low, high = wilson_interval(min(max(knn / 100, 0.0), 1.0), baseline.queries or QUERIES)
        margin = 100 * (high - low) / 2
    return f"{knn:.1f} ± {margin:.1f} %"


def accuracy_text(metrics: MetricsRecord, baseline: Baseline) -> str:
    """Return the k-NN accuracy of a record beside what it compares with; nothing without labels."""
    levels = ", ".join(f"{name} {level}" for name, level in accuracies(metrics, baseline).items())
    return "" if metrics.knn is None else f"{describe_knn(baseline)}: {levels}"

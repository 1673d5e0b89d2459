"""The accuracies of a run beside those before training and those of baselines."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dino_vit.config.sections import BASELINES
from dino_vit.eval.statistics import Z, mcnemar, wilson_interval
from dino_vit.reports.metrics import Baseline, MetricsRecord

UNLIKELY = 0.01  # the chance of a difference that is taken for real, whatever the number of accuracies
QUERIES = 1000  # where a run did not record how many images an accuracy is of
FIGURES = {"rankme": "effective rank", "knn": "k-NN", "best_knn": "best k-NN", "probe": "ridge probe"}
# The figures that a k-NN accuracy is compared with.
COMPARED = {
    "pixels": "pixels",
    "gradients": "gradients",
    "colours": "colours alone",
    "largest_class": "largest class",
    "chance": "chance",
}


class Reading(NamedTuple):
    """An accuracy, and the same of an earlier network, on so many images."""

    field: str  # of the record
    percent: float
    before: float
    images: int
    answers: tuple[str | None, str | None] = None, None  # which images were right, now and before
    errors: tuple[float | None, float | None] = None, None  # standard errors of mAP

    @property
    def rise(self) -> float:
        return self.percent - self.before

    @property
    def p(self) -> float:
        """The probability that networks which are equally good differ as much on these images."""
        now, before = (int(answers, 16) if answers else None for answers in self.answers)
        if now is not None and before is not None:
            return mcnemar((now & ~before).bit_count(), (before & ~now).bit_count())
        # Without recorded answers, as if the two were of different images, which is cautious.
        squares = [error * error for error in self.errors if error is not None]
        if len(squares) == 2:
            return math.erfc(abs(self.rise) / math.sqrt(2 * sum(squares))) if any(squares) else 1.0
        shares = (min(max(percent / 100, 0.0), 1.0) for percent in (self.percent, self.before))
        variance = sum(share * (1 - share) for share in shares) / self.images
        return math.erfc(abs(self.rise) / (100 * math.sqrt(2 * variance))) if variance else 1.0


def readings_of(
    metrics: MetricsRecord, before: MetricsRecord | Baseline, baseline: Baseline
) -> list[Reading]:
    """Return the accuracies of a record that were measured before, too; the most certain difference first."""
    readings = []
    for field in ("knn", "best_knn", "probe"):
        now, then = getattr(metrics, field), getattr(before, field)
        if now is not None and then is not None and math.isfinite(now - then):
            answers, errors = (
                (getattr(metrics, f"{field}_{name}", None), getattr(before, f"{field}_{name}", None))
                for name in ("answers", "error")
            )
            readings.append(Reading(field, now, then, baseline.queries or QUERIES, answers, errors))
    return sorted(readings, key=lambda reading: (reading.p, -abs(reading.rise)))


def evaluations_of(history: Sequence[MetricsRecord]) -> list[MetricsRecord]:
    return [metrics for metrics in history if metrics.rankme is not None and math.isfinite(metrics.rankme)]


def figures_text(history: Sequence[MetricsRecord], baseline: Baseline) -> str:
    """Return the newest k-NN accuracy beside what it compares with; nothing without labels."""
    last = evaluations_of(history)[-1:]
    if not last or (knn := last[0].knn) is None:
        return ""
    metric = "" if baseline.metric == "top-1" else f" {baseline.metric}"
    # Photos of one place or moment are easy neighbours: on new images the figure may be far lower.
    among = " among the training images" if baseline.leave_one_out else ""
    compared = levels_text(baseline)
    margin = _margin(knn, baseline.queries, last[0].knn_error)
    return f"k-NN{metric} {knn:.1f} ± {margin:.1f} %{among}{compared and f' ({compared})'}"


def levels_text(baseline: Baseline, untrained: str = "before training") -> str:
    """Return the figures that a k-NN accuracy is compared with."""
    levels, titles = baseline.figures(), {"knn": untrained, **COMPARED}
    return ", ".join(f"{title} {levels[name]:.1f}" for name, title in titles.items() if name in levels)


def better_baseline(baseline: Baseline) -> tuple[str, float] | None:
    """Return the name and the k-NN accuracy of the better of pixels and gradients, if any is known."""
    levels = baseline.figures()
    known = [(levels[name], name) for name in BASELINES if name in levels]
    return max(known)[::-1] if known else None


def above_baseline(figures: MetricsRecord | Baseline, baseline: Baseline) -> float | None:
    """Return by how many points k-NN is above that by the better baseline, if both are known."""
    knn, better = figures.knn, better_baseline(baseline)
    return None if knn is None or better is None or not math.isfinite(knn) else knn - better[1]


def _margin(percent: float, images: int | None, error: float | None) -> float:
    """Return half the width of the interval that holds an accuracy with 95 % confidence."""
    if error is not None:
        return Z * error
    low, high = wilson_interval(min(max(percent / 100, 0.0), 1.0), images or QUERIES)
    return 100 * (high - low) / 2

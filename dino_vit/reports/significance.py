"""What the records of a run show: its accuracies beside those before training, and collapses.

The accuracies with how sure it is that they differ; the collapses by the outputs of the teacher.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Binomial

from dino_vit.config.sections import BASELINES
from dino_vit.reports.metrics import Baseline, MetricsRecord

Z = NormalDist().inv_cdf(0.975)  # half the width of a 95 % confidence interval, in standard errors
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

DiagnosisName = Literal["too early", "stuck", "collapsed", "diverged", "learning", "done"]

# Consecutive records that must show a collapse, or waiting, before it is said; and when no more will come.
PATIENCE, AT_THE_END = 5, 2
FEW_ROWS = 16  # fewer rows may be alike by chance, above all two views of one image
# Outputs that differ less than this between images say nothing about them; see `_symptom`.
ALIKE = 0.002
# Shares of ln(prototypes) below or above which an entropy counts as zero or as maximal.
ZERO, MAXIMAL = 0.05, 0.95
STUCK = 0.002  # a loss less than this share below ln(prototypes) is stuck there
SKIPPED = 0.2  # a larger share of skipped steps is more than the search for a scale in float16


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


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the probability of so uneven a split of the images that only one of two gets right.

    McNemar's test in its exact form: if both were as good, each such image would fall to either with 1/2.
    """
    splits = Binomial(only_first + only_second, torch.tensor(0.5, dtype=torch.double), validate_args=False)
    fewer = torch.arange(min(only_first, only_second) + 1, dtype=torch.double)
    logs: Tensor = splits.log_prob(fewer)  # type: ignore[no-untyped-call]
    return min(1.0, 2 * float(logs.exp().sum()))


def wilson_interval(share: float, images: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share of images, which is valid near 0 and 1 too (1927)."""
    middle = (share + Z * Z / (2 * images)) / (1 + Z * Z / images)
    reach = Z / (1 + Z * Z / images) * math.sqrt(share * (1 - share) / images + (Z / (2 * images)) ** 2)
    # At the ends the bound is the share itself up to rounding.
    return 0.0 if share == 0 else middle - reach, 1.0 if share == 1 else middle + reach


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


def chance(reading: Reading, readings: Sequence[Reading]) -> float:
    """Return the probability that one of some readings differs as much by chance (Bonferroni)."""
    return min(1.0, len(readings) * reading.p)


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


class Diagnosis(NamedTuple):
    """What is the matter with a run, and a plain sentence on why."""

    name: DiagnosisName
    sentence: str = ""


NONFINITE = Diagnosis("diverged", "Losses or gradients are infinite or NaN, and such steps are skipped.")
UNIFORM = Diagnosis("collapsed", "Every image gets the same flat output.")
ONE_PROTOTYPE = Diagnosis("collapsed", "One output takes every image.")
IMAGES_ALIKE = Diagnosis("collapsed", "All images get the same output.")
PATCHES_ALIKE = Diagnosis("collapsed", "All masked patches get the same output.")
STUCK_AT_LN = Diagnosis(
    "stuck", "The loss stays at ln(prototypes), that of a student with the same flat output for every image."
)


def collapse(history: Sequence[MetricsRecord], *, settled_step: int) -> Diagnosis | None:
    """Return the collapse that the last few records of a run show, if they show one.

    At first a healthy run looks collapsed: new networks give all images nearly the same features, and the
    centre removes what they share. So only non-finite steps are reported before `settled_step`, which should
    be after the warm-up of the learning rate and the freeze of the last layer.
    """
    latest, first = history[-1], history[-PATIENCE - 1 :][0]
    skipped, steps = latest.nonfinite_steps - first.nonfinite_steps, latest.step - first.step
    if not math.isfinite(latest.loss) or (len(history) > PATIENCE and skipped > SKIPPED * steps):
        return NONFINITE
    settled = [metrics for metrics in history if metrics.step >= settled_step][-PATIENCE:]
    symptoms = [_symptom(metrics) for metrics in settled]
    if not symptoms or None in symptoms:
        return None
    # A short run may end before its loss has begun to fall.
    finished = latest.step >= latest.total_steps and symptoms[-1] is not STUCK_AT_LN
    return symptoms[-1] if len(symptoms) >= (AT_THE_END if finished else PATIENCE) else None


def _symptom(metrics: MetricsRecord) -> Diagnosis | None:
    """Return the collapse that a single record shows.

    The gap between the entropy of the mean output and the mean entropy of an output is how much an output
    says about its image. In any collapse it is 0, and the two entropies are equal: ln(prototypes) if all are
    uniform, 0 with one prototype, in between when all images are alike. Near the uniform output the gap is
    half the variance of the logits: ALIKE times 7 means cosines 0.007 apart at a temperature of 0.04.

    With a gap, the teacher distinguishes images. A student with a flat output for every image has a
    cross-entropy of exactly ln(prototypes) for any teacher; one that has learned anything is below.
    """
    mean_output, output, gap = metrics.mean_output_entropy, metrics.output_entropy, metrics.entropy_gap
    excess, rows = metrics.excess, metrics.rows or 0
    if mean_output is None or output is None or gap is None or excess is None or rows < FEW_ROWS:
        return None
    most = math.log(metrics.prototypes or 1)
    if mean_output < ZERO * most:
        return ONE_PROTOTYPE
    if gap < ALIKE * min(most, math.log(rows)):
        return UNIFORM if output > MAXIMAL * most else IMAGES_ALIKE
    if excess > -STUCK * most:
        return STUCK_AT_LN
    patch_gap, patches = metrics.patch_entropy_gap, metrics.patch_rows or 0
    if patch_gap is None or patches < FEW_ROWS:
        return None
    return PATCHES_ALIKE if patch_gap < ALIKE * min(most, math.log(patches)) else None

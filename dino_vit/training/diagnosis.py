"""Name the state of a run by its records: has it collapsed, what has it gained, and how sure is that.

With labels all accuracies decide, without them the effective rank and the entropy gap. The README has a table
of the states.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.training.metrics import Baseline, MetricsRecord

# Consecutive records that must show a collapse before it is reported, all after the settled step.
PATIENCE = 5
AT_THE_END = 2  # when no more will come
# Fewer rows than this may be alike by chance, above all two views of one image.
FEW_ROWS = 16
# Outputs that differ less than this between images say nothing about them; see `_symptom`.
ALIKE = 0.002
# Shares of ln(prototypes) below or above which an entropy counts as zero or as maximal.
ZERO, MAXIMAL = 0.05, 0.95
# A loss less than this share below ln(prototypes) is stuck there.
STUCK = 0.002
# Scaling in float16 skips a step from time to time; a larger share of skipped steps is a problem.
SKIPPED = 0.2
# Of a shorter run that has not seen each image once nothing bad is said, but of steps that are not finite.
FEW_STEPS = 300
# Evaluations that must agree before a run is said to have gained nothing.
ENOUGH = 3
# A rank below this share of the first, or of the best, has collapsed.
HALF = 0.5
# Without labels, outputs that say at least this share of what they could say about an image.
INFORMATIVE = 0.1
# The chance, over all accuracies, that the same network would differ as much on other images.
UNLIKELY = 0.01
QUERIES = 1000  # where a run did not record how many images an accuracy is of
# The figures that a k-NN accuracy is compared with.
COMPARED = {
    "knn": "before training",
    "raw_pixels": "raw pixels",
    "colours": "colours alone",
    "largest_class": "largest class",
    "chance": "chance",
}


class Diagnosis(NamedTuple):
    """The state of a run and, if it is a bad one, the settings to change, the most promising first."""

    state: str
    remedies: tuple[str, ...] = ()


NONFINITE = Diagnosis("non-finite steps", ("run.precision", "optim.lr"))
UNIFORM = Diagnosis("uniform collapse", ("head.batch_norm", "loss.teacher_temp", "optim.lr"))
ONE_PROTOTYPE = Diagnosis("one prototype", ("loss.centering", "optim.lr"))
IMAGES_ALIKE = Diagnosis("all images alike", ("loss.koleo_weight", "optim.lr"))
STUCK_AT_LN = Diagnosis("stuck at ln(prototypes)", ("head.batch_norm", "optim.warmup_epochs", "optim.lr"))
PATCHES_ALIKE = Diagnosis("all patches alike", ("loss.centering", "loss.patch_weight"))
KEEP_RANK = ("loss.centering", "loss.koleo_weight", "optim.lr")
TOO_EARLY = Diagnosis("too early to say")
NOT_EVALUATED = Diagnosis("not evaluated")
LEARNING = Diagnosis("learning")
BELOW_PIXELS = Diagnosis("learning, but still below raw pixels")
MIXED = Diagnosis("better and worse than before training")
LOSING_RANK = Diagnosis("learning, but losing rank", KEEP_RANK)
PAST_BEST = Diagnosis("past its best", ("budget",))
NO_BETTER = Diagnosis("no better than before training", ("recipe",))
WORSE = Diagnosis("worse than before training", ("recipe", "optim.lr"))
COLLAPSING = Diagnosis("collapsing", KEEP_RANK)
STATES = {
    diagnosis.state: diagnosis
    for diagnosis in (
        *(TOO_EARLY, NOT_EVALUATED, LEARNING, BELOW_PIXELS, MIXED, LOSING_RANK, PAST_BEST, NO_BETTER, WORSE),
        *(COLLAPSING, NONFINITE, UNIFORM, ONE_PROTOTYPE, IMAGES_ALIKE, STUCK_AT_LN, PATCHES_ALIKE),
    )
}


class Reading(NamedTuple):
    """An accuracy, and the same before training, of so many images."""

    title: str
    percent: float
    before: float
    images: int

    @property
    def errors(self) -> float:
        """By how many standard errors it rose, as if the two were of different images, which is cautious."""
        shares = (min(max(percent / 100, 0.0), 1.0) for percent in (self.percent, self.before))
        variance = sum(share * (1 - share) for share in shares) / self.images
        return (self.percent - self.before) / (100 * math.sqrt(variance)) if variance else 0.0


def diagnose(
    history: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None
) -> Diagnosis:
    """Return the state of a run from its history so far, its settings and its figures before training."""
    if not history:
        return TOO_EARLY
    settled_step = _settled_step(config, history[-1])
    evaluations = evaluations_of(history)
    by_accuracy = _judge_accuracies(evaluations, baseline)
    improved = by_accuracy in (LEARNING, BELOW_PIXELS, MIXED, PAST_BEST)
    before = baseline.rankme if baseline else None
    spread = bool(before and evaluations and (evaluations[-1].rankme or 0.0) > before / HALF)
    collapsed = collapse(history, settled_step=settled_step)
    if is_too_short(history[-1]) and collapsed is not NONFINITE:  # only what is good for sure is said
        return by_accuracy if by_accuracy in (LEARNING, BELOW_PIXELS) else TOO_EARLY
    follows_late = collapsed is STUCK_AT_LN and (improved or spread)  # features may improve before the loss
    if collapsed and not follows_late:
        return collapsed
    if not evaluations:
        return TOO_EARLY if config.run.eval_every or config.run.eval_every_steps else NOT_EVALUATED
    by_rank = _judge_ranks(evaluations, before, settled_step)
    if by_accuracy is None:
        return by_rank
    if by_rank is COLLAPSING and by_accuracy is not PAST_BEST:
        return LOSING_RANK if improved else COLLAPSING
    return by_accuracy


def evaluation_text(history: Sequence[MetricsRecord], baseline: Baseline | None) -> str:
    """Return the figures of the last evaluation, beside what they compare with; nothing if there is none."""
    evaluations = evaluations_of(history)
    if not evaluations:
        return ""
    last, baseline = evaluations[-1], baseline or Baseline()
    levels, figures = baseline.figures(), []
    if last.knn is not None:
        compared = [f"{text} {levels[name]:.1f}" for name, text in COMPARED.items() if name in levels]
        margin = _margin(last.knn, baseline.queries)
        figures.append(
            f"k-NN {last.knn:.1f} ± {margin:.1f} %" + (f" ({', '.join(compared)})" if compared else "")
        )
        if last.best_features not in (None, "CLS") and last.best_knn is not None:
            figures.append(f"{last.best_knn:.1f} % by {last.best_features}")
    if last.probe is not None:
        before = f" (before training {levels['probe']:.1f})" if "probe" in levels else ""
        figures.append(f"ridge probe {last.probe:.1f} ± {_margin(last.probe, baseline.images):.1f} %{before}")
    rank = f"effective rank {last.rankme:.1f}"
    figures.append(rank + (f" (before training {levels['rankme']:.1f})" if "rankme" in levels else ""))
    if last.knn is None and last.entropy_gap is not None:
        figures.append(f"entropy gap {last.entropy_gap:.2f}")
    return "; ".join(filter(None, [", ".join(figures), _confidence(last, baseline)]))


def _settled_step(config: PretrainConfig, last: MetricsRecord) -> int:
    """Return the step after the warm-up and the freezes."""
    head_epochs = config.init.head_epochs if config.init else 0.0
    settled = max(config.optim.warmup_epochs, config.optim.freeze_last_layer_epochs, head_epochs)
    steps_per_epoch = min(last.step / last.epoch, 2.0**53) if last.epoch else 0.0  # files may hold anything
    return math.floor(settled * steps_per_epoch)


def evaluations_of(history: Sequence[MetricsRecord]) -> list[MetricsRecord]:
    return [metrics for metrics in history if metrics.rankme is not None and math.isfinite(metrics.rankme)]


def is_too_short(last: MetricsRecord) -> bool:
    return last.step < FEW_STEPS and last.epoch < 1


def _readings(metrics: MetricsRecord, baseline: Baseline | None) -> list[Reading]:
    """Return the accuracies that were measured before training too."""
    if baseline is None:
        return []
    queries, images = baseline.queries or QUERIES, baseline.images or QUERIES
    readings = []
    for title, field, count in (
        ("k-NN", "knn", queries),
        (f"k-NN of {metrics.best_features}", "best_knn", queries),
        ("ridge probe", "probe", images),
    ):
        now, before = getattr(metrics, field), getattr(baseline, field)
        if now is not None and before is not None and math.isfinite(now - before):
            readings.append(Reading(title, now, before, count))
    return readings


def _chance(errors: float, readings: int) -> float:
    """Return the probability that one of some readings differs by so many standard errors by chance."""
    return min(1.0, readings * math.erfc(abs(errors) / math.sqrt(2)))


def _confidence(metrics: MetricsRecord, baseline: Baseline | None) -> str:
    """Return how sure it is that the last evaluation differs from that before training."""
    readings = _readings(metrics, baseline)
    if not readings:
        return ""
    clearest = max(readings, key=lambda reading: abs(reading.errors))
    chance = _chance(clearest.errors, len(readings))
    text = "p < 0.001" if chance < 0.001 else f"p = {chance:.2g}"
    if chance >= UNLIKELY:
        return f"the differences from before training may be chance ({text})"
    points = clearest.percent - clearest.before
    return f"the {clearest.title} {'rose' if points > 0 else 'fell'} by {abs(points):.1f} points ({text})"


def _judge_accuracies(evaluations: Sequence[MetricsRecord], baseline: Baseline | None) -> Diagnosis | None:
    """Judge by accuracies; None without labels or without any from before the first step."""
    readings = _readings(evaluations[-1], baseline) if evaluations else []
    if not readings or baseline is None:
        return None
    clear = [r.errors for r in readings if _chance(r.errors, len(readings)) < UNLIKELY]
    # The teacher follows slowly, and a short dip at the start is normal.
    early = len(evaluations) < ENOUGH and evaluations[-1].step < evaluations[-1].total_steps
    if not clear or max(clear) < 0:
        return TOO_EARLY if early else WORSE if clear else NO_BETTER
    if min(clear) < 0:
        return MIXED
    best = max(evaluations, key=lambda metrics: or_lowest(metrics.knn))
    fall = Reading("k-NN", or_lowest(evaluations[-1].knn), or_lowest(best.knn), baseline.queries or QUERIES)
    if fall.errors < 0 and _chance(fall.errors, 1) < UNLIKELY:
        return PAST_BEST
    pixels = baseline.raw_pixels
    below = pixels is not None and max(reading.percent for reading in readings) < pixels
    return BELOW_PIXELS if below else LEARNING


def _judge_ranks(evaluations: Sequence[MetricsRecord], before: float | None, settled_step: int) -> Diagnosis:
    """Judge by effective ranks and by what the teacher's outputs say about an image."""
    ranks = [metrics.rankme or 0.0 for metrics in evaluations]
    latest, last = ranks[-1], evaluations[-1]
    early = len(ranks) < ENOUGH and last.step < last.total_steps
    if last.step >= settled_step and not early and latest < HALF * max(before or 0.0, max(ranks)):
        return COLLAPSING
    if before is None or latest < before:
        return TOO_EARLY if early else NO_BETTER
    if last.entropy_gap is None:  # the teacher is frozen: what it says cannot collapse
        return LEARNING
    rows = last.rows or 0
    informative = last.entropy_gap > INFORMATIVE * math.log(max(1, min(last.prototypes or 1, rows)))
    return LEARNING if informative and rows >= FEW_ROWS else TOO_EARLY


def _margin(percent: float, images: int | None) -> float:
    """Return half the width of the interval that holds an accuracy with 95 % confidence."""
    share = min(max(percent / 100, 0.0), 1.0)
    return 196 * math.sqrt(share * (1 - share) / (images or QUERIES))


def or_lowest(value: float | None) -> float:
    """Return a number that is not finite, or missing, as the lowest."""
    return value if value is not None and math.isfinite(value) else -math.inf


def collapse(history: Sequence[MetricsRecord], *, settled_step: int) -> Diagnosis | None:
    """Return the collapse that the last few records of a run show, if they show one.

    At first a healthy run looks collapsed: new networks give all images nearly the same features, and the
    centre removes what they share. So only non-finite steps are reported before `settled_step`, which should
    be after the warm-up of the learning rate and the freeze of the last layer.
    """
    if _skips_steps(history[-PATIENCE - 1 :]):
        return NONFINITE
    settled = [metrics for metrics in history if metrics.step >= settled_step][-PATIENCE:]
    symptoms = [symptom for metrics in settled if (symptom := _symptom(metrics))]
    finished = history[-1].step >= history[-1].total_steps
    if not symptoms or len(symptoms) < len(settled):
        return None
    # A short run may end before its loss has begun to fall.
    at_the_end = finished and len(settled) >= AT_THE_END and symptoms[-1] is not STUCK_AT_LN
    return symptoms[-1] if len(settled) == PATIENCE or at_the_end else None


def _skips_steps(history: Sequence[MetricsRecord]) -> bool:
    latest, first = history[-1], history[0]
    if not math.isfinite(latest.loss):
        return True
    skipped, steps = latest.nonfinite_steps - first.nonfinite_steps, latest.step - first.step
    return len(history) > PATIENCE and skipped > SKIPPED * steps


def _symptom(metrics: MetricsRecord) -> Diagnosis | None:
    """Return the collapse that a single record shows.

    Let H(mean) be the entropy of the mean output over the rows, mean H the mean entropy of a row. Their gap,
    0 <= H(mean) - mean H <= min(ln rows, ln prototypes), is the mutual information between row and prototype:
    how much an output says about its image. In any collapse the gap is 0, and the two entropies are equal:
    both ln(prototypes) in a uniform collapse (only centering acts), both 0 with one prototype (only
    sharpening acts), in between when all images are alike.

    Near the uniform output the gap is half the variance of the logits, so ALIKE times 7 means cosines that
    differ by 0.007 at a temperature of 0.04. Not used: the prototypes in use (noise picks the largest of a
    flat output) and the embedding's std (0.05 to 0.4 in collapses made on purpose).

    With a gap, the teacher distinguishes images. A student with a flat output for every image has a
    cross-entropy of exactly ln(prototypes) for any teacher; one that has learned anything is below.
    """
    of_mean, of_each, gap = metrics.mean_output_entropy, metrics.output_entropy, metrics.entropy_gap
    excess, rows = metrics.excess, metrics.rows or 0
    if of_mean is None or of_each is None or gap is None or excess is None or rows < FEW_ROWS:
        return None
    most = math.log(metrics.prototypes or 1)
    if of_mean < ZERO * most:
        return ONE_PROTOTYPE
    if gap < ALIKE * min(most, math.log(rows)):
        return UNIFORM if of_each > MAXIMAL * most else IMAGES_ALIKE
    if excess > -STUCK * most:
        return STUCK_AT_LN
    patch_gap, patches = metrics.patch_entropy_gap, metrics.patch_rows or 0
    if patch_gap is None or patches < FEW_ROWS:
        return None
    return PATCHES_ALIKE if patch_gap < ALIKE * min(most, math.log(patches)) else None

"""Judge a run from its records: has it collapsed, what has it gained, does it wait for images.

With labels the k-NN accuracy decides, without them the effective rank and the entropy gap. Only a figure that
speaks for it makes a run "learning". The README has a table of the states.
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
# The share of its time that a run may wait for images before it gets advice.
WAITING = 0.2
# Evaluations that must agree before a run is said to have gained nothing.
ENOUGH = 3
# A rank below this share of the first, or of the best, has collapsed.
HALF = 0.5
# Without labels, outputs that say at least this share of what they could say about an image.
INFORMATIVE = 0.1
QUERIES = 1000  # where a run did not record how many images an accuracy is of
# The figures that a k-NN accuracy is compared with.
COMPARED = {
    "knn": "before training",
    "raw_pixels": "raw pixels",
    "largest_class": "largest class",
    "chance": "chance",
}


class Diagnosis(NamedTuple):
    """The state of a run, and what to try if it is a bad one."""

    state: str
    advice: str = ""


REMEDY = "Try loss.centering=sinkhorn, loss.koleo_weight=0.03, a lower optim.lr, or recipe=auto."
TOO_EARLY = Diagnosis("too early to say")
NOT_EVALUATED = Diagnosis("not evaluated")
LEARNING = Diagnosis("learning")
BELOW_PIXELS = Diagnosis("learning, but still below raw pixels")
LOSING_RANK = Diagnosis("learning, but losing rank", REMEDY)
PAST_BEST = Diagnosis("past its best", "Train for a shorter time, lower optim.lr, or add images.")
NO_BETTER = Diagnosis("no better than before training", REMEDY)
WORSE = Diagnosis("worse than before training", REMEDY)
COLLAPSING = Diagnosis("collapsing", REMEDY)
NONFINITE = Diagnosis("non-finite steps", "Lower optim.lr or optim.clip, or use bf16 instead of fp16.")
UNIFORM = Diagnosis("uniform collapse", "Lower optim.lr or loss.teacher_temp; lengthen optim.warmup_epochs.")
ONE_PROTOTYPE = Diagnosis("one prototype", "Use loss.centering=sinkhorn, a lower optim.lr or a larger batch.")
IMAGES_ALIKE = Diagnosis("all images alike", "Lower optim.lr, or bring teacher.momentum nearer to 1.")
STUCK_AT_LN = Diagnosis("stuck at ln(prototypes)", "Check optim.lr; then lengthen optim.warmup_epochs.")
PATCHES_ALIKE = Diagnosis(
    "all patches alike", "Use loss.centering=sinkhorn, head.shared=false or a lower loss.patch_weight."
)
STATES = {
    diagnosis.state: diagnosis
    for diagnosis in (
        *(TOO_EARLY, NOT_EVALUATED, LEARNING, BELOW_PIXELS, LOSING_RANK, PAST_BEST, NO_BETTER, WORSE),
        *(COLLAPSING, NONFINITE, UNIFORM, ONE_PROTOTYPE, IMAGES_ALIKE, STUCK_AT_LN, PATCHES_ALIKE),
    )
}


def diagnose(
    history: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None
) -> Diagnosis:
    """Return the state of a run from its history so far, its settings and its figures before training."""
    if not history:
        return TOO_EARLY
    settled_step = _settled_step(config, history[-1])
    evaluations = _evaluations(history)
    by_accuracy = _judge_accuracies(evaluations, baseline)
    improved = by_accuracy in (LEARNING, BELOW_PIXELS, PAST_BEST)
    before = baseline.rankme if baseline else None
    spread = bool(before and evaluations and (evaluations[-1].rankme or 0.0) > before / HALF)
    collapsed = collapse(history, settled_step=settled_step)
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


def summarise(history: Sequence[MetricsRecord], config: PretrainConfig, baseline: Baseline | None) -> str:
    """Return what has come of a run: its state, the figures that say so, and a line of advice."""
    diagnosis = diagnose(history, config, baseline)
    sentence = ": ".join(filter(None, [diagnosis.state, evaluation_text(history, baseline)])) + "."
    return " ".join(filter(None, [sentence, diagnosis.advice]))


def evaluation_text(history: Sequence[MetricsRecord], baseline: Baseline | None) -> str:
    """Return the figures of the last evaluation, beside what they compare with; nothing if there is none."""
    evaluations = _evaluations(history)
    if not evaluations:
        return ""
    last, levels = evaluations[-1], (baseline or Baseline()).figures()
    figures = []
    if last.knn is not None:
        compared = [f"{text} {levels[name]:.1f}" for name, text in COMPARED.items() if name in levels]
        figures.append(f"k-NN {last.knn:.1f} %" + (f" ({', '.join(compared)})" if compared else ""))
        if last.best_features not in (None, "CLS") and last.best_knn is not None:
            figures.append(f"{last.best_knn:.1f} % by {last.best_features}")
    rank = f"effective rank {last.rankme:.1f}"
    figures.append(rank + (f" (before training {levels['rankme']:.1f})" if "rankme" in levels else ""))
    if last.knn is None and last.entropy_gap is not None:
        figures.append(f"entropy gap {last.entropy_gap:.2f}")
    return ", ".join(figures)


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


def waits_for_images(history: Sequence[MetricsRecord]) -> bool:
    """Tell whether the last few records are of a run that waits for images.

    The first record of all does not count: in its time workers and compiled networks start.
    """
    last = history[1:][-PATIENCE:]
    return len(last) == PATIENCE and all(metrics.data_wait > WAITING for metrics in last)


def _settled_step(config: PretrainConfig, last: MetricsRecord) -> int:
    """Return the step after the warm-up and the freezes."""
    head_epochs = config.init.head_epochs if config.init else 0.0
    settled = max(config.optim.warmup_epochs, config.optim.freeze_last_layer_epochs, head_epochs)
    steps_per_epoch = min(last.step / last.epoch, 2.0**53) if last.epoch else 0.0  # files may hold anything
    return math.floor(settled * steps_per_epoch)


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


def _evaluations(history: Sequence[MetricsRecord]) -> list[MetricsRecord]:
    return [metrics for metrics in history if metrics.rankme is not None and math.isfinite(metrics.rankme)]


def _judge_accuracies(evaluations: Sequence[MetricsRecord], baseline: Baseline | None) -> Diagnosis | None:
    """Judge by k-NN accuracies; None without labels or without one from before the first step."""
    accuracies = [metrics.knn for metrics in evaluations if metrics.knn is not None]
    accuracies = [accuracy for accuracy in accuracies if math.isfinite(accuracy)]
    if baseline is None or baseline.knn is None or not math.isfinite(baseline.knn) or not accuracies:
        return None
    latest, best, before = accuracies[-1], max(accuracies), baseline.knn
    margin = _noise(best, baseline)
    # The teacher follows slowly, and a short dip at the start is normal.
    early = len(accuracies) < ENOUGH and evaluations[-1].step < evaluations[-1].total_steps
    if latest < before - margin:
        return TOO_EARLY if early else WORSE
    if latest < before + margin:
        return TOO_EARLY if early else NO_BETTER
    if latest < best - margin:
        return PAST_BEST
    return BELOW_PIXELS if baseline.raw_pixels is not None and latest < baseline.raw_pixels else LEARNING


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


def _noise(percent: float, baseline: Baseline) -> float:
    """Return two standard errors of an accuracy in per cent."""
    share = min(max(percent / 100, 0.0), 1.0)
    return 200 * math.sqrt(share * (1 - share) / (baseline.queries or QUERIES))

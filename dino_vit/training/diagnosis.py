"""Tell from its readings whether a run has collapsed, how, and what to try; or waits for images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dino_vit.training.readings import Reading

# Consecutive readings that must show a collapse before it is reported, all after the settled step.
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


@dataclass(frozen=True)
class Diagnosis:
    """The state of a run, and what to try if it is a bad one."""

    state: str
    advice: str = ""


NONFINITE = Diagnosis(
    "non-finite steps",
    "Many steps had a NaN or an infinity and were skipped. Lower optim.lr or lengthen optim.warmup_epochs; "
    "lower optim.clip; with run.precision=fp16 try bf16 or no.",
)
UNIFORM = Diagnosis(
    "uniform collapse",
    "The teacher gives every image the same flat output. Lower optim.lr or lengthen optim.warmup_epochs; "
    "sharpen more with a lower loss.teacher_temp (0.04 is safe); with loss.centring=ema, centre less by "
    "loss.center_momentum=0.99.",
)
ONE_PROTOTYPE = Diagnosis(
    "one prototype",
    "One prototype takes every image: the teacher is sharpened more than it is centred. Use "
    "loss.centring=sinkhorn if the run has ema, warm loss.teacher_temp up towards 0.07, lower optim.lr, keep "
    "head.norm_last_layer=true and raise optim.freeze_last_layer_epochs, or use a larger data.batch_size.",
)
IMAGES_ALIKE = Diagnosis(
    "all images alike",
    "The teacher gives every image the same output, neither flat nor certain. Lower optim.lr, lengthen "
    "optim.warmup_epochs, bring teacher.momentum nearer to 1, raise optim.freeze_last_layer_epochs, or use "
    "a larger data.batch_size. Views that share too little (views.local_scale) can cause this too.",
)
STUCK_AT_LN = Diagnosis(
    "stuck at ln(prototypes)",
    "The teacher distinguishes images, but the student predicts it no better than a flat guess. Check "
    "optim.lr first: far below the recipe's 5e-4 nothing is learned, far above it diverges. Then lengthen "
    "optim.warmup_epochs, lower loss.teacher_temp, or use fewer head.prototypes.",
)
PATCHES_ALIKE = Diagnosis(
    "all patches alike",
    "The teacher gives every masked patch the same output, so patches learn nothing, while images may. Use "
    "what the run does not have yet of loss.centring=sinkhorn, a head of their own (head.shared=false) and a "
    "lower loss.patch_weight; then what helps images: a lower optim.lr or loss.teacher_temp, a longer "
    "optim.warmup_epochs.",
)
COLLAPSES = NONFINITE, UNIFORM, ONE_PROTOTYPE, IMAGES_ALIKE, STUCK_AT_LN, PATCHES_ALIKE


def collapse(readings: Sequence[Reading], *, settled_step: int) -> Diagnosis | None:
    """Return the collapse that the last few readings of a run show, if they show one.

    At first a healthy run looks collapsed: new networks give all images nearly the same features, and the
    centre removes what they share. So only non-finite steps are reported before `settled_step`, which should
    be after the warm-up of the learning rate and the freeze of the last layer.
    """
    if _skips_steps(readings[-PATIENCE - 1 :]):
        return NONFINITE
    settled = [reading for reading in readings if reading.step >= settled_step][-PATIENCE:]
    symptoms = [symptom for reading in settled if (symptom := _symptom(reading))]
    finished = readings[-1].step >= readings[-1].total_steps
    if not symptoms or len(symptoms) < len(settled):
        return None
    # A short run may end before its loss has begun to fall.
    at_the_end = finished and len(settled) >= AT_THE_END and symptoms[-1] is not STUCK_AT_LN
    return symptoms[-1] if len(settled) == PATIENCE or at_the_end else None


def _skips_steps(readings: Sequence[Reading]) -> bool:
    latest, first = readings[-1], readings[0]
    if not math.isfinite(latest.loss):
        return True
    skipped, steps = latest.nonfinite_steps - first.nonfinite_steps, latest.step - first.step
    return len(readings) > PATIENCE and skipped > SKIPPED * steps


def _symptom(reading: Reading) -> Diagnosis | None:
    """Return the collapse that a single reading shows.

    Let H(mean) be the entropy of the mean output over the rows, mean H the mean entropy of a row. Their gap,
    0 <= H(mean) - mean H <= min(ln rows, ln prototypes), is the mutual information between row and prototype:
    how much an output says about its image. In any collapse the gap is 0, and the two entropies are equal:

        both ln(prototypes)  uniform collapse       (only centring acts)
        both 0               one prototype          (only sharpening acts)
        in between           all images alike

    The gap is measured against the smaller of ln(rows) and ln(prototypes): 64 rows cannot exceed ln(64).
    Near the uniform output the gap is half the variance of the logits, so ALIKE times 7 means cosines that
    differ by 0.007 at a temperature of 0.04. Not used: the prototypes in use (noise picks the largest of a
    flat output) and the embedding's std (0.05 to 0.4 in collapses made on purpose).

    With a gap, the teacher distinguishes images. A student with a flat output for every image has a
    cross-entropy of exactly ln(prototypes) for any teacher; one that has learned anything is below.
    """
    of_mean, of_each, gap = reading.mean_output_entropy, reading.output_entropy, reading.entropy_gap
    excess, rows = reading.excess, reading.rows or 0
    if of_mean is None or of_each is None or gap is None or excess is None or rows < FEW_ROWS:
        return None
    most = math.log(reading.prototypes or 1)
    if of_mean < ZERO * most:
        return ONE_PROTOTYPE
    if gap < ALIKE * min(most, math.log(rows)):
        return UNIFORM if of_each > MAXIMAL * most else IMAGES_ALIKE
    if excess > -STUCK * most:
        return STUCK_AT_LN
    patch_gap, patches = reading.patch_entropy_gap, reading.patch_rows or 0
    if patch_gap is None or patches < FEW_ROWS:
        return None
    return PATCHES_ALIKE if patch_gap < ALIKE * min(most, math.log(patches)) else None


def begins_to_wait(readings: Sequence[Reading]) -> bool:
    """Tell whether the last few readings are the first ones in a row of a run that waits for images.

    The first reading of all does not count: in its time loader processes and compiled networks start.
    """
    waits = [reading.data_wait > WAITING for reading in readings[1:]]
    ends = range(PATIENCE, len(waits) + 1)
    return next((end for end in ends if all(waits[end - PATIENCE : end])), None) == len(waits)

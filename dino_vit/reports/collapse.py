"""Tell a collapse by the outputs of the teacher, in the last few records of a run."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dino_vit.reports.metrics import MetricsRecord

DiagnosisName = Literal["too early to tell", "stuck", "collapsed", "diverged", "learning", "done"]

# Consecutive records that must show a collapse, or waiting, before it is said; and when no more will come.
PATIENCE, AT_THE_END = 5, 2
FEW_ROWS = 16  # fewer rows may be alike by chance, above all two views of one image
# Outputs that differ less than this between images say nothing about them; see `_symptom`.
ALIKE = 0.002
# Shares of ln(prototypes) below or above which an entropy counts as zero or as maximal.
ZERO, MAXIMAL = 0.05, 0.95
STUCK = 0.002  # a loss less than this share below ln(prototypes) is stuck there
SKIPPED = 0.2  # a larger share of skipped steps is more than a few bad batches


class Diagnosis(NamedTuple):
    """What is the matter with a run, and a plain sentence on why."""

    name: DiagnosisName
    sentence: str = ""


NONFINITE = Diagnosis("diverged", "The training has run into infinite numbers; such steps are skipped.")
UNIFORM = Diagnosis("collapsed", "To the network all images are alike: it is undecided about each.")
ONE_PROTOTYPE = Diagnosis("collapsed", "To the network all images are alike: each gets the same prototype.")
IMAGES_ALIKE = Diagnosis("collapsed", "To the network all images are alike: each gets the same answer.")
PATCHES_ALIKE = Diagnosis(
    "collapsed", "To the network all masked patches (hidden parts of images) are alike."
)
STUCK_AT_LN = Diagnosis("stuck", "The loss is still that of a network to which all images are alike.")


def collapse(history: Sequence[MetricsRecord], *, settled_step: int) -> Diagnosis | None:
    """Return the collapse that the last few records of a run show, if they show one.

    At first a healthy run looks collapsed: new networks give all images nearly the same features, and the
    centre removes what they share. So only non-finite steps are reported before `settled_step`, which should
    be after the warm-up of the learning rate and the freeze of the last layer.
    """
    latest, first = history[-1], history[-PATIENCE - 1 :][0]
    skipped, steps = latest.nonfinite_steps - first.nonfinite_steps, latest.step - first.step
    # Otherwise float16 seeks its scale.
    is_infinite = not math.isfinite(latest.loss) and latest.nonfinite_steps > 0
    if is_infinite or (len(history) > PATIENCE and skipped > SKIPPED * steps):
        return NONFINITE
    settled = [metrics for metrics in history if metrics.step >= settled_step][-PATIENCE:]
    symptoms = [_symptom(metrics) for metrics in settled]
    if STUCK_AT_LN in symptoms and len(settled) == PATIENCE:  # where the loss wavers, by its mean
        excess = [metrics.excess or 0.0 for metrics in settled]
        if math.fsum(excess) / PATIENCE > -STUCK * math.log(latest.prototypes or 1):
            return STUCK_AT_LN
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
    patch_gap, patches = metrics.terms.get("patch_entropy_gap"), metrics.terms.get("patch_rows", 0)
    if patch_gap is None or patches < FEW_ROWS:
        return None
    return PATCHES_ALIKE if patch_gap < ALIKE * min(most, math.log(patches)) else None

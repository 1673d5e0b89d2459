"""What one log line knows of a run, and the words for what state it says the run is in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

Record = dict[str, Any]  # a line of `metrics.jsonl`

# So many readings in a row must agree before a run is accused, all of them after the settled step.
PATIENCE = 5

# Rows that few may well be alike, two views of one image the more so.
FEW_ROWS = 16
# When the outputs differ less than this from image to image, they say nothing; see `_symptom`.
ALIKE = 0.002
# From these shares of ln(prototypes) on, an entropy is as good as nothing, or as good as all.
NOTHING, ALL = 0.05, 0.95
# A loss that is no further below ln(prototypes) than this share of it is stuck there.
STUCK = 0.002
# Scaling in float16 loses a step now and then; a share of lost steps beyond this is no accident.
LOST = 0.2


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The numbers of one log line; entropies and the divergence are those of `loss.LossStatistics`."""

    step: int  # taken so far
    total_steps: int
    epoch: float
    loss: float  # mean since the reading before
    prototypes: int
    mean_output_entropy: float
    output_entropy: float
    entropy_gap: float
    student_divergence: float
    prototypes_in_use: int
    rows: int  # teacher outputs, over all processes, that the entropies were taken over
    embedding_std: float  # of normalised CLS features, times sqrt(width): 1 spread out, 0 all images alike
    gradient_norm: float
    lr: float
    weight_decay: float
    momentum: float
    teacher_temp: float
    images_per_second: float
    data_wait: float  # share of the time
    nonfinite_steps: int  # since the start of the run
    knn: float | None = None  # percent, where the step was evaluated and there are labels
    rankme: float | None = None  # where the step was evaluated

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """Take a reading back from its record, where null stands for what is not finite."""
        given: Record = {field.name: record.get(field.name) for field in fields(cls)}
        for name, value in given.items():
            if value is None and name not in ("knn", "rankme"):
                given[name] = math.nan
        return cls(**given)

    @property
    def excess(self) -> float:
        """The loss above that of a student that answers every image with the same flat output."""
        return self.loss - math.log(self.prototypes)

    def scalars(self) -> dict[str, float]:
        """Return what trackers plot, in groups, under names that stay."""
        named = {
            "loss/total": self.loss,
            "loss/excess": self.excess,
            "loss/student_divergence": self.student_divergence,
            "teacher/gap": self.entropy_gap,
            "teacher/mean_output_entropy": self.mean_output_entropy,
            "teacher/output_entropy": self.output_entropy,
            "teacher/prototypes_in_use": self.prototypes_in_use,
            "teacher/embedding_std": self.embedding_std,
            "teacher/temperature": self.teacher_temp,
            "teacher/momentum": self.momentum,
            "optim/lr": self.lr,
            "optim/weight_decay": self.weight_decay,
            "optim/gradient_norm": self.gradient_norm,
            "optim/nonfinite_steps": self.nonfinite_steps,
            "speed/images_per_second": self.images_per_second,
            "speed/data_wait": self.data_wait,
            "run/epoch": self.epoch,
            "eval/knn": self.knn,
            "eval/rankme": self.rankme,
        }
        return {name: float(value) for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class Diagnosis:
    """The state of a run in words, and what to try if it is a bad one."""

    state: str
    advice: str = ""


STARTING = Diagnosis("starting")
LEARNING = Diagnosis("learning")
NONFINITE = Diagnosis(
    "non-finite steps",
    "Many steps had a NaN or an infinity and were skipped. Lower optim.lr or lengthen optim.warmup_epochs; "
    "lower optim.clip; with run.precision=fp16 try bf16 or no.",
)
UNIFORM = Diagnosis(
    "uniform collapse",
    "The teacher gives every image the same flat output. Lower optim.lr or lengthen optim.warmup_epochs; "
    "sharpen more with a lower loss.teacher_temp and warm-up to it (0.04 is safe); centre less with "
    "loss.center_momentum=0.99.",
)
ONE_PROTOTYPE = Diagnosis(
    "one prototype",
    "One prototype takes every image: the teacher is sharpened more than it is centred. Speed the centre up "
    "with loss.center_momentum=0.9, warm loss.teacher_temp up towards 0.07, lower optim.lr, keep "
    "head.norm_last_layer=true and raise optim.freeze_last_layer_epochs, or take a larger data.batch_size.",
)
IMAGES_ALIKE = Diagnosis(
    "all images alike",
    "The teacher gives every image the same output, neither flat nor certain. Lower optim.lr, lengthen "
    "optim.warmup_epochs, bring teacher.momentum nearer to 1, raise optim.freeze_last_layer_epochs, or take "
    "a larger data.batch_size; views that share too little (views.local_scale) end here too.",
)
STUCK_AT_LN = Diagnosis(
    "stuck at ln(prototypes)",
    "The teacher tells images apart, but the student foresees it no better than a flat guess. Look first at "
    "optim.lr: far below the recipe's 5e-4 nothing moves, far above nothing holds. Then lengthen "
    "optim.warmup_epochs, lower loss.teacher_temp, or take fewer head.prototypes.",
)
STATES = {
    known.state: known
    for known in (STARTING, LEARNING, NONFINITE, UNIFORM, ONE_PROTOTYPE, IMAGES_ALIKE, STUCK_AT_LN)
}


def diagnose(readings: Sequence[Reading], *, settled_step: int) -> Diagnosis:
    """Say what state a run is in from its readings so far, of which only the last few count.

    Before it has learned anything a healthy run looks collapsed: fresh networks give all images nearly the
    same features, and the centre takes away what is the same. So nothing but non-finite steps is held against
    a run before `settled_step`, which is to lie after the warm-up of the rate and the last layer's freeze.
    """
    if not readings:
        return STARTING
    if _loses_steps(readings[-PATIENCE - 1 :]):
        return NONFINITE
    settled = [reading for reading in readings[-PATIENCE:] if reading.step >= settled_step]
    symptoms = [symptom for reading in settled if (symptom := _symptom(reading))]
    if len(symptoms) < len(settled):
        return LEARNING
    return symptoms[-1] if len(symptoms) == PATIENCE else STARTING


def _loses_steps(readings: Sequence[Reading]) -> bool:
    latest, first = readings[-1], readings[0]
    if not math.isfinite(latest.loss):
        return True
    lost, steps = latest.nonfinite_steps - first.nonfinite_steps, latest.step - first.step
    return len(readings) > PATIENCE and lost > LOST * steps


def _symptom(reading: Reading) -> Diagnosis | None:
    """Name the collapse that a reading alone would show.

    Let H(mean) be the entropy of the mean output over the rows, mean H that of a row on average. Their gap,
    0 <= H(mean) - mean H <= min(ln rows, ln prototypes), is the mutual information between row and prototype:
    how much an output says about its image. Any collapse is a gap of 0, and the entropies then agree:

        both ln(prototypes)  uniform collapse       (only centring acts)
        both 0               one prototype          (only sharpening acts)
        in between           all images alike

    The smaller of ln(rows) and ln(prototypes) is the scale of the gap: 64 rows cannot show more than ln(64).
    Near the uniform output the gap is half the variance of the logits, so ALIKE of a scale of 7 stands for
    cosines that differ by 0.007 at a temperature of 0.04. Not used as evidence: the prototypes in use (noise
    picks the largest of a flat output) and the embedding's std (0.05 to 0.4 in collapses made on purpose).

    With a gap the teacher tells images apart. A student that gives every image the flat output has a
    cross-entropy of exactly ln(prototypes) whatever the teacher says; one that learned anything is below.
    """
    if reading.rows < FEW_ROWS:
        return None
    most = math.log(reading.prototypes)
    if reading.mean_output_entropy < NOTHING * most:
        return ONE_PROTOTYPE
    if reading.entropy_gap < ALIKE * min(most, math.log(reading.rows)):
        return UNIFORM if reading.output_entropy > ALL * most else IMAGES_ALIKE
    return STUCK_AT_LN if reading.excess > -STUCK * most else None

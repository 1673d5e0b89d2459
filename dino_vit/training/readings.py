"""The readings of a run: lines of `metrics.jsonl`, and the state of the run that they show."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from dino_vit.core.storage import write_bytes

Record = dict[str, Any]  # a line of `metrics.jsonl` or `starts.jsonl`

log = logging.getLogger("dino_vit")

# Consecutive readings that must show a collapse before it is reported, all after the settled step.
PATIENCE = 5

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


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The numbers of one log line; entropies and the divergence are those of `loss.LossStatistics`."""

    step: int  # taken so far
    total_steps: int
    epoch: float
    loss: float  # mean since the previous reading
    prototypes: int
    mean_output_entropy: float
    output_entropy: float
    entropy_gap: float
    student_divergence: float
    prototypes_in_use: int
    rows: int  # teacher outputs, over all processes, that the entropies were taken over
    embedding_std: float  # of unit CLS features, times sqrt(width): 1 spread out, 0 all images alike
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
        """Return the reading of a record, in which null means not finite."""
        absent: Record = {field.name: math.nan for field in fields(cls)} | {"knn": None, "rankme": None}
        given = {name: record.get(name) for name in absent}
        return cls(**{name: absent[name] if value is None else value for name, value in given.items()})

    def to_record(self, state: str) -> Record:
        """Return the record of a reading that shows a state."""
        return {**asdict(self), "excess": self.excess, "state": state}

    @property
    def excess(self) -> float:
        """The loss minus that of a student with the same flat output for every image."""
        return self.loss - math.log(self.prototypes)

    def scalars(self) -> dict[str, float]:
        """Return the scalars for trackers, in groups."""
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


def append_record(path: Path, record: Record) -> None:
    """Append a line; one that is torn because the process died is left out when the file is read."""
    with path.open("ab") as file:
        file.write(to_json(record) + b"\n")


def to_json(record: Record) -> bytes:
    """Return a record as JSON, null for what is not finite."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False).encode()


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, which may be growing; lines that are not whole are left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = []
    for line in lines:
        if not line.endswith(b"\n"):  # a torn line
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        else:
            log.warning("%s has a damaged line, which is left out: %.60r", path.name, line)
    return records


def drop_later_records(path: Path, step: int) -> list[Record]:
    """Drop the damaged lines of a file and those after `step`, which the run will write again."""
    records = [record for record in read_records(path) if record["step"] <= step]
    content = b"".join(to_json(record) + b"\n" for record in records)
    if path.exists() and path.read_bytes() != content:
        write_bytes(path, content)
    return records


@dataclass(frozen=True)
class Diagnosis:
    """The state of a run, and what to try if it is a bad one."""

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
    "sharpen more with a lower loss.teacher_temp (0.04 is safe); centre less with "
    "loss.center_momentum=0.99.",
)
ONE_PROTOTYPE = Diagnosis(
    "one prototype",
    "One prototype takes every image: the teacher is sharpened more than it is centred. Move the centre "
    "faster with loss.center_momentum=0.9, warm loss.teacher_temp up towards 0.07, lower optim.lr, keep "
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
STATES = {
    known.state: known
    for known in (STARTING, LEARNING, NONFINITE, UNIFORM, ONE_PROTOTYPE, IMAGES_ALIKE, STUCK_AT_LN)
}


def diagnose(readings: Sequence[Reading], *, settled_step: int) -> Diagnosis:
    """Return the state of a run from its last few readings.

    At first a healthy run looks collapsed: new networks give all images nearly the same features, and the
    centre removes what they share. So only non-finite steps are reported before `settled_step`, which should
    be after the warm-up of the learning rate and the freeze of the last layer.
    """
    if not readings:
        return STARTING
    if _skips_steps(readings[-PATIENCE - 1 :]):
        return NONFINITE
    settled = [reading for reading in readings[-PATIENCE:] if reading.step >= settled_step]
    symptoms = [symptom for reading in settled if (symptom := _symptom(reading))]
    if len(symptoms) < len(settled):
        return LEARNING
    return symptoms[-1] if len(symptoms) == PATIENCE else STARTING


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
    if reading.rows < FEW_ROWS:
        return None
    most = math.log(reading.prototypes)
    if reading.mean_output_entropy < ZERO * most:
        return ONE_PROTOTYPE
    if reading.entropy_gap < ALIKE * min(most, math.log(reading.rows)):
        return UNIFORM if reading.output_entropy > MAXIMAL * most else IMAGES_ALIKE
    return STUCK_AT_LN if reading.excess > -STUCK * most else None

"""The readings of a run: lines of `metrics.jsonl`, written and read."""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from dino_vit.core import log
from dino_vit.core.storage import write_bytes

Record = dict[str, Any]  # a line of `metrics.jsonl` or `starts.jsonl`


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

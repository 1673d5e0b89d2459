"""The records of a run, written and read: `metrics.jsonl`, `starts.jsonl` and `baseline.json`."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from dino_vit.core import log
from dino_vit.core.storage import write_bytes

T = TypeVar("T")

# As read from JSON, in which null is a number that is not finite.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Count = Annotated[int, Field(ge=0, le=2**53)]


# The scalars of a record for trackers, by group.
GROUPS = {
    "loss": ("excess", "student_divergence", "koleo", "gram"),
    "teacher": (
        *("mean_output_entropy", "output_entropy", "prototypes_in_use", "embedding_std", "momentum"),
        *("patch_mean_output_entropy", "patch_output_entropy", "patch_prototypes_in_use"),
    ),
    "optim": ("lr", "weight_decay", "gradient_norm", "nonfinite_steps"),
    "speed": ("images_per_second", "data_wait"),
    "run": ("epoch",),
    "eval": ("knn", "rankme", "best_knn"),
}
# Those that have another name there.
RENAMED = {
    "loss/cls": "loss",
    "loss/patch": "patch_loss",
    "teacher/gap": "entropy_gap",
    "teacher/patch_gap": "patch_entropy_gap",
    "teacher/temperature": "teacher_temp",
}


@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """The numbers of one log line; entropies and the divergence are those of `loss.LossStatistics`."""

    step: Count  # taken so far
    total_steps: Count
    epoch: Annotated[float, Field(ge=0, le=2**53)]
    loss: Number  # the cross-entropy of student and teacher, mean since the previous record
    # None of what a student that imitates features has not; then the loss is 1 minus their cosine.
    prototypes: Annotated[Count, Field(gt=0)] | None = None
    mean_output_entropy: Number | None = None
    output_entropy: Number | None = None
    entropy_gap: Number | None = None
    student_divergence: Number | None = None
    prototypes_in_use: Count | None = None
    rows: Count | None = None  # teacher outputs, over all processes, that the entropies were taken over
    embedding_std: Number  # of unit CLS features, times sqrt(width): 1 spread out, 0 all images alike
    gradient_norm: Number
    lr: Number
    weight_decay: Number
    momentum: Number
    teacher_temp: Number
    images_per_second: Number
    data_wait: Number  # share of the time
    nonfinite_steps: Count  # since the start of the run
    koleo: Number | None = None  # at this step, summed over the global views
    gram: Number | None = None  # at this step
    patch_loss: Number | None = None  # at this step, like the entropies of the teacher's masked patches
    patch_mean_output_entropy: Number | None = None
    patch_output_entropy: Number | None = None
    patch_entropy_gap: Number | None = None
    patch_prototypes_in_use: Count | None = None
    patch_rows: Count | None = None
    knn: float | None = None  # percent, where the step was evaluated and there are labels
    rankme: float | None = None  # where the step was evaluated
    best_features: str | None = None  # the tokens whose k-NN accuracy was the best, and that accuracy
    best_knn: float | None = None
    state: str = ""  # what the records so far say about the run

    def to_record(self) -> dict[str, Any]:
        """Return the line of `metrics.jsonl`."""
        return {**asdict(self), "excess": self.excess}

    @property
    def excess(self) -> float | None:
        """The loss minus that of a student with the same flat output for every image."""
        return self.loss - math.log(self.prototypes) if self.prototypes else None

    def scalars(self) -> dict[str, float]:
        """Return the scalars for trackers, in groups."""
        record = self.to_record()
        named = {f"{group}/{name}": record[name] for group, names in GROUPS.items() for name in names}
        named |= {title: record[name] for title, name in RENAMED.items()}
        return {name: float(value) for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """The number of parameters of a network's parts."""

    backbone: Count
    head: Count


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of a run, a line of `starts.jsonl`: when, from which step, on what, with which choices."""

    step: Count
    began: str
    version: str
    torch: str
    device: str
    cores: Count
    processes: Count
    precision: str
    workers: Count
    global_batch: Count
    images: Count
    steps_per_epoch: Count
    total_steps: Count
    parameters: ParameterCounts
    reasons: dict[str, str]  # of choices, by their setting


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a run is compared with: its network before the first step, and what needs no network.

    Accuracies are in per cent, and missing without labels.
    """

    rankme: Number | None = None
    knn: Number | None = None
    best_features: str | None = None
    best_knn: Number | None = None
    raw_pixels: Number | None = None
    largest_class: Number | None = None  # always guessed
    chance: Number | None = None
    queries: Count | None = None  # images that the accuracies are of

    def figures(self) -> dict[str, float]:
        """Return the finite numbers by name."""
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}


METRICS, START, BASELINE = TypeAdapter(MetricsRecord), TypeAdapter(Start), TypeAdapter(Baseline)


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a line, and end the one before if its writer died or the disk was full."""
    with path.open("ab+") as file:
        torn = False
        if file.tell():
            file.seek(-1, os.SEEK_END)
            torn = file.read() != b"\n"
        file.write(b"\n" * torn + to_json(record) + b"\n")


def to_json(record: Mapping[str, Any]) -> bytes:
    """Return a record as JSON, null for what is not finite."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False).encode()


def read_records(path: Path, kind: TypeAdapter[T]) -> list[T]:
    """Return the records of a file, which may be growing; lines that are no such record are left out."""
    return [record for record, _ in _parse(path, kind)]


def drop_later_records(path: Path, step: int) -> list[MetricsRecord]:
    """Drop the damaged lines of a file and those after `step`, which the run will write again."""
    kept = [(metrics, line) for metrics, line in _parse(path, METRICS) if metrics.step <= step]
    content = b"".join(line.rstrip(b"\n") + b"\n" for _, line in kept)
    if path.exists() and path.read_bytes() != content:
        write_bytes(path, content)
    return [metrics for metrics, _ in kept]


def _parse(path: Path, kind: TypeAdapter[T]) -> Iterator[tuple[T, bytes]]:
    """Yield the records of a file with their lines."""
    damaged = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            yield kind.validate_json(line, strict=True), line
        except ValidationError:
            damaged.append(line)
    if damaged:
        _warn(path, damaged[0][:60])


@cache  # once, though a command may read a file several times
def _warn(path: Path, line: bytes) -> None:
    log.warning("%s: damaged lines are left out; the first is %r", path, line)

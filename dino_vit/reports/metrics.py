"""The records of a run, written and read: `metrics.jsonl`, `starts.jsonl` and `baseline.json`."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from dino_vit.core import log
from dino_vit.core.storage import write_bytes
from dino_vit.eval.online import Guesses, OnlineFigures

T = TypeVar("T")

# As read from JSON, in which null is a number that is not finite.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Count = Annotated[int, Field(ge=0, le=2**53)]
# The first of these that is measured tells which step was the best.
DECISIVE = ("knn", "rankme")


@dataclass(frozen=True, kw_only=True)
class MetricsRecord(OnlineFigures):
    """The numbers of one log line; entropies and the divergence are of `loss_statistics`.

    Those of an evaluation are missing where the step was not evaluated.
    """

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
    # Of the other terms of the loss at this step, before their weights: `koleo`, `patch_entropy_gap`, ...
    terms: dict[str, Number] = field(default_factory=dict)
    diagnosis: str = ""  # what the records so far say about the run

    def to_record(self) -> dict[str, Any]:
        """Return the line of `metrics.jsonl`, the evaluation at its end."""
        record = asdict(self)
        evaluated = {each.name: record.pop(each.name) for each in fields(OnlineFigures)}
        return {**record, "excess": self.excess, **evaluated}

    def figures(self) -> dict[str, Any]:
        """Return the same without the bits of the images that were classified correctly."""
        return {name: value for name, value in self.to_record().items() if not name.endswith("_answers")}

    @property
    def excess(self) -> float | None:
        """The loss minus that of a student with the same flat output for every image."""
        return self.loss - math.log(self.prototypes) if self.prototypes else None

    def scalars(self) -> dict[str, float]:
        """Return the scalars for trackers, those of an evaluation in a group of their own."""
        record = {**self.to_record(), **self.terms}
        record = {name: value for name, value in record.items() if isinstance(value, int | float)}
        evaluated = {each.name for each in fields(OnlineFigures)}
        return {f"{'eval' if name in evaluated else 'train'}/{name}": record[name] for name in record}


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of a run, a line of `starts.jsonl`: when, from which step, on what, with which choices."""

    step: Count
    began: str
    version: str
    torch: str
    device: str
    processes: Count
    precision: str
    workers: Count
    global_batch: Count
    images: Count
    steps_per_epoch: Count
    total_steps: Count
    parameters: Annotated[dict[Literal["backbone", "head"], Count], Field(min_length=2)]
    reasons: dict[str, str]  # of choices, by their setting


@dataclass(frozen=True, kw_only=True)
class Baseline(OnlineFigures, Guesses):
    """What a run is compared with: its network before the first step, and what needs no network.

    Accuracies are in per cent, and missing without labels.
    """

    def figures(self) -> dict[str, float]:
        """Return the finite numbers by name."""
        numbers = {name: value for name, value in asdict(self).items() if type(value) in (int, float)}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}


METRICS, START_ADAPTER, BASELINE = TypeAdapter(MetricsRecord), TypeAdapter(Start), TypeAdapter(Baseline)


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
    return json.dumps(_finite(record), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_records(path: Path, kind: TypeAdapter[T]) -> list[T]:
    """Return the records of a file, which may be growing; lines that are no such record are left out."""
    records, damaged = list[T](), list[bytes]()
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            records.append(kind.validate_json(line, strict=True))
        except ValidationError:
            damaged.append(line[:60])
    if damaged:
        log.warning("%s: damaged lines are left out; the first is %r", path, damaged[0])
    return records


def drop_later_records(path: Path, step: int) -> list[MetricsRecord]:
    """Drop the damaged lines of a file and those after `step`, which the run will write again."""
    kept = [metrics for metrics in read_records(path, METRICS) if metrics.step <= step]
    content = b"".join(to_json(metrics.to_record()) + b"\n" for metrics in kept)
    if path.exists() and path.read_bytes() != content:
        write_bytes(path, content)
    return kept

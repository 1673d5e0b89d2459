"""What a run folder says of its run, whether the run is finished, under way, or has hardly begun."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dino_vit.config import yaml
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import settings_of, values
from dino_vit.core.checkpoint import Checkpoint, Checkpoints
from dino_vit.core.progress import duration
from dino_vit.core.storage import StorageError
from dino_vit.training.diagnosis import STATES, Diagnosis, Reading, Record
from dino_vit.training.monitor import read_records


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything in a run folder but the images and the weights."""

    folder: Path
    config: PretrainConfig
    records: list[Record]  # lines of metrics.jsonl
    starts: list[Record]
    baseline: Record  # figures before the first step

    @property
    def readings(self) -> list[Reading]:
        return [Reading.from_record(record) for record in self.records]

    @property
    def step(self) -> int:
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def total_steps(self) -> int | None:
        known = [source["total_steps"] for source in (*self.records[-1:], *self.starts[-1:])]
        return int(known[0]) if known else self.config.budget.steps

    @property
    def seconds(self) -> float | None:
        """Time spent on training steps, without what lay between them, as evaluations do."""
        if not self.starts or not self.records:
            return None
        batch, spent, before = self.starts[-1]["global_batch"], 0.0, 0
        for record in self.records:
            if record["images_per_second"]:
                spent += (record["step"] - before) * batch / record["images_per_second"]
            before = record["step"]
        return spent


def read_run(folder: Path) -> RunRecord:
    """Read a run folder without changing anything in it."""
    settings = folder / "config.yaml"
    if not settings.is_file():
        known = "the folder of a run, which has a config.yaml" if folder.is_dir() else "a folder that exists"
        raise ValueError(f"{folder} is no run: give {known}")
    baseline = folder / "baseline.json"
    return RunRecord(
        folder=folder,
        config=load(PretrainConfig, settings),
        records=read_records(folder / "metrics.jsonl"),
        starts=read_records(folder / "starts.jsonl"),
        baseline=json.loads(baseline.read_bytes()) if baseline.exists() else {},
    )


def newest_checkpoint(folder: Path) -> Checkpoint | str:
    """Return the newest whole checkpoint, or why there is none."""
    try:
        found = Checkpoints(folder).newest()
    except (StorageError, OSError) as error:  # a run under way may remove the one that is being read
        return str(error)
    return found or "the run has written no checkpoint yet"


def differences(record: RunRecord) -> list[tuple[str, str, str, str]]:
    """Return key, value, default and, where the run chose by itself, the reason; defaults are left out."""
    now, default = values(record.config), values(PretrainConfig())
    reasons = {key: reason for start in record.starts for key, reason in start["reasons"].items()}
    return [
        (key, yaml.write(now[key]), yaml.write(default.get(key)), reasons.get(key, ""))
        for key in settings_of(PretrainConfig)
        if key in now and now[key] != default.get(key)
    ]


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return what ran, where, on what and for how long, as names and sentences."""
    config, start = record.config, record.starts[-1] if record.starts else None
    width, depth, heads = config.model.shape
    network = f"ViT/{config.model.patch_size}, width {width}, {depth} blocks, {heads} heads"
    images, parts = "images", []
    if start:
        images = f"{start['images']:,} images"
        backbone, head = (start["parameters"][name] / 1e6 for name in ("backbone", "head"))
        network += f"; {backbone:.1f} M parameters, head {head:.1f} M"
        processes = "1 process" if start["processes"] == 1 else f"{start['processes']} processes"
        precision = "float32" if start["precision"] == "no" else start["precision"]
        cores = f", {start['cores']} cores each" if "CUDA" not in start["device"] else ""
        parts.append(("Device", f"{start['device']}; {processes}{cores}, {precision}"))
        parts.append(("Versions", f"dino-vit {start['version']}, torch {start['torch']}"))
        parts.append(("Started", _starts(record)))
    views = config.views
    seen = f"{views.global_count} global of {_size(views.global_size)}"
    if views.local_count:
        seen += f", {views.local_count} local of {_size(views.local_size)}"
    return [
        ("Network", network),
        ("Images", f"{images} of {config.data.source}"),
        ("Views", seen),
        ("Prototypes", f"{config.head.prototypes:,}"),
        ("Length", _length(record)),
        *parts,
        ("Speed", _speed(record)),
    ]


def _size(size: int | tuple[int, int]) -> str:
    return f"{size} px" if isinstance(size, int) else f"{size[0]} × {size[1]} px"


def _starts(record: RunRecord) -> str:
    first, times = record.starts[0]["began"].replace("T", " ").replace("+00:00", " UTC"), len(record.starts)
    again = f", gone on with {times - 1} times, last at step {record.starts[-1]['step']:,}"
    return first + (again if times > 1 else "")


def _length(record: RunRecord) -> str:
    total = record.total_steps
    done = f"{record.step:,} of {total:,} steps" if total else f"{record.step:,} steps"
    if record.records:
        done += f", {record.records[-1]['epoch']:.4g} epochs"
    if record.starts:
        done += f", global batch {record.starts[-1]['global_batch']:,}"
    return done


def _speed(record: RunRecord) -> str:
    speeds = [r["images_per_second"] for r in record.records if r["images_per_second"]]
    waits = [r["data_wait"] for r in record.records if r["data_wait"] is not None]
    if not speeds:
        return "not known before the first reading"
    text = f"{median(speeds):,.0f} images/s; {median(waits):.0%} of the time waiting for images"
    return f"{text}; {duration(record.seconds)} of training steps" if record.seconds else text


def state(record: RunRecord) -> tuple[Diagnosis, str]:
    """Return what the newest reading says of the run, and how it came there."""
    spans: list[tuple[str, int]] = []  # state, first step
    for line in record.records:
        if not spans or spans[-1][0] != line["state"]:
            spans.append((line["state"], line["step"]))
    if not spans:
        return STATES["starting"], "There are no readings yet: metrics.jsonl is empty or not there."
    name, since = spans[-1]
    before = [f"{earlier} from step {first:,}" for earlier, first in spans[-4:-1]]
    said = f"{name.capitalize()} since the reading of step {since:,}"
    return STATES.get(name, Diagnosis(name)), said + (f"; before, {', '.join(before)}." if before else ".")


def finite(value: object) -> float | None:
    """Return a number, or None for what is none or not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

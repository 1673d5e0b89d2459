"""What a run folder says about its run, be it finished, under way or hardly begun."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dino_vit.config import yaml
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import settings_of, values
from dino_vit.core.progress import duration, plural
from dino_vit.training.diagnosis import Diagnosis
from dino_vit.training.readings import BASELINE, READING, START, Baseline, Reading, Start, read_records
from dino_vit.training.verdict import STATES, TOO_EARLY, circumstances, summarise


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything in a run folder but the images and the weights."""

    folder: Path
    config: PretrainConfig
    readings: list[Reading]
    starts: list[Start]
    baseline: Baseline

    @property
    def step(self) -> int:
        return self.readings[-1].step if self.readings else 0

    @property
    def total_steps(self) -> int | None:
        newest: list[Reading | Start] = [*self.readings[-1:], *self.starts[-1:]]
        return newest[0].total_steps if newest else self.config.budget.steps

    def latest(self, figure: str) -> float | None:
        """Return the newest finite value of a figure."""
        found = (finite(getattr(reading, figure)) for reading in reversed(self.readings))
        return next((value for value in found if value is not None), None)

    def baseline_levels(self, *figures: str) -> dict[str, float]:
        """Return figures measured before the first step, by the name of what they were measured on."""
        network = "initial weights" if self.config.init else "untrained network"
        others = {"raw_pixels": "raw pixels", "largest_class": "largest class", "chance": "chance"}
        names = {figure: others.get(figure, network) for figure in figures}
        found = {names[figure]: finite(getattr(self.baseline, figure)) for figure in figures}
        return {name: value for name, value in found.items() if value is not None}


def read_run(folder: Path) -> RunRecord:
    """Read a run folder without changing anything in it."""
    settings = folder / "config.yaml"
    if not settings.is_file():
        reason = "it has no config.yaml" if folder.is_dir() else "there is no such folder"
        raise ValueError(f"{folder} is not the folder of a run: {reason}; give the `output` of a pretraining")
    return RunRecord(
        folder=folder,
        config=load(PretrainConfig, settings),
        readings=read_records(folder / "metrics.jsonl", READING),
        starts=read_records(folder / "starts.jsonl", START),
        baseline=next(iter(read_records(folder / "baseline.json", BASELINE)), Baseline()),
    )


def changed_settings(record: RunRecord) -> list[tuple[str, str, str, str]]:
    """Return key, value, default and, where it was chosen automatically, the reason of changed settings."""
    now, default = values(record.config), values(PretrainConfig())
    reasons = {key: reason for start in record.starts for key, reason in start.reasons.items()}
    return [
        (key, yaml.write(now[key]), yaml.write(default.get(key)), reasons.get(key, ""))
        for key in settings_of(PretrainConfig)
        if key in now and now[key] != default.get(key)
    ]


def facts(record: RunRecord) -> dict[str, str]:
    """Return what ran, where, on what and for how long."""
    config, machine = record.config, dict[str, str]()
    network = config.model.title
    images = config.data.source
    global_size, local_size = (
        f"{height} × {width} px" for height, width in (config.views.global_shape, config.views.local_shape)
    )
    views = f"{config.views.global_count} global of {global_size}"
    if config.views.local_count:
        views += f", {config.views.local_count} local of {local_size}"
    if record.starts:
        (first, *resumed), start = record.starts, record.starts[-1]
        backbone, head = start.parameters.backbone / 1e6, start.parameters.head / 1e6
        network += f"; {backbone:.1f} M parameters, head {head:.1f} M"
        images = f"{start.images:,} images from {images}"
        processes = plural(start.processes, "process", "processes")
        precision = "float32" if start.precision == "no" else start.precision
        cores = f", {start.cores} cores each" if "CUDA" not in start.device else ""
        started = first.began.replace("T", " ").replace("+00:00", " UTC")
        if resumed:
            times = "once, at" if len(resumed) == 1 else f"{len(resumed)} times, most recently at"
            started += f"; resumed {times} step {start.step:,}"
        machine = {
            "Device": f"{start.device}; {processes}{cores}, {precision}",
            "Versions": f"dino-vit {start.version}, torch {start.torch}",
            "Started": started,
        }
    return {
        "Network": network,
        "Images": images,
        "Views": views,
        **({} if _imitates(record) else {"Prototypes": f"{config.head.prototypes:,}"}),
        **({"Teacher": config.teacher.weights} if config.teacher.weights else {}),
        "Training": _progress(record),
        **machine,
        "Speed": _speed(record),
    }


def _imitates(record: RunRecord) -> bool:
    """Tell whether the student imitates the features of a frozen backbone, without prototypes."""
    return bool(record.readings) and record.readings[-1].prototypes is None


def _progress(record: RunRecord) -> str:
    total = f" of {record.total_steps:,}" if record.total_steps else ""
    done = f"{record.step:,}{total} steps"
    if record.readings:
        done += f", {record.readings[-1].epoch:.4g} epochs"
    if record.starts:
        done += f", global batch {record.starts[-1].global_batch:,}"
    return done


def _speed(record: RunRecord) -> str:
    speeds = [reading.images_per_second for reading in record.readings if reading.images_per_second > 0]
    waits = [reading.data_wait for reading in record.readings]
    if not speeds:
        return "unknown before the first line of metrics.jsonl"
    text = f"{median(speeds):,.0f} images/s; {100 * median(waits):.0f} % of the time waiting for images"
    if not record.starts:
        return text
    # Without the time of evaluations and checkpoints, which images_per_second leaves out.
    images, seconds, before = record.starts[-1].global_batch, 0.0, 0
    for line in record.readings:
        if line.images_per_second > 0:
            seconds += (line.step - before) * images / line.images_per_second
        before = line.step
    return f"{text}; {duration(seconds)} of training steps" if math.isfinite(seconds) else text


def state(record: RunRecord) -> tuple[Diagnosis, str]:
    """Return the state of a run by its newest reading, and how it came to it."""
    spans: list[tuple[str, int]] = []  # state, first step
    for line in record.readings:
        if not spans or spans[-1][0] != line.state:
            spans.append((line.state, line.step))
    if not spans:
        return TOO_EARLY, "metrics.jsonl is missing or has no lines yet."
    name, since = spans[-1]
    history = f"since step {since:,}"
    if spans[:-1]:
        history += "; earlier: " + ", ".join(f"{old} from step {first:,}" for old, first in spans[-4:-1])
    return STATES.get(name, Diagnosis(name)), f"{history}."


def outcome(record: RunRecord) -> str:
    """Return what has come of a run so far, in the words of its last line."""
    images = record.starts[-1].images if record.starts else 0
    return summarise(record.readings, circumstances(record.config, record.readings, record.baseline, images))


def finite(value: object) -> float | None:
    """Return a number as a float, or None for anything that is not a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

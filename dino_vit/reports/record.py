"""What a run folder says about its run, be it finished, under way or hardly begun."""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from dino_vit.config.loading import load, write_yaml
from dino_vit.config.objects import is_object
from dino_vit.config.outputs import RESULTS_FOLDER, RESULTS_VERSION
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import BASELINES
from dino_vit.config.settings import settings_of, values
from dino_vit.core import log
from dino_vit.core.text import did_you_mean, plural, public, public_values
from dino_vit.reports.metrics import (
    BASELINE,
    METRICS,
    START_ADAPTER,
    Baseline,
    MetricsRecord,
    Start,
    read_records,
)
from dino_vit.reports.verdict import Verdict, judge_run

_LEFT_OUT = "source", "train", "weights", "output", "overwrite"  # settings that other columns tell


class Evaluation(NamedTuple):
    """What a file of results says first, as text."""

    command: str  # and the step of a checkpoint
    figure: str
    percent: str  # with its confidence interval
    data: str
    settings: str  # that were given
    written: str  # UTC
    file: str


def read_evaluations(run: Path) -> list[Evaluation]:
    """Return the results in the folder of a run, the newest first."""
    evaluations = []
    for path in sorted((run / RESULTS_FOLDER).glob("*.json")):
        try:
            evaluations.append(_read(path))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("%s is not listed, as it is damaged or holds no results: %s", path, error)
    return sorted(evaluations, key=lambda evaluation: evaluation.written, reverse=True)


def _read(path: Path) -> Evaluation:
    content = json.loads(path.read_bytes())
    if (version := content.get("version")) != RESULTS_VERSION:
        raise ValueError(f"its version is {version}, but this dino-vit reads {RESULTS_VERSION}")
    command = content.get("command", path.stem)  # programs of eval/ have a name, but no single figure
    figure = content.get("figure") or {"title": ""}
    settings = content.get("settings") or {}
    step = content.get("weights", {}).get("step")
    given = {key: value for key, value in content.get("given", {}).items() if key not in _LEFT_OUT}
    return Evaluation(
        command=f"{command}, step {step:,}" if step else command,
        figure=figure["title"],
        percent="{value:.2f} ({low:.2f} to {high:.2f})".format(**figure) if figure["title"] else "",
        data=" by ".join(str(settings[key]) for key in ("source", "train") if settings.get(key)),
        settings=", ".join(f"{key}={write_yaml(value)}" for key, value in given.items()),
        written=content.get("written", "")[:19].replace("T", " "),
        file=path.name,
    )


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Everything in a run folder but the images and the weights."""

    folder: Path
    config: PretrainConfig
    history: list[MetricsRecord]
    starts: list[Start]
    baseline: Baseline
    evaluations: list[Evaluation]

    @property
    def step(self) -> int:
        return self.history[-1].step if self.history else 0

    @property
    def total_steps(self) -> int | None:
        newest: list[MetricsRecord | Start] = [*self.history[-1:], *self.starts[-1:]]
        return newest[0].total_steps if newest else self.config.budget.steps

    def baseline_levels(self, *figures: str) -> dict[str, float]:
        """Return figures measured before the first step, by the name of what they were measured on."""
        network = "initial weights" if self.config.init else "untrained"
        names = {name: name for name in BASELINES} | {"largest_class": "largest class", "chance": "chance"}
        measured = self.baseline.figures()
        return {names.get(figure, network): measured[figure] for figure in figures if figure in measured}


def read_run(folder: Path) -> RecordedRun:
    """Read a run folder without changing anything in it."""
    settings = folder / "config.yaml"
    if not settings.is_file():
        reason = "it has no config.yaml" if folder.is_dir() else "there is no such folder"
        advice = did_you_mean(str(folder), "; give the `output` of a pretraining")
        raise ValueError(f"{folder} is not the folder of a run: {reason}{advice}")
    return RecordedRun(
        folder=folder,
        config=load(PretrainConfig, settings),
        history=read_records(folder / "metrics.jsonl", METRICS),
        starts=read_records(folder / "starts.jsonl", START_ADAPTER),
        baseline=next(iter(read_records(folder / "baseline.json", BASELINE)), Baseline()),
        evaluations=read_evaluations(folder),
    )


def changed_settings(record: RecordedRun) -> list[tuple[str, str, str, str]]:
    """Return key, value, default and, where it was chosen automatically, the reason of changed settings."""
    now, default = public_values(values(record.config)), public_values(values(PretrainConfig()))
    reasons = {key: reason for start in record.starts for key, reason in start.reasons.items()}
    return [
        (key, write_yaml(now[key]), write_yaml(default.get(key)), reasons.get(key, ""))
        for key in settings_of(PretrainConfig)
        if key in now and now[key] != default.get(key)
    ]


def facts(record: RecordedRun) -> dict[str, str]:
    """Return what ran, where, on what and how fast."""
    named = {
        "network": record.config.model.title,
        "images from": ", ".join(map(public, record.config.data.sources)),
        "training": f"{record.step:,} of {record.total_steps or 0:,} steps",
    }
    if record.history:
        named["training"] += f", epoch {record.history[-1].epoch:.4g}"
        speed = median(metrics.images_per_second for metrics in record.history)
        named["images per second"] = f"{speed:,.0f}"
    if record.starts:
        start, starts = asdict(record.starts[-1]), len(record.starts)
        named["parameters"] = "; ".join(f"{part} {count:,}" for part, count in start["parameters"].items())
        for name in ("images", "global_batch", "device", "processes", "precision", "version", "torch"):
            value = start[name]
            named[name.replace("_", " ")] = f"{value:,}" if isinstance(value, int) else value
        named["started"] = f"{record.starts[0].began[:16].replace('T', ' ')} UTC"
        named |= {"resumed": plural(starts - 1, "time")} if starts > 1 else {}
    return named


def label_command(config: PretrainConfig, weights: Path) -> str:
    """Return the command to label the images of a run by; empty if no command line can name them."""
    sources = config.data.sources
    if len(sources) != 1 or is_object(sources[0]):
        return ""
    return shlex.join(["dino-vit", "label", public(sources[0]), str(weights)])


def verdict(record: RecordedRun) -> Verdict:
    """Return what is said of a run so far, in the words of its last lines."""
    return judge_run(record.history, record.config, record.baseline)

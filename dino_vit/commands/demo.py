"""`dino-vit demo`: pretrain a small transformer in minutes, and show what it learned."""

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from shlex import quote

import torch

from dino_vit.commands import report
from dino_vit.config.commands import DemoConfig, ReportConfig
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import choose_precision
from dino_vit.core.text import Result
from dino_vit.reports.record import read_run
from dino_vit.training.pretrain import pretrain

MINUTES = 2.5  # without native bf16 a step takes twice as long or more: then the steps that fit into these


@dataclass(frozen=True, kw_only=True, repr=False)
class DemoResult(Result):
    """Where the run is, and what was learned."""

    folder: Path
    knn: dict[str, float]  # accuracies in per cent, by network


def run(config: DemoConfig) -> DemoResult:
    """Pretrain on textures, measure by k-NN what was learned, and write a report."""
    settings = recipe(config)
    folder = Path(settings.output)
    pretrain(settings)
    report.run(load(ReportConfig, None, {"run": str(folder), "images": 200 if config.quick else 500}))
    record = read_run(folder)
    baseline = record.baseline
    levels = {"untrained": baseline.knn, "trained": record.history[-1].knn}
    levels |= {"pixels": baseline.pixels, "edges": baseline.edges, "chance": baseline.chance}
    knn = {network: percent for network, percent in levels.items() if percent is not None}
    percents = ", ".join(f"{network} {percent:.1f} %" for network, percent in knn.items())
    lines = [
        f"k-NN accuracy; the pretraining used no labels: {percents}",
        f"Report: {(folder / 'report.html').resolve()} (open it in a browser)",
        "Try next:",
        f"  dino-vit linear synthetic:2000 {quote(str(folder))}  # a linear classifier on the features",
        *(["  dino-vit demo  # a longer run"] if config.quick else []),
        "  dino-vit pretrain photos runs/photos recipe=auto budget.minutes=10  # photos: a folder of yours",
        "  dino-vit label photos runs/photos  # a page to label them by",
    ]
    return DemoResult(folder=folder, knn=knn, text="\n".join(lines))


def recipe(config: DemoConfig) -> PretrainConfig:
    """Return the settings of the pretraining; that of the quick demo has a folder in the other's."""
    name, output = "textures", Path(config.output)
    if config.quick:
        name, output = "quick", output / "quick"
    with as_file(files("dino_vit.commands") / "demo_runs" / f"{name}.yaml") as path:
        settings = load(PretrainConfig, path, [f"output={output}", f"seed={config.seed}"])
    if config.steps is not None:
        return load(PretrainConfig, settings, {"budget.steps": config.steps})
    is_fast = torch.cuda.is_available() or choose_precision("auto", torch.device("cpu")) == "bf16"
    if config.quick or is_fast:
        return settings
    return load(PretrainConfig, settings, {"budget.steps": None, "budget.minutes": MINUTES})

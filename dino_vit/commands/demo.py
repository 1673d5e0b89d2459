"""`dino-vit demo`: pretrain two small transformers in minutes, and show what they learned."""

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from shlex import quote

import torch

from dino_vit.commands import report
from dino_vit.config.commands import AttentionConfig, DemoConfig, ReportConfig
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core import log
from dino_vit.core.runtime import choose_precision
from dino_vit.core.text import Result
from dino_vit.eval.maps import attention
from dino_vit.reports.record import read_run
from dino_vit.training.pretrain import pretrain

# Without native bf16 a step takes twice as long or more: then the runs take the steps that fit into these.
MINUTES = {"textures": 2.5, "scenes": 1.5}
PICTURES = "synthetic:scenes:100:192"  # twice as large as the views, so patches are small beside the regions


@dataclass(frozen=True, kw_only=True)
class DemoResult(Result):
    """Where the runs are, and what was learned."""

    folder: Path
    knn: dict[str, float]  # accuracies in per cent, by network


def run(config: DemoConfig) -> DemoResult:
    """Pretrain, draw attention maps and write a report; or only a short run and its report.

    Textures have classes, so k-NN says what was learned of them; scenes have regions, which one can see.
    """
    textures = recipe(config, "quick" if config.quick else "textures")
    folder = Path(textures.output)
    pretrain(textures)
    maps = [] if config.quick else [f"Attention maps: {_attention(config, folder).resolve()}"]
    report.run(load(ReportConfig, None, {"run": str(folder), "images": 200 if config.quick else 500}))
    record = read_run(folder)
    baseline = record.baseline
    levels = {"untrained": baseline.knn, "trained": record.latest("knn")}
    levels |= {"raw pixels": baseline.raw_pixels, "chance": baseline.chance}
    knn = {network: percent for network, percent in levels.items() if percent is not None}
    percents = ", ".join(f"{network} {percent:.1f} %" for network, percent in knn.items())
    next_command = f"attention synthetic:scenes:9 {quote(f'{folder}/scenes')} output=maps  # other pictures"
    if config.quick:
        next_command = "demo  # a longer run, and another whose attention is worth looking at"
    lines = [
        f"k-NN accuracy; the pretraining used no labels: {percents}",
        *maps,
        f"Report: {(folder / 'report.html').resolve()} (open it in a browser)",
        "Try next:",
        f"  dino-vit linear synthetic:2000 {quote(textures.output)}  # a linear classifier on the features",
        f"  dino-vit {next_command}",
        "  dino-vit pretrain photos runs/photos recipe=auto budget.minutes=10  # photos: a folder of yours",
    ]
    return DemoResult(folder=folder, knn=knn, text="\n".join(lines))


def _attention(config: DemoConfig, folder: Path) -> Path:
    """Pretrain on scenes, draw what the network attends to and return the folder of the pictures."""
    log.info("the same for scenes, whose attention is worth looking at:")
    scenes, maps = recipe(config, "scenes"), folder / "attention"
    pretrain(scenes)
    settings = {"weights": scenes.output, "source": PICTURES, "output": str(maps), "overwrite": True}
    attention.run(load(AttentionConfig, None, settings))
    return maps


def recipe(config: DemoConfig, name: str) -> PretrainConfig:
    """Return the settings of a pretraining; the others have their folders in that of textures."""
    output = Path(config.output, *([name] if name != "textures" else []))
    with as_file(files("dino_vit.commands") / "demo_runs" / f"{name}.yaml") as path:
        settings = load(PretrainConfig, path, [f"output={output}", f"seed={config.seed}"])
    if config.steps is not None:
        return replace(settings, {"budget.steps": config.steps})
    is_fast = torch.cuda.is_available() or choose_precision("auto", torch.device("cpu")) == "bf16"
    if name not in MINUTES or is_fast:
        return settings
    return replace(settings, {"budget.steps": None, "budget.minutes": MINUTES[name]})

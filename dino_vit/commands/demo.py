"""`dino-vit demo`: pretrain two small transformers in minutes, and show what they learned."""

import json
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from dino_vit.commands import Result, report
from dino_vit.commands.maps import attention
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import Count, Seed, Settings, setting
from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.distributed import any_process
from dino_vit.core.runtime import choose_precision
from dino_vit.data.sources.open import Source, open_source
from dino_vit.eval.accuracy import write_results
from dino_vit.eval.features import extract_features, pixel_features
from dino_vit.eval.linear import count_correct, sweep
from dino_vit.eval.online import random_indices
from dino_vit.reports.record import read_run
from dino_vit.training.loop import pretrain
from dino_vit.training.setup import build_untrained
from dino_vit.views.build import build_eval_transform
from dino_vit.weights import load_backbone

# Without native bf16 a step takes twice as long or more: then the runs take the steps that fit into these.
MINUTES = {"textures": 2.5, "scenes": 1.5}
PICTURES = "synthetic:scenes:100:192"  # twice as large as the views, so patches are small beside the regions
PENALTIES = tuple(10.0**power for power in range(-4, 3))  # C of the logistic regressions


class DemoConfig(Settings):
    """Pretrain small networks on generated images, and show what they learned."""

    resumes: ClassVar = True
    output: str = setting("runs/demo", "folder of the runs; a second call resumes them or reuses results")
    seed: Seed = setting(0, "seed of every random number")
    steps: Count | None = setting(None, "optimiser steps of each run; null: 4 minutes of both on two cores")
    images: Count = setting(5000, "number of images for the linear probe")


@dataclass(frozen=True, kw_only=True)
class DemoResult(Result):
    """Where the runs are, and what was learned."""

    folder: Path
    figures: dict[str, dict[str, float]]  # accuracies in per cent, by evaluation and network


def run(config: DemoConfig) -> DemoResult:
    """Pretrain, evaluate, draw attention maps and write a report, reusing what is up to date.

    Textures have classes, so accuracies say what was learned of them; scenes have regions, which one can see.
    """
    textures, scenes = (recipe(config, name) for name in ("textures", "scenes"))
    folder = Path(textures.output)
    pretrain(textures)
    log.info("the same for scenes, whose attention is worth looking at:")
    pretrain(scenes)
    weights, scene_weights = (Checkpoints(Path(run.output)).paths()[-1] for run in (textures, scenes))
    results, maps, page = folder / "demo.json", folder / "attention", folder / "report.html"
    # Decided before any process writes one of them.
    made_from = {results: weights, maps: scene_weights, page: weights}
    outdated = [path for path, source in made_from.items() if any_process(is_outdated(path, source))]
    if results in outdated:
        write_results(results, evaluate(folder, weights, config.images))
    if maps in outdated:
        settings = [f"weights={scene_weights}", f"source={PICTURES}", f"output={maps}"]
        attention.run(load(attention.AttentionConfig, None, settings))
    if page in outdated:
        report.run(load(report.ReportConfig, None, [f"run={folder}"]))
    figures = json.loads(results.read_bytes())
    lines = ["Top-1 accuracy; the pretraining used no labels:"]
    for evaluation, row in figures.items():
        percents = ", ".join(f"{network} {percent:.1f} %" for network, percent in row.items())
        lines.append(f"  {evaluation + ':':14}{percents}")
    lines.append(f"Attention maps: {maps.resolve()}")
    lines.append(f"Report: {page.resolve()} (open it in a browser)")
    return DemoResult(folder=folder, figures=figures, text="\n".join(lines))


def is_outdated(path: Path, weights: Path) -> bool:
    """Tell whether a result of weights is missing or older than they are."""
    return not path.exists() or path.stat().st_mtime < weights.stat().st_mtime


def recipe(config: DemoConfig, name: str) -> PretrainConfig:
    """Return the settings of a pretraining; that of scenes has its folder in the other's."""
    output = Path(config.output, *([name] if name == "scenes" else []))
    with as_file(files("dino_vit.commands") / "demo_runs" / f"{name}.yaml") as path:
        settings = load(PretrainConfig, path, [f"output={output}", f"seed={config.seed}"])
    if config.steps is not None:
        return replace(settings, {"budget.steps": config.steps})
    if torch.cuda.is_available() or choose_precision("auto", torch.device("cpu")) == "bf16":
        return settings
    return replace(settings, {"budget.steps": None, "budget.minutes": MINUTES[name]})


def evaluate(run: Path, weights: Path, images: int) -> dict[str, dict[str, float]]:
    """Return the accuracies of the untrained network, the trained one and raw pixels, in percent."""
    record = read_run(run)
    config, baseline = record.config, record.baseline
    source, transform = open_source(config.data.source), build_eval_transform(config)
    indices = random_indices(source, config.seed)[:images]
    log.info("training linear probes on %d images ...", len(indices))
    networks = {"untrained": build_untrained(config)[1].backbone, "trained": load_backbone(weights)}
    features = {
        name: extract_features(network, source, indices, transform=transform, batch_size=256).values
        for name, network in networks.items()
    }
    features["raw pixels"] = pixel_features(source, indices, transform=transform).values
    knn = {"untrained": baseline.knn, "trained": record.latest("knn"), "raw pixels": baseline.raw_pixels}
    knn["chance"] = baseline.chance
    return {
        "k-NN": {name: value for name, value in knn.items() if value is not None},
        "linear probe": {name: probe(values, source, indices) for name, values in features.items()},
    }


def probe(features: Tensor, source: Source, indices: list[int]) -> float:
    """Return the test accuracy in percent of a logistic regression.

    Three fifths of the images are for training, one fifth chooses the penalty, one fifth is for the test.
    """
    targets = torch.tensor([source.label(index) for index in indices])
    training, chosen = len(indices) * 3 // 5, len(indices) // 5
    sizes = [training, chosen, len(indices) - training - chosen]
    x, t = features.split(sizes), targets.split(sizes)  # type: ignore[no-untyped-call]
    fits = sweep(x[0], t[0], cs=PENALTIES, classes=len(source.classes), max_iterations=200)
    best = max(fits, key=lambda fit: int(count_correct(fit.head, x[1], t[1])[0]))
    return 100 * int(count_correct(best.head, x[2], t[2])[0]) / len(t[2])

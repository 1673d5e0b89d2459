"""`dino-vit demo`: a transformer that learns to see in minutes, and what shows that it did."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dino_vit.commands import attention
from dino_vit.commands import report as report
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import Count, CountOrZero, Settings, setting
from dino_vit.core.runtime import choose_precision, start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.data.sources.open import Source, open_source
from dino_vit.eval.features.extraction import extract_features, pixel_features
from dino_vit.eval.linear.logistic import sweep
from dino_vit.eval.linear.probes import count_correct
from dino_vit.models.vit import VisionTransformer
from dino_vit.report.explorer import chosen
from dino_vit.report.record import read_run
from dino_vit.training.feeding import build_preparation
from dino_vit.training.loop import pretrain, take_step
from dino_vit.training.opening import build_untrained, open_session
from dino_vit.training.reporter import Reporter
from dino_vit.views.preparation import Preparation
from dino_vit.weights import load_backbone
from dino_vit.weights.reading import find_weights

log = logging.getLogger("dino_vit")

# Of the images of a probe three fifths are learned from, one chooses the penalty, and one is reported on.
FIFTHS = (3, 1, 1)
# Without native bf16 a network computes at half the speed or less: then only steps that fit into this time.
SECONDS, TRIED_STEPS, FEWEST_STEPS = 240.0, 8, 400
PENALTIES = tuple(10.0**power for power in range(-4, 3))
Figures = Mapping[str, Mapping[str, float]]


class DemoConfig(Settings):
    """Pretrain a small network on generated images, and show what it learned."""

    output: str = setting("runs/demo", "folder of the run; a second call goes on there, or reuses all of it")
    seed: CountOrZero = setting(0, "of every random number")
    steps: Count | None = setting(
        None, "of the optimiser; null: the recipe's 1,400, without native bf16 those that fit into 4 minutes"
    )
    images: Count = setting(5000, "images of the linear probe")


def run(config: DemoConfig) -> int:
    """Pretrain, evaluate, draw, report; what is there already is not made again."""
    settings = recipe(config)
    code = pretrain(settings)
    if code:
        return code
    folder = Path(settings.output)
    weights, sheets, page = find_weights(folder), folder / "attention", folder / "report.html"
    figures = _kept(folder / "demo.json", weights, lambda: evaluate(settings, weights, config.images))
    if not _newer(sheets, weights):
        attention.run(load(attention.AttentionConfig, None, [f"weights={folder}", f"output={sheets}"]))
    if not _newer(page, weights):
        report.run(load(report.ReportConfig, None, [f"run={folder}"]))
    Console().print(table(figures), highlight=False)
    print(f"The report is {page.resolve()}: open it in a browser. Attention maps are in {sheets.resolve()}.")
    return 0


def recipe(config: DemoConfig) -> PretrainConfig:
    """Return the settings of the demo's pretraining."""
    given = [f"output={config.output}", f"seed={config.seed}"]
    begun = Path(config.output) / "config.yaml"
    with as_file(files("dino_vit.commands") / "demo.yaml") as path:
        settings = load(PretrainConfig, path, given)
        if config.steps is not None:
            steps = config.steps
        elif begun.exists():
            steps = load(PretrainConfig, begun).budget.steps or 0
        elif choose_precision("auto", torch.device("cpu")) == "bf16" or torch.cuda.is_available():
            return settings
        else:
            steps = affordable_steps(settings)
        return load(PretrainConfig, path, [*given, f"budget.steps={steps}"])


def affordable_steps(settings: PretrainConfig) -> int:
    """Return how many of the recipe's steps this machine takes in the demo's time, going by some."""
    wanted = settings.budget.steps or 0
    with TemporaryDirectory() as folder:
        accelerator = start_processes(trackers=(), folder=Path(folder))
        tried = replace(settings, {"output": folder, "run.trackers": (), "data.photometry": "device"})
        opened = open_session(tried, accelerator)
        with Reporter(opened) as reporter, closing(opened.session.loader.batches()) as batches:
            take_step(opened.session, reporter, batches)  # the first is slower
            began = time.perf_counter()
            for _ in range(TRIED_STEPS):
                take_step(opened.session, reporter, batches)
            seconds = (time.perf_counter() - began) / TRIED_STEPS
    steps = min(wanted, max(FEWEST_STEPS, int(SECONDS / seconds)))
    log.info("no native bf16 here; at %.0f ms a step, %d of %d steps are taken", 1e3 * seconds, steps, wanted)
    return steps


def evaluate(config: PretrainConfig, weights: Path, images: int) -> Figures:
    """Return accuracies in per cent: of the untrained network, the trained one and raw pixels."""
    record = read_run(Path(config.output))
    trained, untrained = load_backbone(weights), build_untrained(config)[1].backbone
    source, preparation = open_source(config.data.source), build_preparation(record.config)
    log.info("training linear probes on %d images ...", min(images, len(source)))
    places = chosen(source, images, config.seed)
    return {
        "k-NN": {
            "untrained": record.baseline["knn"],
            "trained": record.records[-1]["knn"],
            "raw pixels": record.baseline["raw_pixels"],
        },
        "linear probe": {
            "untrained": probe(_features(untrained, source, places, preparation), source, places),
            "trained": probe(_features(trained, source, places, preparation), source, places),
            "raw pixels": probe(
                pixel_features(source, places, preparation=preparation).values, source, places
            ),
        },
    }


def _features(
    model: VisionTransformer, source: Source, places: list[int], preparation: Preparation
) -> Tensor:
    return extract_features(model, source, places, preparation=preparation, batch_size=256).values


def probe(features: Tensor, source: Source, places: list[int]) -> float:
    """Return the accuracy in per cent of a logistic regression on images that it did not learn from."""
    targets = torch.tensor([source.label(place) for place in places])
    sizes = [len(places) * part // sum(FIFTHS) for part in FIFTHS[:-1]]
    sizes.append(len(places) - sum(sizes))
    x, t = features.split(sizes), targets.split(sizes)  # type: ignore[no-untyped-call]
    fits = sweep(x[0], t[0], cs=PENALTIES, classes=len(source.classes), max_iterations=200)
    best = max(fits, key=lambda fit: int(count_correct(fit.head, x[1], t[1])[0]))
    return 100 * int(count_correct(best.head, x[2], t[2])[0]) / len(t[2])


def table(figures: Figures) -> Table:
    """Lay figures out for reading."""
    columns = list(next(iter(figures.values())))
    shown = Table(title="accuracy; the network has never seen a label", title_justify="left")
    shown.add_column()
    for name in columns:
        shown.add_column(name, justify="right")
    for name, row in figures.items():
        shown.add_row(name, *(f"{row[column]:.1f} %" for column in columns))
    return shown


def _kept(path: Path, weights: Path, make: Callable[[], Figures]) -> Figures:
    """Return what a file of these weights holds, or make it."""
    if not _newer(path, weights):
        write_bytes(path, (json.dumps(make(), indent=2) + "\n").encode())
    kept: Figures = json.loads(path.read_bytes())
    return kept


def _newer(path: Path, weights: Path) -> bool:
    return path.exists() and path.stat().st_mtime >= weights.stat().st_mtime

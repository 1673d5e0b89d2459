"""Compare backbones on the same images: all evaluators that fit the labels at hand, paired by image."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from dino_vit.commands import Result, format_table
from dino_vit.commands.classification import knn, linear
from dino_vit.commands.maps import dense
from dino_vit.config.settings import NonEmpty, Settings, setting
from dino_vit.core import log
from dino_vit.core.distributed import is_main_process, wait_for_all
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.storage import write_bytes
from dino_vit.data.sources.masks import open_masks
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import Source
from dino_vit.eval.accuracy import Interval, Measured, Pair, measured_share, verdict, write_results
from dino_vit.eval.frozen import CachedConfig, cached_features, frozen_backbone
from dino_vit.eval.labelled import SupervisedConfig
from dino_vit.eval.online import random_indices, rankme
from dino_vit.reports.comparison import Comparison, first_images, map_tiles, render
from dino_vit.reports.record import read_run
from dino_vit.weights import load_backbone, save_backbone
from dino_vit.weights.reading import is_name

Evaluator = Literal["knn", "linear", "dense"]
OF_LABELS: tuple[Evaluator, ...] = ("knn", "linear")
CONFIGS: dict[Evaluator, type[Settings]] = {
    "knn": knn.KnnConfig,
    "linear": linear.LinearConfig,
    "dense": dense.DenseConfig,
}
NEIGHBOURS = 20
RANK_IMAGES = 5000
UNTRAINED = "untrained"


class CompareConfig(SupervisedConfig, CachedConfig):
    """Compare backbones on the same images."""

    examples: ClassVar = (
        "compare photos 'weights=[runs/a, runs/b]'",
        "compare photos weights=runs/a untrained=true",
    )
    weights: NonEmpty[str] = Field(  # type: ignore[assignment]  # several, where the other commands take one
        description="run folders or weights files, two or more"
    )
    measures: tuple[Evaluator, ...] = setting((), "what to measure; empty: what labels and masks allow")
    untrained: bool = setting(False, "also measure an untrained network of the architecture of the first")
    masks: str | None = setting(None, "folder of PNG masks named as the images; null: masks/ beside them")
    output: str = setting("comparison", "folder for the page, the JSON and the results of each evaluator")

    positional: ClassVar = ("source",)

    def contradictions(self) -> Iterator[str]:
        """Yield weights that leave nothing to compare."""
        if len(set(self.weights)) < len(self.weights):
            yield "weights are given twice; give each once"
        if len(self.weights) + self.untrained < 2:
            yield "give two weights or more, or one and untrained=true"


@dataclass(frozen=True, kw_only=True)
class ComparisonResult(Result):
    """Figures of backbones on the same images."""

    figures: dict[str, dict[str, Interval]]  # by title, then by the name of the backbone
    ranks: dict[str, float]  # effective rank
    pairs: list[Pair]
    verdict: str
    page: Path
    path: Path  # of the JSON file
    details: dict[str, Any] = field(repr=False)  # all that the JSON file holds


def run(config: CompareConfig) -> ComparisonResult:
    """Measure all backbones, compare them by pairs of images, and write a page and JSON."""
    folder = Path(config.output)
    paths = dict(zip(names_of(config.weights), config.weights, strict=True))
    source, evaluators, notes = _choose_evaluators(config)
    for weights in config.weights:  # what cannot be loaded is said before anything is measured
        load_backbone(weights, network=config.network, verbose=False)
    if config.untrained:
        paths[UNTRAINED] = str(_write_untrained(config, folder / f"{UNTRAINED}.safetensors"))
    comparison = Comparison(source=source, names=list(paths), notes=notes)
    for number, (name, weights) in enumerate(paths.items(), 1):
        log.info("%d of %d: %s", number, len(paths), name)
        _describe_features(config, weights, comparison, name)
        for evaluator in evaluators:
            path = folder / f"{number}-{evaluator}.json"
            for measured in _evaluate(evaluator, config, weights, path, comparison, name):
                comparison.figures.setdefault(measured.title, {})[name] = measured
    page, path = folder / "comparison.html", folder / "comparison.json"
    details = _details(config, comparison, paths)
    if is_main_process():
        write_bytes(page, render(comparison, config.source).encode())
        write_results(path, details)
    answer = verdict(comparison.standings)
    return ComparisonResult(
        figures=comparison.intervals,
        ranks=comparison.ranks,
        pairs=comparison.pairs,
        verdict=answer,
        page=page,
        path=path,
        details=details,
        text="\n\n".join([_table(comparison), answer, f"{page}: open it in any browser\n{path}"]),
    )


def names_of(weights: Sequence[str]) -> list[str]:
    """Return short names of weights: without the folder that all of them share, checkpoints by their step."""
    folders, steps = [], []
    for spec in weights:
        path = Path(spec)
        is_checkpoint = path.parent.name == "checkpoints"
        folders.append(spec if is_name(spec) else str(path.parent.parent if is_checkpoint else path))
        steps.append(f", step {int(path.stem.removeprefix('step-')):,}" if is_checkpoint else "")
    paths = {os.path.abspath(folder) for folder in folders if not is_name(folder)}
    shared = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    names = [
        (folder if is_name(folder) else os.path.relpath(os.path.abspath(folder), shared)) + step
        for folder, step in zip(folders, steps, strict=True)
    ]
    return names if len(set(names)) == len(names) else list(weights)


def _choose_evaluators(config: CompareConfig) -> tuple[Source, list[Evaluator], list[str]]:
    """Return the images, what to measure on them, and why nothing can be measured."""
    source = open_source(config.source, config.labels)
    reasons: dict[Evaluator, str] = {}
    labels = {source.label(index) for index in range(len(source))} - {None}
    if len(labels) < 2:
        advice = "sort them into a folder for each class, or give labels=FILE"
        reasons |= dict.fromkeys(OF_LABELS, f"the images need labels of two classes or more: {advice}")
    try:
        open_masks(config.source, config.masks)
    except ValueError as error:
        reasons["dense"] = str(error)
    asked: list[Evaluator] = [*config.measures, *(("dense",) if config.masks else ())]
    for name in asked:
        if reason := reasons.get(name):
            raise ValueError(f"measures={name}: {reason}")
    possible = list(config.measures) or [name for name in CONFIGS if name not in reasons]
    notes = [f"{name} was not measured: {reason}" for name, reason in reasons.items()]
    return source, possible, [] if possible else notes


def _write_untrained(config: CompareConfig, path: Path) -> Path:
    """Write a backbone of the architecture of the first weights, its parameters drawn from the seed."""
    model = load_backbone(config.weights[0], network=config.network)
    if is_main_process():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK))
            untrained = type(model)(**model.architecture)
        origin = model.provenance
        assert origin is not None, "load_backbone sets the provenance"
        save_backbone(untrained, path, mean=origin.mean, std=origin.std, bits=origin.bits, range=origin.range)
    wait_for_all()
    return path


def _evaluate(
    evaluator: Evaluator, config: CompareConfig, weights: str, path: Path, comparison: Comparison, name: str
) -> list[Measured]:
    """Run one evaluator on one backbone."""
    values = {**_shared(config, CONFIGS[evaluator]), "weights": weights, "output": str(path)}
    if evaluator == "dense":
        return dense.run(dense.DenseConfig(**values)).measured
    if evaluator == "knn":
        result, title = knn.run(knn.KnnConfig(**values, k=(NEIGHBOURS,))), "k-NN top-1"
    else:
        result, title = linear.run(linear.LinearConfig(**values, select="train")), "linear top-1"
    predictions = result.predictions
    assert predictions is not None, "both classify all images"
    comparison.predictions.setdefault(name, predictions)
    return [measured_share(title, predictions.images, torch.from_numpy(predictions.right))]


def _shared(config: CompareConfig, cls: type[Settings]) -> dict[str, Any]:
    """Return the settings of the comparison that another command has too."""
    return config.model_dump(include=set(cls.model_fields) - {"weights", "output"})


def _describe_features(config: CompareConfig, weights: str, comparison: Comparison, name: str) -> None:
    """Note the effective rank, the step and the run of a backbone, and what its features look like."""
    frozen = frozen_backbone(CachedConfig(**_shared(config, CachedConfig), weights=weights))
    few = len(comparison.source) <= RANK_IMAGES  # then all of them, whose features k-NN needs too
    indices = None if few else sorted(random_indices(comparison.source, config.seed)[:RANK_IMAGES])
    features, _ = cached_features(frozen, comparison.source, indices=indices, title=f"features of {name}")
    comparison.ranks[name] = rankme(torch.from_numpy(features))
    comparison.pixels = frozen.transform.pixels
    comparison.steps[name] = frozen.describe_weights()["step"]
    folder = Path(weights).parent.parent if Path(weights).parent.name == "checkpoints" else Path(weights)
    if folder.is_dir() and (folder / "config.yaml").is_file():
        comparison.runs[name] = read_run(folder)
    if is_main_process():
        comparison.maps[name] = map_tiles(frozen, comparison.source, first_images(comparison.source), name)


def _details(config: CompareConfig, comparison: Comparison, paths: Mapping[str, str]) -> dict[str, Any]:
    return {
        "settings": config.model_dump(mode="json"),
        "weights": [
            {
                "name": name,
                "path": path,
                "step": comparison.steps[name],
                "effective_rank": comparison.ranks[name],
                "figures": {title: of[name]._asdict() for title, of in comparison.intervals.items()},
            }
            for name, path in paths.items()
        ],
        "pairs": [{**pair._asdict(), "difference": pair.difference._asdict()} for pair in comparison.pairs],
        "best": {
            title: {"best": best, "tied": tied} for title, (best, *tied) in comparison.standings.items()
        },
        "verdict": verdict(comparison.standings),
        "notes": comparison.notes,
    }


def _table(comparison: Comparison) -> str:
    """Return the figures as a table, the best and those as good marked."""
    marks = {"best": "*", "tied": "=", "behind": " "}
    rows = []
    for name in comparison.names:
        cells = [
            f"{of[name]}{marks[comparison.mark(title, name)]}" for title, of in comparison.intervals.items()
        ]
        rows.append([name, *cells, f"{comparison.ranks[name]:.1f}"])
    table = format_table(["in %", *(f"{title} " for title in comparison.intervals), "effective rank"], rows)
    legend = "* best, = on these images as good (image by image, p times the number of others at least 0.05)"
    return "\n".join([table, *([legend] if comparison.intervals else []), *comparison.notes])

"""Compare backbones on the same images: all evaluators that fit the labels at hand, paired by image."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import LogRecord
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from dino_vit.commands import Result, format_table
from dino_vit.commands.classification import knn, linear
from dino_vit.commands.embeddings import copies, retrieval
from dino_vit.commands.maps import dense
from dino_vit.config.settings import NonEmpty, Problem, Settings, setting
from dino_vit.core import log
from dino_vit.core.distributed import is_main_process, wait_for_all
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.storage import write_bytes
from dino_vit.data.sources.masks import open_masks
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import Source
from dino_vit.eval.accuracy import write_results
from dino_vit.eval.classification.datasets import SupervisedConfig
from dino_vit.eval.classification.online import random_indices, rankme
from dino_vit.eval.comparison import Pair, verdict
from dino_vit.eval.confidence import Interval, Measured, measured_share
from dino_vit.eval.features.frozen import EvaluationConfig, frozen_backbone
from dino_vit.reports.comparison import Comparison, Opinion, first_images, map_tiles, render
from dino_vit.reports.record import read_run
from dino_vit.weights import load_backbone, save_backbone
from dino_vit.weights.loading import read_backbone
from dino_vit.weights.names import is_name

Measure = Literal["knn", "linear", "retrieval", "dense", "copies"]
OF_MASKS: tuple[Measure, ...] = ("dense",)
OF_LABELS: tuple[Measure, ...] = ("knn", "linear", "retrieval")
CONFIGS: dict[Measure, type[Settings]] = {
    "knn": knn.KnnConfig,
    "linear": linear.LinearConfig,
    "retrieval": retrieval.RetrievalConfig,
    "dense": dense.DenseConfig,
    "copies": copies.CopiesConfig,
}
NEIGHBOURS = 20
RANK_IMAGES = 5000
UNTRAINED = "untrained"


class CompareConfig(SupervisedConfig, EvaluationConfig):
    """Compare backbones on the same images."""

    weights: NonEmpty[str] = Field(  # type: ignore[assignment]  # several, where the other commands take one
        description="run folders or weights files, two or more"
    )
    measures: tuple[Measure, ...] = setting(
        (), "what to measure; empty: what labels and masks allow, without both how well copies are found"
    )
    untrained: bool = setting(False, "also measure an untrained network of the architecture of the first")
    masks: str | None = setting(None, "folder of PNG masks named as the images; null: masks/ beside them")
    output: str = setting("comparison", "folder for the page, the JSON and the results of each evaluator")

    positional: ClassVar = ("source",)

    def contradictions(self) -> Iterator[Problem]:
        """Yield weights that leave nothing to compare."""
        if len(set(self.weights)) < len(self.weights):
            yield Problem("weights are given twice; give each once", ("weights",))
        if len(self.weights) + self.untrained < 2:
            yield Problem("give two weights or more, or one and untrained=true", ("weights",))


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
    source, measures, notes = _choose_measures(config)
    for weights in config.weights:  # what cannot be loaded is said before anything is measured
        read_backbone(weights, network=config.network)
    if config.untrained:
        paths[UNTRAINED] = str(_write_untrained(config, folder / f"{UNTRAINED}.safetensors"))
    found = Comparison(source=source, names=list(paths), notes=notes)
    with _each_line_once():
        for place, (name, weights) in enumerate(paths.items(), 1):
            log.info("%d of %d: %s", place, len(paths), name)
            _look(config, weights, found, name)
            for measure in measures:
                path = folder / f"{place}-{measure}.json"
                for one in _measure(measure, config, weights, path, found, name):
                    found.figures.setdefault(one.title, {})[name] = one
    found.compare()
    page, path = folder / "comparison.html", folder / "comparison.json"
    details = _details(config, found, paths)
    if is_main_process():
        write_bytes(page, render(found, config.source).encode())
        write_results(path, details)
    answer = verdict(found.standings)
    return ComparisonResult(
        figures=found.intervals,
        ranks=found.ranks,
        pairs=found.pairs,
        verdict=answer,
        page=page,
        path=path,
        details=details,
        text="\n\n".join([_table(found), answer, f"{page}: open it in any browser\n{path}"]),
    )


@contextmanager
def _each_line_once() -> Iterator[None]:
    """Log once what several evaluators log of the same weights and images."""
    seen = set[str]()

    def is_new(record: LogRecord) -> bool:
        known = record.getMessage() in seen
        seen.add(record.getMessage())
        return not known

    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


def names_of(weights: Sequence[str]) -> list[str]:
    """Return short names of weights: without the folder that all of them share, checkpoints by their step."""
    folders, steps = [], []
    for one in weights:
        path = Path(one)
        is_checkpoint = path.parent.name == "checkpoints"
        folders.append(one if is_name(one) else str(path.parent.parent if is_checkpoint else path))
        steps.append(f"step {int(path.stem.removeprefix('step-')):,}" if is_checkpoint else "")
    paths = {os.path.abspath(folder) for folder in folders if not is_name(folder)}
    shared = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    names = []
    for folder, step in zip(folders, steps, strict=True):
        name = folder if is_name(folder) else os.path.relpath(os.path.abspath(folder), shared)
        names.append(", ".join(filter(None, [name, step])))
    return names if len(set(names)) == len(names) else list(weights)


def _choose_measures(config: CompareConfig) -> tuple[Source, list[Measure], list[str]]:
    """Return the images, what to measure on them, and why nothing can be measured."""
    source = open_source(config.source, config.labels)
    reasons: dict[Measure, str] = {}
    labels = {source.label(index) for index in range(len(source))} - {None}
    if len(labels) < 2:
        advice = "sort them into a folder for each class, or give labels=FILE"
        reasons |= dict.fromkeys(OF_LABELS, f"the images need labels of two classes or more: {advice}")
    try:
        open_masks(config.source, config.masks)
    except ValueError as error:
        reasons["dense"] = str(error)
    for measure in config.measures:
        if measure in reasons:
            raise ValueError(f"measures={measure}: {reasons[measure]}")
    if config.masks and "dense" in reasons:
        raise ValueError(reasons["dense"])
    possible = list(config.measures) or [one for one in (*OF_LABELS, *OF_MASKS) if one not in reasons]
    notes = [f"{measure} was not measured: {reason}" for measure, reason in reasons.items()]
    return (source, possible, []) if possible else (source, ["copies"], notes)


def _write_untrained(config: CompareConfig, path: Path) -> Path:
    """Write a backbone of the architecture of the first weights, its parameters drawn from the seed."""
    model = load_backbone(config.weights[0], network=config.network)
    if is_main_process():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK))
            untrained = type(model)(**model.architecture)
        known = model.provenance
        assert known is not None, "load_backbone sets the provenance"
        save_backbone(untrained, path, mean=known.mean, std=known.std, bits=known.bits, range=known.range)
    wait_for_all()
    return path


def _measure(
    measure: Measure, config: CompareConfig, weights: str, path: Path, found: Comparison, name: str
) -> list[Measured]:
    """Run one evaluator on one backbone."""
    values = {**_shared(config, CONFIGS[measure]), "weights": weights, "output": str(path)}
    if measure == "dense":
        return dense.run(dense.DenseConfig(**values, pictures=0)).measured
    if measure == "retrieval":
        of_queries = retrieval.run(retrieval.RetrievalConfig(**values, pictures=0)).measured
        return [replace(one, title="retrieval mAP") for one in of_queries if one.title == "mAP"]
    if measure == "copies" and not config.measures and found.pixels.channels not in (1, 3):
        return []  # copies are RGB images
    if measure == "copies":
        of_photos = copies.run(copies.CopiesConfig(**values, examples=0)).measured
        return [of_photos] if of_photos else []
    if measure == "knn":
        result, title = knn.run(knn.KnnConfig(**values, k=(NEIGHBOURS,))), "k-NN top-1"
    else:
        result, title = linear.run(linear.LinearConfig(**values, select="train")), "linear top-1"
    of = result.predictions
    assert of is not None, "both classify all images"
    predicted = (of.classes[number] for number in of.predicted)
    images = of.images.tolist()
    if name not in found.opinions:
        right = zip(images, of.right.tolist(), strict=True)
        found.opinions[name] = Opinion(dict(zip(images, predicted, strict=True)), dict(right))
    return [measured_share(title, of.images, torch.from_numpy(of.right))]


def _shared(config: CompareConfig, cls: type[Settings]) -> dict[str, Any]:
    """Return the settings of the comparison that another command has too."""
    own = {"weights", "output"}
    return config.model_dump(include=set(cls.model_fields) - own, exclude=own)


def _look(config: CompareConfig, weights: str, found: Comparison, name: str) -> None:
    """Note the effective rank, the step and the run of a backbone, and what its features look like."""
    frozen = frozen_backbone(EvaluationConfig(**_shared(config, EvaluationConfig), weights=weights))
    few = len(found.source) <= RANK_IMAGES  # then all of them, whose features k-NN needs too
    indices = None if few else sorted(random_indices(found.source, config.seed)[:RANK_IMAGES])
    features = frozen.features(found.source, indices=indices, title=f"features of {name}")
    found.ranks[name] = rankme(torch.from_numpy(features.values))
    found.pixels = frozen.preparation.pixels
    found.steps[name] = frozen.describe_weights()["step"]
    folder = Path(weights).parent.parent if Path(weights).parent.name == "checkpoints" else Path(weights)
    if folder.is_dir() and (folder / "config.yaml").is_file():
        found.runs[name] = read_run(folder)
    if is_main_process():
        found.maps[name] = map_tiles(frozen, found.source, first_images(found.source), name)


def _details(config: CompareConfig, found: Comparison, paths: Mapping[str, str]) -> dict[str, Any]:
    return {
        "settings": config.model_dump(mode="json"),
        "weights": [
            {
                "name": name,
                "path": path,
                "step": found.steps[name],
                "effective_rank": found.ranks[name],
                "figures": {title: of[name]._asdict() for title, of in found.intervals.items()},
            }
            for name, path in paths.items()
        ],
        "pairs": [{**pair._asdict(), "difference": pair.difference._asdict()} for pair in found.pairs],
        "best": {
            title: {"best": best, "tied": list(tied)} for title, (best, tied) in found.standings.items()
        },
        "verdict": verdict(found.standings),
        "notes": found.notes,
    }


def _table(found: Comparison) -> str:
    """Return the figures as a table, the best and those as good marked."""
    marks = {"best": "*", "tied": "=", "behind": " "}
    rows = []
    for name in found.names:
        cells = [f"{of[name]}{marks[found.mark(title, name)]}" for title, of in found.intervals.items()]
        rows.append([name, *cells, f"{found.ranks[name]:.1f}"])
    table = format_table(["in %", *(f"{title} " for title in found.intervals), "effective rank"], rows)
    legend = "* best, = on these images as good (image by image, p times the number of others at least 0.05)"
    return "\n".join([table, *([legend] if found.intervals else []), *found.notes])

"""Compare backbones on the same images: all evaluators that fit the labels at hand, paired by image."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dino_vit.config.commands import (
    UNTRAINED,
    CachedConfig,
    CompareConfig,
    Evaluator,
    KnnConfig,
    LinearConfig,
)
from dino_vit.config.outputs import check_outputs
from dino_vit.config.sections import BASELINES
from dino_vit.config.settings import Settings
from dino_vit.core import log
from dino_vit.core.distributed import agree, is_main_process
from dino_vit.core.invocation import after_figures
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import replacing
from dino_vit.core.text import Result, format_table, plural, public, said_once
from dino_vit.data.image_set import ImageSet
from dino_vit.data.open import has_cells, open_source
from dino_vit.eval import knn, linear
from dino_vit.eval.features import FrozenBackbone, cached_features, frozen_backbone
from dino_vit.eval.figures import Figure, PerImageMetric
from dino_vit.eval.online import random_indices, rankme
from dino_vit.eval.pairs import Pair, compare_pairs, standings, verdict
from dino_vit.eval.results import write_results
from dino_vit.eval.sets import open_sets
from dino_vit.reports.pictures import shorten
from dino_vit.weights import load_backbone
from dino_vit.weights.hub import is_name

CONFIGS: dict[Evaluator, type[Settings]] = {"knn": KnnConfig, "linear": LinearConfig}
NEIGHBOURS = 20
RANK_IMAGES = 5000


Measured = dict[str, dict[str, PerImageMetric]]  # by title, then by the name of the backbone


@dataclass(frozen=True, kw_only=True, repr=False)
class ComparisonResult(Result):
    """Figures of backbones on the same images."""

    figures: dict[str, dict[str, Figure]]  # by title, then by the short name of the weights
    ranks: dict[str, float]  # effective, by name
    pairs: list[Pair]
    verdict: str
    picture: Path | None  # of the figures with their intervals
    path: Path | None  # of the JSON file


@said_once()  # as the images are opened again for each backbone and evaluator
def run(config: CompareConfig) -> ComparisonResult:
    """Measure all backbones and compare them by pairs of images; with an output, write a picture and JSON."""
    start_processes()
    folder = None if config.output is None else Path(config.output)
    paths = dict(zip(names_of(config.weights), config.weights, strict=True))
    several = config.several and has_cells(config.source, config.labels)
    source = agree(
        "images", lambda: open_source(config.source, config.labels, several=several), ImageSet.describe
    )
    evaluators = choose_evaluators(config, source)
    for weights in config.trained:  # what cannot be loaded is said before anything is measured
        load_backbone(weights, network=config.network, verbose=False)
    if folder:
        numbers = range(1, len(paths) + 1)
        files = [file_of(folder, number, name) for number in numbers for name in evaluators]
        check_outputs(config, *outputs_of(folder), *files)
    ranks, measured = dict[str, float](), Measured()
    for number, (name, weights) in enumerate(paths.items(), 1):
        log.info("%d of %d: %s", number, len(paths), name)
        frozen = _load(config, weights)
        ranks[name] = _effective_rank(config, frozen, source, name)
        for evaluator in evaluators:
            values = {"weights": weights, "output": folder and file_of(folder, number, evaluator)}
            figure = _evaluate(evaluator, config, values, frozen)
            measured.setdefault(figure.title, {})[name] = figure
            log.info("%s: %s %s %%", name, figure.title, figure.figure)
    learned = f", learned from {public(config.train)}" if config.train else ""
    heading = f"{', '.join(paths)} on {plural(len(source), 'image')} of {public(config.source)}{learned}"
    return _conclude(config, heading, ranks, measured, paths)


def _load(config: CompareConfig, weights: str) -> FrozenBackbone:
    """Load one of the backbones; the untrained one has the network of the first."""
    trained = config.trained[0] if weights == UNTRAINED else weights
    frozen = frozen_backbone(CachedConfig(**_shared(config, CachedConfig), weights=trained))
    return untrained_like(frozen, config.seed) if weights == UNTRAINED else frozen


def untrained_like(trained: FrozenBackbone, seed: int) -> FrozenBackbone:
    """Return a backbone that sees the same images as another, its parameters drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, RngPurpose.NETWORK))
        model = type(trained.model)(**trained.model.architecture)
    nothing: dict[str, Any] = {"source": UNTRAINED, "sha256": "", "network": None, "step": None}
    model.provenance = replace(trained.model.provenance, **nothing, config={})
    return replace(trained, model=model.eval().to(trained.device))


def _conclude(
    config: CompareConfig,
    heading: str,
    ranks: dict[str, float],
    measured: Measured,
    paths: Mapping[str, str],
) -> ComparisonResult:
    """Compare what was measured, and write the picture and the JSON."""
    pairs = compare_pairs(measured)
    best = standings(measured, pairs)
    figures = {
        title: {name: figure.figure for name, figure in by_name.items()}
        for title, by_name in measured.items()
    }
    answer = verdict(best)
    text = f"{heading}\n\n{_table(ranks, figures, best)}\n\n{answer}"
    picture = path = None
    if config.output is not None:
        picture, path = outputs_of(Path(config.output))
        picture = picture if figures else None  # the ranks alone need none
        results = {
            "settings": config.model_dump(mode="json"),
            "weights": paths,
            "figures": figures,
            "effective_rank": ranks,
            "pairs": pairs,
            "best": {title: {"best": first, "tied": tied} for title, (first, *tied) in best.items()},
            "verdict": answer,
        }
        write_results(path, results)
        if picture and is_main_process():
            with after_figures():
                _draw(figures, best, picture)
        text += "\n\n" + "\n".join(str(file) for file in (picture, path) if file)
    return ComparisonResult(
        figures=figures,
        ranks=ranks,
        pairs=pairs,
        verdict=answer,
        picture=picture,
        path=path,
        text=text,
    )


def outputs_of(folder: Path) -> tuple[Path, Path]:
    """Return the files for the picture and for all figures."""
    return folder / "comparison.png", folder / "comparison.json"


def file_of(folder: Path, number: int, evaluator: Evaluator) -> Path:
    """Return the file for the results of one evaluator of one of the backbones."""
    return folder / f"{number}-{evaluator}.json"


def names_of(weights: Sequence[str]) -> list[str]:
    """Return short names of weights: without the folder that all of them share, checkpoints by their step."""
    texts = [re.sub(r"/checkpoints/step-0*(\d+)\.safetensors$", r" (step \1)", path) for path in weights]
    paths = [text for text in texts if not is_name(text) and text != UNTRAINED]
    folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
    shared = os.path.commonpath(folders) if folders else ""
    short = {path: os.path.relpath(path, shared) for path in paths}
    names = [short.get(text, text) for text in texts]
    is_clear = len({*names}) == len(names) and {UNTRAINED, *BASELINES}.isdisjoint(short.values())
    return names if is_clear else [*weights]


def choose_evaluators(config: CompareConfig, source: ImageSet) -> list[Evaluator]:
    """Return what is to be measured, or raise if it is asked for and the labels do not allow it."""
    codes = source.codes()
    if len(np.unique(codes[codes >= 0])) >= 2:
        return list(config.measures or CONFIGS)
    if config.measures:
        reason = "the images need labels of two classes or more: a folder for each class, or labels=FILE"
        raise ValueError(f"measures={config.measures[0]}: {reason}")
    return []


def _effective_rank(config: CompareConfig, frozen: FrozenBackbone, source: ImageSet, name: str) -> float:
    few = len(source) <= RANK_IMAGES  # then all, whose features k-NN needs too
    indices = None if few else sorted(random_indices(source, config.seed)[:RANK_IMAGES])
    features, _ = cached_features(frozen, source, indices=indices, title=f"features of {name}")
    return rankme(torch.from_numpy(features))


def _evaluate(
    evaluator: Evaluator, config: CompareConfig, values: dict[str, Any], frozen: FrozenBackbone
) -> PerImageMetric:
    """Run one evaluator on one backbone."""
    values |= _shared(config, CONFIGS[evaluator])
    try:
        if evaluator == "knn":
            by_knn = KnnConfig(**values, k=(NEIGHBOURS,))
            return knn.evaluate(by_knn, frozen, open_sets(by_knn, blocks=None)).measured
        by_linear = LinearConfig(**values)
        return linear.evaluate(by_linear, frozen, open_sets(by_linear)).measured
    except ValueError as error:
        raise ValueError(f"{evaluator}: {error}; measures= chooses what is measured") from error


def _shared(config: CompareConfig, cls: type[Settings]) -> dict[str, Any]:
    """Return the settings of the comparison that another command has too."""
    return config.model_dump(include=set(cls.model_fields) - {"weights", "output"})


Figures = Mapping[str, Mapping[str, Figure]]


def _table(ranks: Mapping[str, float], figures: Figures, best: Mapping[str, tuple[str, ...]]) -> str:
    """Return the figures as a table, with marks at the best and those not significantly worse."""
    rows = []
    for name, rank in ranks.items():
        row = [name]
        for title, by_name in figures.items():
            mark = "*" if name == best[title][0] else "=" if name in best[title] else " "
            row.append(f"{by_name[name]}{mark}")
        rows.append([*row, f"{rank:.1f}"])
    images = {title: next(iter(by_name.values())).images for title, by_name in figures.items()}
    titles = [f"{title}, {count:,} images " for title, count in images.items()]
    table = format_table(["%", *titles, "effective rank"], rows)
    pairs = plural(math.comb(len(ranks), 2), "pair")
    meaning = "effective rank: over about how many directions features spread"
    legend = f"* best; = perhaps as good: the difference may be chance (p, times {pairs}, is 0.05 or more)"
    return f"{table}\n{legend}; {meaning}" if best else f"{table}\n{meaning}"


def _draw(figures: Figures, best: Mapping[str, tuple[str, ...]], path: Path) -> None:
    """Draw the figures with their intervals, side by side."""
    from matplotlib.figure import Figure as Plot

    rows, columns = [*next(iter(figures.values()))], len(figures)
    plot = Plot(figsize=(2.5 + 3 * columns, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = plot.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axis, (title, by_name) in zip(axes, figures.items(), strict=True):
        for name, figure in by_name.items():
            colour = "C0" if name in best[title] else "0.55"
            reach = [[figure.value - figure.low], [figure.high - figure.value]]
            axis.errorbar(figure.value, rows.index(name), xerr=reach, fmt="o", color=colour, capsize=3)
        axis.set_title(title, fontsize=10, parse_math=False)
        axis.grid(axis="x", color="0.9")
        axis.set_xlabel("%")
    axes[0].set_yticks(range(len(rows)), [shorten(name, 40) for name in rows], parse_math=False)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)  # the first on top
    legend = "95 % confidence intervals over images; blue: the best, and what is not significantly worse"
    plot.supxlabel(legend, fontsize=8)
    with replacing(path) as partial:
        plot.savefig(partial, dpi=130, format="png")

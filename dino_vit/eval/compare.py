"""Compare backbones on the same images: all evaluators that fit the labels at hand, paired by image."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dino_vit.config.commands import UNTRAINED, CachedConfig, CompareConfig, KnnConfig, LinearConfig
from dino_vit.config.outputs import check_outputs
from dino_vit.config.settings import Settings
from dino_vit.core import log
from dino_vit.core.distributed import agree
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import Result, format_table, plural, public
from dino_vit.data.image_set import ImageSet, random_indices
from dino_vit.data.open import has_cells, open_source
from dino_vit.eval import knn, linear
from dino_vit.eval.online import rankme
from dino_vit.eval.results import write_results
from dino_vit.eval.sets import VAL_SHARE, Sets, divide, open_sets
from dino_vit.eval.statistics import Difference, Figure, PerImageMetric, difference
from dino_vit.features.frozen import FrozenBackbone, frozen_backbones
from dino_vit.features.readings import fit_reading, joined_features
from dino_vit.models.backbone import CLS
from dino_vit.weights import load_backbone

NEIGHBOURS = 20
RANK_IMAGES = 5000
CHANCE = 0.05  # how often a backbone as good as the best may look worse, whatever the number of backbones

Measured = Mapping[str, Mapping[str, PerImageMetric]]  # by title, then by the weights


@dataclass(frozen=True)
class Pair:
    """Two backbones by one figure."""

    figure: str
    better: str
    other: str
    difference: Difference
    corrected_p: float  # its p, times the pairs by this figure (Bonferroni)


@dataclass(frozen=True, kw_only=True, repr=False)
class ComparisonResult(Result):
    """Figures of backbones on the same images."""

    figures: dict[str, dict[str, Figure]]  # by title, then by the weights
    ranks: dict[str, float]  # effective, by the weights
    pairs: list[Pair]
    verdict: str
    path: Path | None  # of the JSON file


def run(config: CompareConfig) -> ComparisonResult:
    """Measure all backbones and compare them by pairs of images; with an output, write JSON."""
    start_processes()
    several = config.several and has_cells(config.source, config.labels)
    source = agree(
        "images", lambda: open_source(config.source, config.labels, several=several), ImageSet.describe
    )
    codes = source.codes()
    has_classes = len(np.unique(codes[codes >= 0])) >= 2
    for weights in config.trained:  # what cannot be loaded is said before anything is measured
        load_backbone(weights, network=config.network, verbose=False)
    if config.output:
        check_outputs(config, Path(config.output))
    sets = open_sets(config, None, source) if has_classes else None
    ranks, measured = dict[str, float](), dict[str, dict[str, PerImageMetric]]()
    unreadable = set[str]()  # images that cannot be read are said once
    for number, weights in enumerate(config.weights, 1):
        log.info("%d of %d: %s", number, len(config.weights), weights)
        trained = config.trained[0] if weights == UNTRAINED else weights
        frozen = frozen_backbones(CachedConfig(**_shared(config, CachedConfig), weights=trained))
        frozen = replace(frozen, unreadable=unreadable)
        if weights == UNTRAINED:
            frozen = untrained_like(frozen, config.seed)
        ranks[weights] = _effective_rank(config, frozen, source, weights)
        for metric in _evaluate(config, weights, frozen, sets) if sets else ():
            measured.setdefault(metric.title, {})[weights] = metric
            log.info("%s: %s %s %%", weights, metric.title, metric.figure)
    learned = f", learned from {public(config.train)}" if config.train else ""
    images = f"{plural(len(source), 'image')} of {public(config.source)}{learned}"
    return _conclude(config, f"{', '.join(config.weights)} on {images}", ranks, measured)


def untrained_like(trained: FrozenBackbone, seed: int) -> FrozenBackbone:
    """Return a backbone that sees the same images as another, its parameters drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, RngPurpose.NETWORK))
        model = type(trained.model)(**trained.model.architecture)
    nothing: dict[str, Any] = {"source": UNTRAINED, "sha256": "", "network": None, "step": None}
    model.provenance = replace(trained.model.provenance, **nothing, config={})
    return replace(trained, model=model.eval().to(trained.device))


def _effective_rank(config: CompareConfig, frozen: FrozenBackbone, source: ImageSet, name: str) -> float:
    if len(source) > RANK_IMAGES:  # of fewer k-NN needs the features, too
        source = source.subset(sorted(random_indices(source, config.seed)[:RANK_IMAGES]))
    values, _ = joined_features(frozen, source, title=f"features of {name}")
    features = torch.from_numpy(values)
    return rankme(fit_reading(frozen, features, CLS, 0.0)(features))


def _evaluate(
    config: CompareConfig, weights: str, frozen: FrozenBackbone, sets: Sets
) -> Iterator[PerImageMetric]:
    """Run all evaluators on one backbone."""
    by_knn = KnnConfig(**_shared(config, KnnConfig), weights=weights, k=(NEIGHBOURS,))
    yield knn.evaluate(by_knn, frozen, sets).measured
    by_linear = LinearConfig(**_shared(config, LinearConfig), weights=weights)
    if sets[0] is sets[1]:  # k-NN judges each image by the others, a classifier those that are held out
        sets = divide(sets[1], blocks=VAL_SHARE, seed=config.seed)
        sets[0].require_two_classes()
    yield linear.evaluate(by_linear, frozen, sets).measured


def _shared(config: CompareConfig, cls: type[Settings]) -> dict[str, Any]:
    """Return the settings of the comparison that another command has too."""
    return config.model_dump(include=set(cls.model_fields) - {"weights", "output"})


def _conclude(
    config: CompareConfig, heading: str, ranks: dict[str, float], measured: Measured
) -> ComparisonResult:
    """Compare what was measured, and write the JSON."""
    pairs = compare_pairs(measured)
    best = standings(measured, pairs)
    figures = {title: {name: each.figure for name, each in row.items()} for title, row in measured.items()}
    answer, path = verdict(best), Path(config.output) if config.output else None
    text = f"{heading}\n\n{_table(ranks, figures, best)}\n\n{answer}"
    if path:
        results = {
            "settings": config.model_dump(mode="json"),
            "figures": figures,
            "effective_rank": ranks,
            "pairs": pairs,
            "best": {title: {"best": first, "tied": tied} for title, (first, *tied) in best.items()},
            "verdict": answer,
        }
        write_results(path, results)
        text += f"\n\n{path}"
    return ComparisonResult(figures=figures, ranks=ranks, pairs=pairs, verdict=answer, path=path, text=text)


def compare_pairs(figures: Measured) -> list[Pair]:
    """Compare all pairs by every figure, image by image."""
    pairs = []
    for title, backbones in figures.items():
        best_first = sorted(backbones, key=lambda name: backbones[name].mean, reverse=True)
        by_figure = list(combinations(best_first, 2))
        for better, other in by_figure:
            between = difference(backbones[better], backbones[other])
            pairs.append(Pair(title, better, other, between, min(1.0, len(by_figure) * between.p)))
    return pairs


def standings(figures: Measured, pairs: Sequence[Pair]) -> dict[str, tuple[str, ...]]:
    """Return which is best by each figure, followed by those not significantly worse on these images."""
    by_title = {}
    for title, backbones in figures.items():
        best = max(backbones, key=lambda name: backbones[name].mean)
        others = [pair for pair in pairs if (pair.figure, pair.better) == (title, best)]
        by_title[title] = (best, *(pair.other for pair in others if pair.corrected_p >= CHANCE))
    return by_title


def verdict(by_title: Mapping[str, tuple[str, ...]]) -> str:
    """Say which backbone to take, or that it depends."""
    if not by_title:
        text = "There are no labels to judge by: use a folder for each class, or labels=FILE."
        return f"{text} The effective rank alone does not tell which features are better."
    top, titles = [*by_title.values()], " and ".join(by_title)
    everywhere = [name for name in top[0] if all(name in names for names in top)]
    if not everywhere:
        wins = "; ".join(f"by {title} {best}" for title, (best, *_) in by_title.items())
        return f"It depends on the figure. The best is {wins}."
    first, *others = everywhere
    if all(names == (first,) for names in top):
        return f"Take {first}: on these images it is the best by {titles}."
    text = " or ".join(everywhere)
    if others and all(names[0] == first for names in top):
        text = f"{first}; {' and '.join(others)} may be as good"
    reason = "no significant difference" if others else "no other is significantly better"
    return f"Take {text}: {reason} on these images by {titles}."


def _table(
    ranks: Mapping[str, float],
    figures: Mapping[str, Mapping[str, Figure]],
    best: Mapping[str, tuple[str, ...]],
) -> str:
    """Return the figures as a table, with marks at the best and those not significantly worse."""

    def mark(title: str, name: str) -> str:
        return "*" if name == best[title][0] else "=" if name in best[title] else " "

    rows = [
        [name, *(f"{row[name]}{mark(title, name)}" for title, row in figures.items()), f"{rank:.1f}"]
        for name, rank in ranks.items()
    ]
    titles = [f"{title}, {next(iter(row.values())).images:,} images " for title, row in figures.items()]
    table = format_table(["%", *titles, "effective rank"], rows)
    pairs = plural(math.comb(len(ranks), 2), "pair")
    meaning = "effective rank: over about how many directions features spread"
    legend = f"* best; = perhaps as good: the difference may be chance (p, times {pairs}, is 0.05 or more)"
    return f"{table}\n{legend}; {meaning}" if best else f"{table}\n{meaning}"

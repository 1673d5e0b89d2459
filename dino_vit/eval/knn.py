"""Classify images by their nearest neighbours on frozen features.

Several labels of an image are predicted by the mean of the neighbours.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_vit.config.commands import KnnConfig
from dino_vit.core.distributed import all_gather, rank_slice
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import format_table, plural
from dino_vit.eval.neighbours import neighbour_means, weighted_knn
from dino_vit.eval.results import (
    METRIC,
    EvaluationResult,
    asked_output,
    conclude,
    has_two_classes,
    lowest,
    score,
)
from dino_vit.eval.sets import LabelledFeatures, Sets, features_of_sets, open_sets
from dino_vit.eval.statistics import TITLES, Predictions
from dino_vit.features.frozen import FrozenBackbone, frozen_backbones
from dino_vit.features.readings import fit_reading
from dino_vit.models.backbone import FeatureSpec
from dino_vit.weights.read_file import check_weights


def run(config: KnnConfig) -> EvaluationResult:
    """Classify; with an output, write the JSON. The figures are those of the first k."""
    start_processes()
    check_weights(config.weights)
    sets = open_sets(config, blocks=None)  # a mistake in labels is found before weights are loaded
    frozen = frozen_backbones(config)
    return evaluate(config, frozen, sets, asked_output(config, frozen.model.provenance.source, sets))


def evaluate(
    config: KnnConfig, frozen: FrozenBackbone, sets: Sets, path: Path | None = None
) -> EvaluationResult:
    """Evaluate a backbone that is loaded already; with a path write the JSON."""
    spec = FeatureSpec(tokens=config.tokens, blocks=config.blocks)
    train, val = features_of_sets(frozen, sets, spec)
    read = fit_reading(frozen, train.features, spec, config.whiten)
    bank = replace(train, features=read(train.features))
    train, val = bank, bank if val is train else replace(val, features=read(val.features))
    how = "leave-one-out" if val is train else f"by {plural(len(train), 'image')} of {sets[0].name}"
    heading = f"{METRIC[val.task]} (%), {how}, on {plural(len(val), 'image')} of {sets[1].name}"
    heading += "; k neighbours vote; in brackets 95 % intervals\n"
    details = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        # No image is its own neighbour.
        "images": {"train": len(train) - (val is train), "val": len(val)},
        "classes": len(val.classes),
    }
    answers, figures = _answer(train, val, config.k, frozen.device)
    details["results"] = [{"k": k, **row} for k, row in figures.items()]
    first, metric = config.k[0], TITLES[val.task]
    titles = {"top1": metric, "top5": "top-5", "mean_of_classes": "mean of classes", "auroc": "AUROC"}
    columns = {
        name: title for name, title in (titles | {"score": metric}).items() if figures[first].get(name)
    }
    rows = [[str(k), *(str(row[name]) for name in columns)] for k, row in figures.items()]
    lines, title = [heading, format_table(["k", *columns.values()], rows)], f"k-NN {metric}, k={first}"
    if val.task == "multiclass":
        classes = figures[first]["per_class"].items()
        rows_of_classes = {name: {"top-1 %": each, "images": each.images} for name, each in classes}
        lines += [answers[first].guesses(), lowest(f"class, k={first}", rows_of_classes)]
    return conclude("knn", path, title, answers[first], details, lines, val.classes)


def _answer(
    train: LabelledFeatures, val: LabelledFeatures, k: Sequence[int], device: torch.device
) -> tuple[dict[int, Any], dict[int, dict[str, Any]]]:
    """Return for each k what is predicted, and its figures by name."""
    if val.task != "multiclass":
        scored = {k: score(val, outputs) for k, outputs in predict(train, val, k, device).items()}
        return scored, {k: {"score": measured[0].figure} for k, measured in scored.items()}
    predictions = classify(train, val, k, device)
    figures = {k: ranked.figures() for k, ranked in predictions.items()}
    if has_two_classes(val):
        for count, outputs in predict(train, val, k, device).items():
            figures[count]["auroc"] = score(val, outputs)[0].figure
    return predictions, figures


def predict(
    train: LabelledFeatures, val: LabelledFeatures, k: Sequence[int], device: torch.device
) -> dict[int, Tensor]:
    """Return the neighbours' mean labels, of two classes the share of the second: (n, c)."""
    mine = rank_slice(range(len(val)))
    asked, targets = val.features[mine.start : mine.stop].to(device), train.targets.view(len(train), -1)
    offset = mine.start if val is train else None
    means = neighbour_means(train.features, targets, asked, k=k, self_offset=offset)
    return {count: all_gather(outputs) for count, outputs in means.items()}


def classify(
    train: LabelledFeatures, val: LabelledFeatures, k: Sequence[int], device: torch.device
) -> dict[int, Predictions]:
    """Classify all images of `val` for each k; each process does a share of them."""
    mine = rank_slice(range(len(val)))
    asked, offset = val.features[mine.start : mine.stop], mine.start if val is train else None
    ranked = weighted_knn(train.features, train.targets, asked, k=k, self_offset=offset, device=device)
    return {k: val.predictions(all_gather(best)) for k, best in ranked.items()}

"""Classify images by their nearest neighbours on frozen features.

Several labels of an image are predicted by the mean of the neighbours.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_vit.config.commands import KnnConfig
from dino_vit.core.distributed import all_gather, rank_slice
from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import format_table, plural, progress
from dino_vit.eval.features import FrozenBackbone, frozen_backbone
from dino_vit.eval.figures import (
    TITLES,
    Predictions,
    measure,
)
from dino_vit.eval.neighbours import neighbour_means, weighted_knn
from dino_vit.eval.results import (
    METRIC,
    EvaluationResult,
    asked_output,
    conclude_classes,
    few_images,
    few_text,
    judge,
    lowest,
    score,
)
from dino_vit.eval.sets import LabelledFeatures, Sets, features_of_sets, open_sets
from dino_vit.models.backbone import FeatureSpec
from dino_vit.weights.read_file import check_weights


def run(config: KnnConfig) -> EvaluationResult:
    """Classify; with an output, write the JSON. The figures are those of the first k."""
    start_processes()
    check_weights(config.weights)
    sets = open_sets(config, blocks=None)  # a mistake in labels is found before weights are loaded
    return evaluate(config, frozen_backbone(config), sets)


def evaluate(config: KnnConfig, frozen: FrozenBackbone, sets: Sets) -> EvaluationResult:
    """Evaluate a backbone that is loaded already."""
    spec = FeatureSpec(tokens=config.tokens, blocks=config.blocks)
    path = asked_output(config, frozen.model.provenance.source, sets)
    learned, val = sets
    bank, queries = features_of_sets(frozen, sets, spec)
    if config.shots:
        learned.require_one_class(f"shots={config.shots}")
        bank, queries = few_shots(bank, queries, config.shots, config.seed)
    how = "leave-one-out" if queries is bank else f"by {plural(len(bank), 'image')} of {learned.name}"
    heading = f"{METRIC[val.task]} (%), {how}, on {plural(len(queries), 'image')} of {val.name}"
    heading += "; k neighbours vote; in brackets 95 % intervals\n"
    details = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": len(queries),
        "bank": len(bank) - (queries is bank),  # no image is its own neighbour
        "classes": len(val.classes),
    }
    answers, figures = _answer(bank, queries, config.k, frozen.device)
    details["results"] = [{"k": k, **row} for k, row in figures.items()]
    first, metric = config.k[0], TITLES[val.task]
    titles = {"top1": metric, "top5": "top-5", "mean_of_classes": "mean of classes", "auroc": "AUROC"}
    columns = {
        name: title for name, title in (titles | {"score": metric}).items() if figures[first].get(name)
    }
    rows = [[str(k), *(str(row[name]) for name in columns)] for k, row in figures.items()]
    lines, title = [heading, format_table(["k", *columns.values()], rows)], f"k-NN {metric}, k={first}"
    if val.task != "multiclass":
        return judge("knn", path, title, answers[first], bank, queries, details, lines)
    few, per_class = few_images(bank, queries), figures[first]["per_class"]
    lines += [answers[first].guesses(), *few_text(few)]
    rows_of_classes = {name: {"top-1 %": each, "images": each.images} for name, each in per_class.items()}
    lines.append(lowest(f"class, k={first}", rows_of_classes))
    return conclude_classes("knn", path, title, answers[first], details | {"few_images": few}, lines)


def _answer(
    bank: LabelledFeatures, queries: LabelledFeatures, k: Sequence[int], device: torch.device
) -> tuple[dict[int, Any], dict[int, dict[str, Any]]]:
    """Return for each k what is predicted, and its figures by name."""
    if queries.task != "multiclass":
        scored = {k: score(queries, outputs) for k, outputs in predict(bank, queries, k, device).items()}
        return scored, {k: {"score": measured[0].figure} for k, measured in scored.items()}
    predictions = classify(bank, queries, k, device)
    figures = {k: ranked.figures() for k, ranked in predictions.items()}
    if len(queries.classes) == len(set(queries.targets.tolist())) == 2:
        for count, outputs in predict(bank, queries, k, device).items():
            auroc = measure("multiclass", queries.indices, outputs, queries.targets[:, None])[0]
            figures[count]["auroc"] = auroc.figure
    return predictions, figures


def predict(
    bank: LabelledFeatures, queries: LabelledFeatures, k: Sequence[int], device: torch.device
) -> dict[int, Tensor]:
    """Return the neighbours' mean labels, of two classes the share of the second: (queries, c)."""
    mine = rank_slice(range(len(queries)))
    asked, targets = queries.features[mine.start : mine.stop].to(device), bank.targets.view(len(bank), -1)
    offset = mine.start if queries is bank else None
    means = neighbour_means(bank.features, targets, asked, k=k, self_offset=offset)
    return {count: all_gather(outputs) for count, outputs in means.items()}


def classify(
    bank: LabelledFeatures, queries: LabelledFeatures, k: Sequence[int], device: torch.device
) -> dict[int, Predictions]:
    """Classify all queries for each k; each process does a share of them."""
    mine = rank_slice(range(len(queries)))
    with progress("neighbours", len(mine)) as advance:
        ranked = weighted_knn(
            bank.features,
            bank.targets,
            queries.features[mine.start : mine.stop],
            k=k,
            self_offset=mine.start if queries is bank else None,
            device=device,
            progress=advance,
        )
    return {k: queries.predictions(all_gather(best)) for k, best in ranked.items()}


def few_shots(
    bank: LabelledFeatures, queries: LabelledFeatures, shots: int, seed: int
) -> tuple[LabelledFeatures, LabelledFeatures]:
    """Return a bank of so many images of each class, drawn by the seed, and queries that are not in it."""
    bits, targets = random_bits(seed, RngPurpose.EVALUATION, bank.indices), bank.targets.cpu().numpy()
    order = np.lexsort((bits, targets))
    rank_in_class = np.arange(len(bank)) - np.searchsorted(targets[order], targets[order])
    chosen = np.sort(order[rank_in_class < shots])
    if queries is bank:
        queries = bank[np.delete(np.arange(len(bank)), chosen)]
    if not len(queries):
        raise ValueError(f"shots={shots} takes all {len(bank)} images, which leaves none to classify")
    return bank[chosen], queries

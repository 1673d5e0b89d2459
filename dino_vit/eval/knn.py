"""Classify images by their nearest neighbours on frozen features.

Several labels of an image are predicted by the mean of the neighbours.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dino_vit.config.commands import KnnConfig
from dino_vit.core.distributed import all_gather, rank_slice
from dino_vit.core.text import format_table, plural
from dino_vit.eval.neighbours import neighbour_means, weighted_knn
from dino_vit.eval.results import (
    EvaluationResult,
    Judged,
    conclude,
    describe_inputs,
    has_two_classes,
    judge_classes,
    judge_labels,
    open_inputs,
)
from dino_vit.eval.sets import LabelledFeatures, Sets, features_of_sets
from dino_vit.eval.statistics import TITLES
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.features.readings import fit_reading
from dino_vit.models.backbone import FeatureSpec


def run(config: KnnConfig) -> EvaluationResult:
    """Classify; with an output, write the JSON. The figures are those of the first k."""
    return evaluate(config, *open_inputs(config, blocks=None))


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
    metric = "Accuracy" if val.task == "multiclass" else TITLES[val.task]
    heading = f"{metric} (%), {how}, on {plural(len(val), 'image')} of {sets[1].name}"
    heading += "; k neighbours vote; in brackets 95 % intervals\n"
    judged = judge(train, val, config.k, frozen.device)
    first, rows = config.k[0], [[str(k), *map(str, each.figures.values())] for k, each in judged.items()]
    details = describe_inputs(config, frozen, train, val)
    details["results"] = [{"k": k, **each.figures} for k, each in judged.items()]
    lines = [heading, format_table(["k", *judged[first].figures], rows)]
    return conclude("knn", path, f"k-NN {TITLES[val.task]}, k={first}", judged[first], details, lines)


def judge(
    train: LabelledFeatures, val: LabelledFeatures, k: Sequence[int], device: torch.device
) -> dict[int, Judged]:
    """Judge what the neighbours say of images, for each k; each process asks for a share of them."""
    mine, means = rank_slice(range(len(val))), dict[int, Tensor]()
    asked, offset = val.features[mine.start : mine.stop], mine.start if val is train else None
    if val.task == "multilabel" or has_two_classes(val):
        targets = train.targets.view(len(train), -1)  # of two classes the second
        found = neighbour_means(train.features, targets, asked.to(device), k=k, self_offset=offset)
        means = {count: all_gather(outputs) for count, outputs in found.items()}
    if val.task == "multilabel":
        return {count: judge_labels(val, outputs) for count, outputs in means.items()}
    ranked = weighted_knn(train.features, train.targets, asked, k=k, self_offset=offset, device=device)
    return {count: judge_classes(val, all_gather(best), means.get(count)) for count, best in ranked.items()}

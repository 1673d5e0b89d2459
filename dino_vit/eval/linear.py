"""Logistic regressions on a frozen backbone, the best of several penalties and choices of tokens.

They train on features that are computed once and cached: the CLS tokens of the last blocks, then the mean
patch token of the last block. Each head reads a contiguous range of these columns, and all of the backbones
beside. Several labels of an image are learned each for itself.

n images, r heads (one per penalty), c classes
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.commands import LinearConfig
from dino_vit.core.text import plural
from dino_vit.eval.holdout import choose_folds
from dino_vit.eval.logistic import STANDARD_CS, train_logistic
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
from dino_vit.eval.statistics import TITLES, TOP_K, measure
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.models.backbone import simple_specs
from dino_vit.models.classifiers import Columns, LinearHeads, on_standardised

_HELD_OUT_SHARE = 10  # one in so many training images is held out for model selection
_MAX_SCORES = 1 << 24  # in memory at a time


def run(config: LinearConfig) -> EvaluationResult:
    """Train and evaluate; with an output, write the JSON. The figures are those of the best classifier."""
    return evaluate(config, *open_inputs(config))


def evaluate(
    config: LinearConfig, frozen: FrozenBackbone, sets: Sets, path: Path | None = None
) -> EvaluationResult:
    """Evaluate a backbone that is loaded already; with a path write the JSON."""
    inputs = sorted(simple_specs(frozen.model), key=lambda spec: spec.blocks)
    train, val = features_of_sets(frozen, sets, inputs[-1])
    train, held_out = hold_out(train, config.seed)
    slices = [spec.columns_in(inputs[-1], frozen.model.width) for spec in inputs]
    columns: list[Columns] = [*slices]
    if frozen.beside:  # whose features each head reads too
        places = range(train.features.shape[1])
        others = places[sum(inputs[-1].widths(frozen.model)) :]
        columns = [[*places[each], *others] for each in slices]
    heads = _train(train, columns, frozen.device)
    best, percents = best_head(heads, held_out)
    figures = [None if math.isnan(percent) else round(percent, 4) for percent in percents]
    tried = [
        {"C": c, "blocks": spec.blocks, "mean": spec.with_mean, "held_out": figure}
        for (c, spec), figure in zip(product(STANDARD_CS, inputs), figures, strict=True)
    ]
    details = describe_inputs(config, frozen, train, val) | {"best": tried[best], "heads": tried}
    judged = judge_head(nth_head(heads, best), val)
    row, column = divmod(best, len(inputs))
    figure = "by their loss" if figures[best] is None else f"{figures[best]:.2f} %"
    lines = [
        f"trained on {plural(len(train), 'image')}, judged on {len(val):,}: {judged.summary}",
        f"C {STANDARD_CS[row]:.3g}, {inputs[column].title}: the best of {len(tried)} heads on "
        f"{plural(len(held_out), 'training image')} that no head was trained on: {figure}",
    ]
    return conclude("linear", path, f"linear {TITLES[val.task]}", judged, details, lines)


def hold_out(train: LabelledFeatures, seed: int) -> tuple[LabelledFeatures, LabelledFeatures]:
    """Split off a tenth in blocks for model selection; return the rest and the held-out part."""
    if len(train) == 1:
        raise ValueError("there is one image to train on, and none to choose the best head by: give more")
    series = train.targets.tolist() if train.task == "multiclass" else [0] * len(train)
    chosen = choose_folds(series, _HELD_OUT_SHARE, seed) == 0
    return train[np.flatnonzero(~chosen)], train[np.flatnonzero(chosen)]


def _train(train: LabelledFeatures, columns: Sequence[Columns], device: torch.device) -> list[LinearHeads]:
    """Return for each choice of columns the regressions of all penalties."""
    targets, classes = train.targets.to(device), len(train.classes)

    def regressions(features: Tensor) -> list[LinearHeads]:
        # In every process: each fit starts from the previous one, so they cannot be shared.
        fits = (
            train_logistic(features[:, part], targets, cs=STANDARD_CS, classes=classes) for part in columns
        )
        return [heads._replace(columns=part) for heads, part in zip(fits, columns, strict=True)]

    # Of many columns and few images the steps of L-BFGS become smaller than float32 resolves.
    exact = torch.float64 if device.type == "cpu" else torch.float32
    heads = on_standardised(regressions, train.features.to(device, exact))
    return [each._replace(weight=each.weight.float(), bias=each.bias.float()) for each in heads]


def best_head(grid: Sequence[LinearHeads], images: LabelledFeatures) -> tuple[int, list[float]]:
    """Return which head is the best on some images, and the accuracy, or mAP, of each in per cent.

    They are counted row by row: for each C or rate the heads of all inputs.
    """
    percents, losses = (
        torch.stack([judge(heads, images) for heads in grid], dim=1).flatten().tolist()
        for judge in (_percents, head_losses)
    )
    # Of heads that are alike the one with the lowest loss, which decides alone if no figure can.
    best = max(range(len(losses)), key=lambda n: (np.nan_to_num(percents[n], nan=-1), -losses[n]))
    return best, percents


def nth_head(grid: Sequence[LinearHeads], number: int) -> LinearHeads:
    """Return one of the heads, counted row by row."""
    row, column = divmod(number, len(grid))
    heads = grid[column]
    return LinearHeads(heads.weight[row : row + 1], heads.bias[row : row + 1], heads.columns)


def judge_head(head: LinearHeads, images: LabelledFeatures) -> Judged:
    """Judge what a head says of images."""
    scores = head_scores(head, images.features)[:, 0]
    if images.task == "multilabel":
        return judge_labels(images, scores.sigmoid())
    ranked = scores.topk(min(TOP_K, scores.shape[1])).indices
    return judge_classes(images, ranked, scores[:, 1:] - scores[:, :1] if has_two_classes(images) else None)


def _percents(heads: LinearHeads, images: LabelledFeatures) -> Tensor:
    """Return the accuracy, or mAP, of each head in per cent, (r,)."""
    if images.task == "multiclass":
        return 100 * count_correct(heads, images.features, images.targets).double() / len(images)
    outputs = head_scores(heads, images.features).sigmoid().unbind(1)
    means = [measure(images.task, images.indices, each, images.targets)[0].mean for each in outputs]
    return 100 * torch.tensor(means, dtype=torch.double)


@torch.no_grad()
def count_correct(heads: LinearHeads, features: Tensor, targets: Tensor) -> Tensor:
    """Return how many images each head classifies correctly, (r,)."""
    correct = torch.zeros(len(heads.bias), dtype=torch.long, device=heads.bias.device)
    for rows, scores in _scores_in_blocks(heads, features):
        correct += (scores.argmax(dim=-1) == targets[rows, None].to(correct.device)).sum(dim=0)
    return correct


@torch.no_grad()
def head_scores(heads: LinearHeads, features: Tensor) -> Tensor:
    """Return the logits of all heads: (n, r, c)."""
    return torch.cat([scores for _, scores in _scores_in_blocks(heads, features)])


@torch.no_grad()
def head_losses(heads: LinearHeads, images: LabelledFeatures) -> Tensor:
    """Return the mean cross-entropy of each head, (r,)."""
    total = torch.zeros(len(heads.bias), dtype=torch.double, device=heads.bias.device)
    for rows, scores in _scores_in_blocks(heads, images.features):
        y = repeat(images.targets[rows].to(scores.device), "n ... -> n r ...", r=scores.shape[1])
        if images.task == "multiclass":
            losses = F.cross_entropy(rearrange(scores, "n r c -> n c r"), y, reduction="none")
        else:
            losses = F.binary_cross_entropy_with_logits(scores, y.to(scores), reduction="none").mean(dim=2)
        total += losses.double().sum(dim=0)
    return total / len(images)


def _scores_in_blocks(heads: LinearHeads, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    size = max(1, _MAX_SCORES // heads.bias.numel())
    for start in range(0, len(features), size):
        rows = slice(start, start + size)
        yield rows, heads.scores(features[rows, heads.columns].to(heads.weight.device, heads.weight.dtype))

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
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.commands import LinearConfig
from dino_vit.config.settings import Task
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import format_table, plural
from dino_vit.eval.holdout import choose_folds
from dino_vit.eval.logistic import STANDARD_CS, train_logistic
from dino_vit.eval.results import (
    METRIC,
    EvaluationResult,
    asked_output,
    conclude_classes,
    conclude_labels,
    few_images,
    few_text,
    has_two_classes,
    score,
)
from dino_vit.eval.sets import LabelledFeatures, Sets, features_of_sets, open_sets
from dino_vit.eval.statistics import TITLES, TOP_K, measure
from dino_vit.features.frozen import FrozenBackbone, frozen_backbones
from dino_vit.models.backbone import FeatureSpec, simple_specs
from dino_vit.models.classifiers import Columns, LinearHeads, on_standardised
from dino_vit.weights.read_file import check_weights

AS_PUBLISHED = "chosen on the images that it is evaluated on, as published: optimistic with few images"
_MEANING = {"C": "a weaker penalty on the weights if higher", "rate": "the learning rate"}
_HELD_OUT_SHARE = 10  # one in so many training images is held out for model selection
_MAX_SCORES = 1 << 24  # in memory at a time


class Grid(NamedTuple):
    """Heads that differ in a setting and in the tokens that they read."""

    setting: str  # "C" or "rate"
    values: Sequence[float]
    inputs: Sequence[FeatureSpec]
    heads: Sequence[LinearHeads]  # for each input, one head for each value


def run(config: LinearConfig) -> EvaluationResult:
    """Train and evaluate; with an output, write the JSON. The figures are those of the best classifier."""
    start_processes()
    check_weights(config.weights)
    sets = open_sets(config)  # a mistake in labels is found before weights are loaded
    frozen = frozen_backbones(config)
    return evaluate(config, frozen, sets, asked_output(config, frozen.model.provenance.source, sets))


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
    grid = Grid("C", STANDARD_CS, inputs, _train(train, columns, frozen.device))
    details = {"settings": config.model_dump(mode="json"), "weights": frozen.describe_weights()}
    return conclude_best("linear", path, grid, train, val, held_out, details)


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


def conclude_best(
    command: str,
    path: Path | None,
    grid: Grid,
    train: LabelledFeatures,
    val: LabelledFeatures,
    chosen_on: LabelledFeatures,
    details: dict[str, Any],
) -> EvaluationResult:
    """Return the figures on `val` of the head that is best on other images, and a table of all heads."""
    judged = _judge_heads(grid.heads, val)
    held_out = None if chosen_on is val else _judge_heads(grid.heads, chosen_on)
    best = _best_head(grid.heads, held_out or judged, chosen_on)
    cells = _cells(grid, "top1" if val.task == "multiclass" else "score", judged, held_out)
    how = _how_chosen(held_out[best], chosen_on) if held_out else AS_PUBLISHED
    row, column = divmod(best, len(grid.inputs))
    images = {"train": len(train), "val": len(val)}
    details |= {"images": images, "classes": len(val.classes), "best": cells[best], "table": cells}
    title = f"* best, {grid.setting} {grid.values[row]:.3g}, {grid.inputs[column].title}"
    text = [
        f"{METRIC[val.task]} (%), on {plural(len(val), 'image')}, trained on {len(train):,}",
        _table(grid, judged, best),
        f"{grid.setting}: {_MEANING[grid.setting]}; CLS, mean patch: the class token, and the mean of the "
        "patch tokens",
    ]
    chosen = grid.heads[column]
    head = LinearHeads(chosen.weight[row : row + 1], chosen.bias[row : row + 1], chosen.columns)
    if val.task != "multiclass":
        figures, metric = score(val, _outputs(head, val)[:, 0]), TITLES[val.task]
        text += [f"{title}: {metric} {figures[0].figure} %", how]
        return conclude_labels(command, path, f"linear {metric}", figures, train, val, details, text)
    predictions, few = val.predictions(top_classes(head, val.features)), few_images(train, val)
    details |= {"best": cells[best] | predictions.figures(), "few_images": few}
    text += [f"{title}: {predictions.summary()}", how, *few_text(few)]
    if has_two_classes(val):
        outputs = _outputs(head, val)[:, 0]
        details["best"]["auroc"] = figure = score(val, outputs[:, 1:] - outputs[:, :1])[0].figure
        text.append(f"AUROC {figure} %")
    return conclude_classes(command, path, "linear top-1", predictions, details, text)


def _cells(
    grid: Grid, name: str, judged: Sequence[float], held_out: Sequence[float] | None
) -> list[dict[str, Any]]:
    """Return what each head is and what it comes to, for a results file."""
    cells: list[dict[str, Any]] = [
        {grid.setting: value, "blocks": spec.blocks, "mean": spec.with_mean, name: round(percent, 4)}
        for (value, spec), percent in zip(product(grid.values, grid.inputs), judged, strict=True)
    ]
    for cell, percent in zip(cells, held_out or (), strict=bool(held_out)):
        cell["held_out"] = None if math.isnan(percent) else round(percent, 4)
    return cells


def _how_chosen(percent: float, images: LabelledFeatures) -> str:
    """Say by which images the head was chosen."""
    figure = "by their loss" if math.isnan(percent) else f"{percent:.2f} %"
    return f"chosen on {plural(len(images), 'training image')} that no head was trained on: {figure}"


def _outputs(heads: LinearHeads, images: LabelledFeatures) -> Tensor:
    """Return what all heads predict: of several labels the probability of each, (n, r, c)."""
    scores = head_scores(heads, images.features)
    return scores.sigmoid() if images.task == "multilabel" else scores


def _judge_heads(heads: Sequence[LinearHeads], images: LabelledFeatures) -> list[float]:
    """Return the accuracy, or mAP, of every head in per cent: for each rate or C that of each input."""
    if images.task == "multiclass":
        correct = [count_correct(each, images.features, images.targets) for each in heads]
        return [100 * count / len(images) for count in torch.stack(correct, dim=1).flatten().tolist()]
    outputs = [_outputs(each, images).unbind(1) for each in heads]
    return [
        100 * measure(images.task, images.indices, head_outputs, images.targets)[0].mean
        for row in zip(*outputs, strict=True)
        for head_outputs in row
    ]


def _best_head(heads: Sequence[LinearHeads], percents: Sequence[float], images: LabelledFeatures) -> int:
    """Return the head with the best figure; of heads alike by it, the one with the lowest loss."""
    losses = [head_losses(each, images.features, images.targets, images.task) for each in heads]
    all_losses = torch.stack(losses, dim=1).flatten().tolist()
    judged = [-math.inf if math.isnan(percent) else percent for percent in percents]
    return max(range(len(judged)), key=lambda index: (judged[index], -all_losses[index]))


def _table(grid: Grid, percents: Sequence[float], best: int) -> str:
    """Return a table with a row for each rate or C and a column for each input."""
    cells = [f"{percent:.2f}{'*' if index == best else ' '}" for index, percent in enumerate(percents)]
    width = len(grid.inputs)
    rows = [[f"{x:.3g}", *cells[row * width : (row + 1) * width]] for row, x in enumerate(grid.values)]
    return format_table([grid.setting, *(spec.title for spec in grid.inputs)], rows)


@torch.no_grad()
def count_correct(heads: LinearHeads, features: Tensor, targets: Tensor) -> Tensor:
    """Return how many images each head classifies correctly, (r,)."""
    correct = torch.zeros(len(heads.bias), dtype=torch.long, device=heads.bias.device)
    for rows, scores in _scores_in_blocks(heads, features):
        correct += (scores.argmax(dim=-1) == targets[rows, None].to(correct.device)).sum(dim=0)
    return correct


def top_classes(heads: LinearHeads, features: Tensor) -> Tensor:
    """Return the five classes that the first head scores highest, best first; all if they are fewer."""
    return head_scores(heads, features)[:, 0].topk(min(TOP_K, heads.bias.shape[1])).indices


@torch.no_grad()
def head_scores(heads: LinearHeads, features: Tensor) -> Tensor:
    """Return the logits of all heads: (n, r, c)."""
    return torch.cat([scores for _, scores in _scores_in_blocks(heads, features)])


@torch.no_grad()
def head_losses(heads: LinearHeads, features: Tensor, targets: Tensor, task: Task) -> Tensor:
    """Return the mean cross-entropy of each head, (r,)."""
    total = torch.zeros(len(heads.bias), dtype=torch.double, device=heads.bias.device)
    for rows, scores in _scores_in_blocks(heads, features):
        y = repeat(targets[rows].to(scores.device), "n ... -> n r ...", r=scores.shape[1])
        if task == "multiclass":
            losses = F.cross_entropy(rearrange(scores, "n r c -> n c r"), y, reduction="none")
        else:
            y = y.to(scores.dtype)
            losses = F.binary_cross_entropy_with_logits(scores, y, reduction="none").mean(dim=2)
        total += losses.double().sum(dim=0)
    return total / len(features)


def _scores_in_blocks(heads: LinearHeads, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    size = max(1, _MAX_SCORES // heads.bias.numel())
    for start in range(0, len(features), size):
        rows = slice(start, start + size)
        yield rows, heads.scores(features[rows, heads.columns].to(heads.weight.device, heads.weight.dtype))

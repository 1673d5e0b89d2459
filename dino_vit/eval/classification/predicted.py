"""Judge predictions of several labels an image, and name classes with few images."""

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_vit.core.distributed import all_gather, rank_slice
from dino_vit.core.text import brief, format_table, plural
from dino_vit.eval.figures import TITLES, Measured, measure, number_text
from dino_vit.eval.neighbours import neighbour_means
from dino_vit.eval.results import EvaluationResult, conclude
from dino_vit.eval.sets import LabelledFeatures

RARE = 10  # of fewer images the figures of a class say little
_SHOWN = 10
METRIC = TITLES | {"multiclass": "Accuracy"}  # at the head of a table


def predict(
    bank: LabelledFeatures, queries: LabelledFeatures, k: Sequence[int], device: torch.device
) -> dict[int, Tensor]:
    """Return the neighbours' mean labels, of two classes the share of the second: (queries, c)."""
    mine = rank_slice(range(len(queries)))
    asked, targets = queries.features[mine.start : mine.stop].to(device), bank.targets.view(len(bank), -1)
    offset = mine.start if queries is bank else None
    means = neighbour_means(bank.features, targets, asked, k=k, self_offset=offset)
    return {count: all_gather(outputs) for count, outputs in means.items()}


def score(val: LabelledFeatures, outputs: Tensor) -> list[Measured]:
    """Return all figures of outputs; raise an error if no column has anything to judge by."""
    figures = measure(val.task, val.indices, outputs, val.targets)
    if math.isnan(figures[0].mean):
        raise ValueError(f"the {len(val):,} images to judge by have no labels: give more images")
    return figures


def judge(
    command: str,
    path: Path | None,
    title: str,
    figures: Sequence[Measured],
    train: LabelledFeatures,
    val: LabelledFeatures,
    details: Mapping[str, Any],
    lines: Sequence[str],
) -> EvaluationResult:
    """Return what the figures say; with a path write JSON."""
    measured, (outputs, targets) = figures[0], figures[0].parts
    columns: dict[str, Sequence[object]] = {each.title: each.column_figures for each in figures}
    columns |= {"AP of a guess": targets.mean(0).tolist(), "images": targets.sum(0).int().tolist()}
    means = {each.title: each.figure for each in figures}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    per_target, few = dict(zip(val.classes, rows, strict=True)), few_images(train, val)
    text = [*lines, *(f"mean {name} {mean} %" for name, mean in means.items())]
    text += [*few_text(few), f"\n{_table(per_target)}\n"]
    results = {**details, "task": val.task, "mean": means, "per_target": per_target, "few_images": few}
    per_class = dict(zip(val.classes, measured.column_figures, strict=True))
    parts = {"per_class": per_class, "outputs": outputs.float().numpy()}
    return conclude(command, path, title, measured, results, text, **parts)


def _table(per_target: Mapping[str, Mapping[str, object]]) -> str:
    """Return the figures of the labels that are predicted worst."""
    columns = list(next(iter(per_target.values())))
    lowest = sorted(per_target, key=lambda name: getattr(per_target[name][columns[0]], "value", math.inf))
    rows = [[brief(name), *map(_cell, per_target[name].values())] for name in lowest[:_SHOWN]]
    return format_table([f"of {len(per_target):,}, the lowest first", *columns], rows)


def _cell(figure: object) -> str:
    return "-" if figure is None else number_text(figure) if isinstance(figure, float) else str(figure)


def few_images(train: LabelledFeatures, val: LabelledFeatures) -> dict[str, list[str]]:
    """Return the classes that no training image or no or few images to judge by have."""
    learned, judged = (
        each.targets.sum(0) if each.targets.ndim == 2 else each.targets.bincount(minlength=len(val.classes))
        for each in (train, val)
    )
    few = {
        # An image is no neighbour of its own.
        "without an image to learn from, so only guessed": learned <= (train is val),
        "without an image to judge by, so in no figure": judged == 0,
        f"with fewer than {RARE} images to judge by, too few to be reliable": (judged > 0) & (judged < RARE),
    }
    return {kind: [*compress(val.classes, rows.tolist())] for kind, rows in few.items() if rows.any()}


def few_text(few: Mapping[str, Sequence[str]]) -> list[str]:
    return [
        f"{plural(len(names), 'class', 'classes')} {kind}: {brief(', '.join(names), 300)}"
        for kind, names in few.items()
    ]

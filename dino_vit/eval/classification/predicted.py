"""Judge predictions of several labels an image, or of numbers, and name classes with few images."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_vit.core.distributed import all_gather, is_main_process, rank_slice
from dino_vit.core.outputs import PNG_MARK, after_figures, write_output
from dino_vit.core.text import brief, format_table, plural
from dino_vit.data.image_set import spread
from dino_vit.eval.figures import TITLES, Measured, measure, number_text
from dino_vit.eval.neighbours import neighbour_means
from dino_vit.eval.results import EvaluationResult, conclude
from dino_vit.eval.sets import LabelledFeatures

RARE = 10  # of fewer images the figures of a class say little
_SHOWN = 10
METRIC = TITLES | {"multiclass": "Accuracy"}  # at the head of a table
_POINTS, _COLUMNS = 5000, 12  # of a plot, and plots of a picture


def predict(
    bank: LabelledFeatures, queries: LabelledFeatures, k: Sequence[int], device: torch.device
) -> dict[int, Tensor]:
    """Return the neighbours' mean labels or numbers, of two classes the share of the second: (queries, c)."""
    mine = rank_slice(range(len(queries)))
    asked, targets = queries.features[mine.start : mine.stop].to(device), bank.targets.view(len(bank), -1)
    offset = mine.start if queries is bank else None
    means = neighbour_means(bank.features, targets, asked, k=k, self_offset=offset)
    return {count: all_gather(outputs) for count, outputs in means.items()}


def score(val: LabelledFeatures, outputs: Tensor) -> list[Measured]:
    """Return all figures of outputs; raise an error if no column has anything to judge by."""
    figures = measure(val.task, val.indices, outputs, val.targets)
    if math.isnan(figures[0].mean):
        what = f"the {len(val):,} images to judge by have no labels, or all the same numbers"
        raise ValueError(f"{what}: give more images")
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
    """Return what the figures say; with a path write JSON and, of numbers, a plot beside it."""
    measured, (outputs, targets) = figures[0], figures[0].parts
    columns: dict[str, Sequence[object]] = {each.title: each.column_figures for each in figures}
    means = {each.title: each.figure for each in figures if val.task == "multilabel"}
    if means:
        columns |= {"AP of a guess": targets.mean(0).tolist(), "images": targets.sum(0).int().tolist()}
    else:
        columns["MAE of a guess"] = (targets - train.targets.cpu().mean(0)).abs().mean(0).tolist()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    per_target, few = dict(zip(val.classes, rows, strict=True)), few_images(train, val)
    text = [*lines, *(f"mean {name} {mean} %" for name, mean in means.items())]
    text += [*few_text(few), f"\n{_table(per_target)}\n"]
    if path and val.task == "regression":
        text.append(str(draw_numbers(path.with_suffix(".png"), outputs, targets, val.classes)))
    results = {**details, "task": val.task, "mean": means, "per_target": per_target, "few_images": few}
    per_class = dict(zip(val.classes, measured.column_figures, strict=True))
    parts = {"per_class": per_class, "outputs": outputs.float().numpy()}
    return conclude(command, path, title, measured, results, text, **parts)


def _table(per_target: Mapping[str, Mapping[str, object]]) -> str:
    """Return the figures of the labels or numbers that are predicted worst."""
    columns = list(next(iter(per_target.values())))
    lowest = sorted(per_target, key=lambda name: getattr(per_target[name][columns[0]], "value", math.inf))
    rows = [[brief(name), *map(_cell, per_target[name].values())] for name in lowest[:_SHOWN]]
    return format_table([f"of {len(per_target):,}, the lowest first", *columns], rows)


def _cell(figure: object) -> str:
    return "-" if figure is None else number_text(figure) if isinstance(figure, float) else str(figure)


def few_images(train: LabelledFeatures, val: LabelledFeatures) -> dict[str, list[str]]:
    """Return the classes that no training image or no or few images to judge by have."""
    if val.task == "regression":
        return {}
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


def draw_numbers(path: Path, outputs: Tensor, targets: Tensor, names: Sequence[str]) -> Path:
    """Draw predicted against true numbers, a plot for each column, as a PNG."""
    from matplotlib.figure import Figure

    rows, names = spread(len(targets), _POINTS), names[:_COLUMNS]
    across, down = min(4, len(names)), math.ceil(len(names) / 4)
    figure = Figure(figsize=(3.2 * across, 3.2 * down), layout="constrained")
    for number, name in enumerate(names):
        axis, true = figure.add_subplot(down, across, number + 1), targets[:, number]
        axis.axline((float(true.min()),) * 2, slope=1, color="0.6", linewidth=1)
        axis.scatter(true[rows], outputs[rows, number], s=6, alpha=0.4, linewidths=0)
        axis.set_title(brief(name, 40), fontsize=9, parse_math=False)
        axis.set(xlabel="true", ylabel="predicted")
    if is_main_process():
        with after_figures():
            write_output(path, partial(figure.savefig, dpi=130, format="png", metadata=PNG_MARK))
    return path

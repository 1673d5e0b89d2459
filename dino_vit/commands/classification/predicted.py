"""Judge predictions of several labels an image, or of numbers, and name classes with few images."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.commands import Result, format_table
from dino_vit.core.distributed import all_gather, is_main_process, rank_slice
from dino_vit.core.storage import replacing
from dino_vit.core.text import brief, plural
from dino_vit.data.sources.source import spread
from dino_vit.eval.accuracy import Interval
from dino_vit.eval.knn import neighbour_means
from dino_vit.eval.labelled import LabelledFeatures
from dino_vit.eval.metrics import METRICS, MeasuredColumns, auroc, measure, number_text
from dino_vit.eval.results import evaluation

RARE = 10  # the figures of a class with fewer images are far from sure
_SHOWN = 10
_POINTS, _COLUMNS = 5000, 12  # of a plot, and plots of a picture


@dataclass(frozen=True, kw_only=True)
class Predicted(Result):
    """How well several labels of an image, or numbers, are predicted."""

    score: Interval  # mAP or R², in per cent
    per_target: dict[str, dict[str, Any]] = field(repr=False)  # figures of each label or number
    outputs: NDArray[np.float32] = field(repr=False)  # (images, targets): from 0 to 1 for a label, or numbers
    measured: MeasuredColumns = field(repr=False)  # the score, with each image's part
    path: Path | None  # of the JSON file, if one was written
    details: dict[str, Any] = field(repr=False)  # all that the file holds


def predict(
    bank: LabelledFeatures, queries: LabelledFeatures, k: Sequence[int], device: torch.device
) -> dict[int, Tensor]:
    """Return the neighbours' mean labels or numbers, of two classes the share of the second: (queries, c)."""
    mine = rank_slice(range(len(queries)))
    asked, offset = queries.features[mine.start : mine.stop], mine.start if queries is bank else None
    targets = bank.targets.view(len(bank), -1)
    means = neighbour_means(bank.features, targets, asked, k=k, self_offset=offset, device=device)
    return {k: all_gather(of_k) for k, of_k in means.items()}


def judge(
    command: str,
    output: str | None,
    title: str,
    measured: MeasuredColumns,
    train: LabelledFeatures,
    val: LabelledFeatures,
    details: Mapping[str, Any],
    lines: Sequence[str],
) -> Predicted:
    """Return all figures of predictions; with an output write JSON and, of numbers, a plot beside it."""
    metrics, (outputs, targets) = METRICS[val.task], measured.parts
    figures = {name: measure(metric, name, val.indices, outputs, targets) for name, metric in metrics.items()}
    columns: dict[str, Sequence[object]] = {name: figure.estimates for name, figure in figures.items()}
    guessed = "AP" if val.task == "multilabel" else "MAE"
    mean = train.targets.cpu().mean(0).expand_as(targets)
    guesses = measure(metrics[guessed], "", val.indices, mean, targets).values.tolist()
    columns[f"{guessed} of a guess"] = [None if math.isnan(value) else value for value in guesses]
    means = {name: figure.mean for name, figure in figures.items() if val.task == "multilabel"}
    if means:
        columns["images"] = targets.sum(0).int().tolist()
    rows = zip(*columns.values(), strict=True)
    per_target = {
        name: dict(zip(columns, row, strict=True)) for name, row in zip(val.classes, rows, strict=True)
    }
    few, few_text = few_images(train, val)
    order = measured.values.nan_to_num(math.inf).argsort().tolist()[:_SHOWN]
    table = [[brief(val.classes[row]), *map(_cell, per_target[val.classes[row]].values())] for row in order]
    header = [f"of {plural(len(val.classes), 'label' if means else 'number')}, the lowest first", *columns]
    best = ", ".join(f"{name} {estimate}" for name, estimate in means.items())
    lines = [*lines, *([f"mean {best}"] if best else []), *few_text]
    lines.append(f"\n{format_table(header, table)}\n")
    path = None if output is None else Path(output)
    if path:
        lines.append(str(path))
        if val.task == "regression":
            lines.append(str(draw_numbers(path.with_suffix(".png"), outputs, targets, val.classes)))
    results = {**details, "task": val.task, "mean": means, "per_target": per_target, "few_images": few}
    return Predicted(
        score=measured.interval,
        per_target=per_target,
        outputs=outputs.float().numpy(),
        measured=measured,
        path=path,
        details=evaluation(command, path, title, measured.interval, results),
        text="\n".join(lines),
    )


def _cell(figure: object) -> str:
    return "-" if figure is None else number_text(figure) if isinstance(figure, float) else str(figure)


def two_class_auroc(images: LabelledFeatures, scores: Tensor) -> Interval:
    """Return the AUROC of scores (n, 1) of the second of two classes."""
    return measure(auroc, "AUROC", images.indices, scores, images.targets[:, None]).interval


def few_images(train: LabelledFeatures, val: LabelledFeatures) -> tuple[dict[str, list[str]], list[str]]:
    """Return the classes that no training image or no or few images to judge by have, and lines on them."""
    if val.task == "regression":
        return {}, []
    learned, judged = (
        each.targets.sum(0)
        if each.task == "multilabel"
        else torch.bincount(each.targets, minlength=len(val.classes))
        for each in (train, val)
    )
    kinds = {
        "without an image to learn from, so only guessed": learned == 0,
        "without an image to judge by, so in no figure": judged == 0,
        f"with fewer than {RARE} images to judge by, so far from sure": (judged > 0) & (judged < RARE),
    }
    few = {kind: [val.classes[row] for row in rows.nonzero()[:, 0].tolist()] for kind, rows in kinds.items()}
    few = {kind: names for kind, names in few.items() if names}
    lines = []
    for kind, names in few.items():
        shown = ", ".join(map(brief, names[:_SHOWN])) + ", ..." * (len(names) > _SHOWN)
        lines.append(f"{len(names)} of {plural(len(val.classes), 'class', 'classes')} {kind}: {shown}")
    return few, lines


def draw_numbers(path: Path, outputs: Tensor, targets: Tensor, names: Sequence[str]) -> Path:
    """Draw predicted against true numbers, a plot for each column, as a PNG."""
    from matplotlib.figure import Figure

    rows, count = spread(len(targets), _POINTS), min(len(names), _COLUMNS)
    across = min(4, count)
    down = math.ceil(count / across)
    figure = Figure(figsize=(3.2 * across, 3.2 * down), layout="constrained")
    for number in range(count):
        axis, true = figure.add_subplot(down, across, number + 1), targets[:, number]
        axis.axline((float(true.min()),) * 2, slope=1, color="0.6", linewidth=1)
        axis.scatter(true[rows], outputs[rows, number], s=6, alpha=0.4, linewidths=0)
        axis.set_title(brief(names[number], 40), fontsize=9, parse_math=False)
        axis.set(xlabel="true", ylabel="predicted")
    if is_main_process():
        with replacing(path) as partial:
            figure.savefig(partial, dpi=130, format="png")
    return path

"""Results of evaluations: files, one for each command and data."""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.config.commands import KnnConfig, LinearConfig
from dino_vit.config.outputs import RESULTS_FOLDER, RESULTS_VERSION, check_outputs
from dino_vit.config.settings import Settings, get, settings_of, values
from dino_vit.core.distributed import is_main_process
from dino_vit.core.invocation import after_figures, on_console
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import Result, brief, format_table, public, public_values
from dino_vit.eval.sets import VAL_SHARE, LabelledFeatures, LabelledSubset, Sets, open_sets
from dino_vit.eval.statistics import (
    TITLES,
    TOP_K,
    Figure,
    PerImageMetric,
    Predictions,
    largest_class,
    measure,
    measured_share,
)
from dino_vit.features.frozen import FrozenBackbone, frozen_backbones
from dino_vit.weights.hub import is_name
from dino_vit.weights.read_file import check_weights

_SHOWN = 10


def output_of(config: Settings, loaded: str, sets: Sequence[LabelledSubset] = ()) -> Path:
    """Return the file for the results of weights that were loaded from a file: as given, or by default."""
    given = get(config, "output")
    path = default_output(config, loaded, sets) if given is None else Path(str(given))
    if given is not None or path.parent.name != RESULTS_FOLDER:  # what lies in eval/ of a run is its own
        check_outputs(config, path)
    return path


def open_inputs(
    config: KnnConfig | LinearConfig, blocks: int | None = VAL_SHARE
) -> tuple[FrozenBackbone, Sets, Path | None]:
    """Return the backbone, the images, and the file for results; in Python none unless `output` is given."""
    start_processes()
    check_weights(config.weights)
    sets = open_sets(config, blocks)  # a mistake in labels is found before weights are loaded
    frozen = frozen_backbones(config)
    is_asked = config.output or on_console()
    return frozen, sets, output_of(config, frozen.model.provenance.source, sets) if is_asked else None


def default_output(config: Settings, loaded: str, sets: Sequence[LabelledSubset] = ()) -> Path:
    """Return a file for results that is the same for the same weights, images, labels and settings only.

    It is in eval/ of the run of the weights, or beside them. Its name has the step that was loaded: the
    newest checkpoint of a run may be another one by now.
    """
    name, given, facts = config.writes.rpartition("/")[2], values(config), dict[str, object]()
    for key, info in settings_of(type(config)).items():
        if key in given and not info.resumable:
            value = given[key]
            is_file = isinstance(value, str) and info.takes_text and os.path.exists(value)
            facts[key] = os.path.abspath(str(value)) if is_file else value
    inputs = [name, facts, [images.fingerprint for images in sets]]
    mark = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:6]
    source = public(str(given[config.positional[0]]))
    data = re.sub(r"[^\w.-]+", "-", "/".join(Path(source).parts[-2:])).strip("-.")[-40:]
    file, path, weights = f"{name}-{data}-{mark}.json", Path(loaded), str(given["weights"])
    if is_name(weights):
        return Path(f"{weights.replace(':', '-').replace('/', '-')}.{file}")
    if path.parent.name == "checkpoints":
        return path.parent.parent / RESULTS_FOLDER / f"{path.stem}.{file}"
    if Path(weights).is_dir():
        return Path(weights) / RESULTS_FOLDER / file
    return path.with_name(f"{path.stem}.{file}")


def write_results(path: Path | None, results: Mapping[str, object]) -> dict[str, Any]:
    """Return results as JSON holds them; with a path, write them on rank 0."""
    content = {"version": RESULTS_VERSION, **to_jsonable(results)}
    if path and is_main_process():
        with after_figures():
            write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
    return content


def to_jsonable(results: Mapping[str, object]) -> dict[str, Any]:
    """Return results as JSON holds them, without what is not public."""
    content: dict[str, Any] = public_values(json.loads(json.dumps(results, default=_as_json)))
    return content


def _as_json(value: Any) -> object:
    return value.as_json() if isinstance(value, Figure) else asdict(value)


def evaluation(
    command: str, path: Path | None, title: str, figure: Figure, details: Mapping[str, object]
) -> dict[str, Any]:
    """Return the results of a command, its main figure first, as JSON holds them; with a path, write them."""
    head = {"command": command, "written": datetime.now(UTC).isoformat(timespec="seconds")}
    return write_results(path, {**head, "figure": {"title": title, **figure.as_json()}, **details})


def describe_inputs(
    config: Settings, frozen: FrozenBackbone, train: LabelledFeatures, val: LabelledFeatures
) -> dict[str, Any]:
    """Return what an evaluation rests on, for a results file."""
    return {
        "settings": config.model_dump(mode="json"),
        "given": config.model_dump(mode="json", exclude_unset=True),
        "weights": frozen.describe_weights(),
        # No image is its own neighbour.
        "images": {"train": len(train) - (train is val), "val": len(val)},
        "classes": len(val.classes),
        "task": val.task,
    }


@dataclass(frozen=True)
class Judged:
    """What a classifier comes to: its figures by title, and those of each class or label."""

    measured: PerImageMetric  # the first figure, with what each image contributes
    figures: dict[str, Figure]
    rows: dict[str, dict[str, Any]]  # by class or label, figures by title; the first is that of `measured`
    predictions: Predictions | None = None  # of classes

    @property
    def summary(self) -> str:
        """The figures in a line."""
        return ", ".join(f"{title} {figure} %" for title, figure in self.figures.items())


def judge_classes(images: LabelledFeatures, ranked: Tensor, scores: Tensor | None = None) -> Judged:
    """Judge the classes that are ranked first for each image, (n, k).

    With scores (n, 1) of the second of two classes also by AUROC.
    """
    indices, title, targets = images.indices, TITLES["multiclass"], images.targets.cpu()
    predictions = Predictions(
        images=indices, ranked=ranked.cpu().numpy(), targets=targets.numpy(), classes=images.classes
    )
    measured = measured_share(title, indices, torch.from_numpy(predictions.right))
    figures: dict[str, Figure] = {title: measured.figure}
    if len(images.classes) > TOP_K:  # otherwise it is right whatever the answers
        figures[f"top-{TOP_K}"] = predictions.top(TOP_K)
    figures["mean of classes"] = predictions.mean_of_classes()
    if scores is not None:
        measures = measure("multiclass", indices, scores, targets[:, None])
        figures |= {each.title: each.figure for each in measures}
    rows = {name: {title: each, "images": each.images} for name, each in predictions.per_class().items()}
    return Judged(measured, figures, rows, predictions)


def judge_labels(images: LabelledFeatures, outputs: Tensor) -> Judged:
    """Judge outputs (n, c) for several labels; raise if no image has any."""
    measured, *others = measure(images.task, images.indices, outputs, images.targets)
    if math.isnan(measured.mean):
        raise ValueError(f"the {len(images):,} images to judge by have no labels: give more images")
    figures = {TITLES[images.task]: measured.figure} | {f"mean {each.title}": each.figure for each in others}
    columns: dict[str, Sequence[object]] = {each.title: each.column_figures for each in (measured, *others)}
    targets = measured.parts[1]
    columns |= {"AP of a guess": (100 * targets.mean(0)).tolist(), "images": targets.sum(0).int().tolist()}
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return Judged(measured, figures, dict(zip(images.classes, rows, strict=True)))


def has_two_classes(images: LabelledFeatures) -> bool:
    """Tell whether the images have an AUROC."""
    return images.task == "multiclass" and len(images.classes) == len(set(images.targets.tolist())) == 2


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationResult(Result):
    """How well classes or labels are predicted."""

    figure: Figure  # top-1 accuracy; mAP of several labels an image
    figures: dict[str, Figure]  # by title
    per_class: dict[str, Figure | None]  # accuracy, or AP of each label
    measured: PerImageMetric  # the figure, with what each image contributes
    predictions: Predictions | None = None  # of classes
    outputs: NDArray[np.float32] | None = None  # of several labels, by image
    path: Path | None  # of the JSON file, if one was written
    details: dict[str, Any]  # all that the file holds


def conclude(
    command: str,
    path: Path | None,
    title: str,
    judged: Judged,
    details: Mapping[str, Any],
    lines: Sequence[str],
) -> EvaluationResult:
    """Return the result of a command; with a path, write the JSON file."""
    measured, predictions = judged.measured, judged.predictions
    details = {**details, "figures": judged.figures, "per_class": judged.rows}
    text, what = [*lines], "label"
    if predictions:
        name, percent = largest_class(predictions.targets, predictions.classes)
        chance, what = 100 / len(predictions.classes), "class"
        text.append(f"always guessing {name} scores {percent:.1f} %, random guessing {chance:.1f} %")
        details |= {"largest_class": percent, "chance": chance}
    first, comma, k = title.partition(",")  # of several k the table is of one
    text += [lowest(f"{what}{comma}{k}", judged.rows), *([str(path)] if path else [])]
    return EvaluationResult(
        figure=measured.figure,
        figures=judged.figures,
        per_class={name: next(iter(row.values())) for name, row in judged.rows.items()},
        measured=replace(measured, title=first),
        predictions=predictions,
        outputs=None if predictions else measured.parts[0].float().numpy(),
        path=path,
        details=evaluation(command, path, title, measured.figure, details),
        text="\n".join(text),
    )


def lowest(what: str, figures: Mapping[str, Mapping[str, object]]) -> str:
    """Return a table with the figures of the classes or labels that are predicted worst."""
    columns = list(next(iter(figures.values())))
    order = sorted(figures, key=lambda name: getattr(figures[name][columns[0]], "value", math.inf))
    rows = [[brief(name), *map(_cell, figures[name].values())] for name in order[:_SHOWN]]
    return f"\n{format_table([f'{what}, the lowest of {len(figures):,}', *columns], rows)}\n"


def _cell(figure: object) -> str:
    return "-" if figure is None else f"{figure:.2f}" if isinstance(figure, float) else str(figure)

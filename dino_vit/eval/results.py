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

from dino_vit.config.outputs import RESULTS_FOLDER, RESULTS_VERSION, check_outputs
from dino_vit.config.settings import Settings, get, settings_of, values
from dino_vit.core.distributed import is_main_process
from dino_vit.core.invocation import after_figures, on_console
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import Result, brief, format_table, public, public_values
from dino_vit.eval.sets import LabelledFeatures, LabelledSubset
from dino_vit.eval.statistics import (
    TITLES,
    Figure,
    PerImageMetric,
    Predictions,
    measure,
    measured_share,
)

_SHOWN = 10
METRIC = TITLES | {"multiclass": "Accuracy"}  # at the head of a table


def output_of(config: Settings, loaded: str, sets: Sequence[LabelledSubset] = ()) -> Path:
    """Return the file for the results of weights that were loaded from a file: as given, or by default."""
    given = get(config, "output")
    path = default_output(config, loaded, sets) if given is None else Path(str(given))
    if given is not None or path.parent.name != RESULTS_FOLDER:  # what lies in eval/ of a run is its own
        check_outputs(config, path)
    return path


def asked_output(config: Settings, loaded: str, sets: Sequence[LabelledSubset] = ()) -> Path | None:
    """Return the file for results (`output_of`); in Python none unless `output` is given."""
    return output_of(config, loaded, sets) if get(config, "output") or on_console() else None


def default_output(config: Settings, loaded: str, sets: Sequence[LabelledSubset] = ()) -> Path:
    """Return a file for results that is the same for the same weights, images, labels and settings only.

    It is in eval/ of the run of the weights, or beside them. Its name has the step that was loaded: the
    newest checkpoint of a run may be another one by now.
    """
    from dino_vit.weights.hub import is_name  # a run that trains reads no weights

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


def write_results(path: Path, results: Mapping[str, object]) -> dict[str, Any]:
    """Write results as JSON on rank 0, and return what the file holds."""
    content = {"version": RESULTS_VERSION, **to_jsonable(results)}
    if is_main_process():
        with after_figures():
            write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
    return content


def to_jsonable(results: Mapping[str, object]) -> dict[str, Any]:
    """Return results as JSON holds them, without what is not public."""
    content: dict[str, Any] = public_values(json.loads(json.dumps(results, default=asdict)))
    return content


def evaluation(
    command: str, path: Path | None, title: str, figure: Figure, details: Mapping[str, object]
) -> dict[str, Any]:
    """Return the results of a command, its main figure first, as JSON holds them; with a path, write them."""
    head = {"command": command, "written": datetime.now(UTC).isoformat(timespec="seconds")}
    results = {**head, "figure": {"title": title, **asdict(figure)}, **details}
    return to_jsonable(results) if path is None else write_results(path, results)


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationResult(Result):
    """How well classes or labels are predicted."""

    figure: Figure  # top-1 accuracy; mAP of several labels an image
    top5: Figure | None = None  # of more than five classes
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
    judged: Predictions | Sequence[PerImageMetric],
    details: Mapping[str, Any],
    lines: Sequence[str],
    labels: Sequence[str] = (),
) -> EvaluationResult:
    """Return the result of classes, or of the figures of several labels; with a path, write the JSON file."""
    parts: dict[str, Any]
    if isinstance(judged, Predictions):
        measured, figures = (
            measured_share(title, judged.images, torch.from_numpy(judged.right)),
            judged.figures(),
        )
        parts = {"predictions": judged, "top5": figures["top5"], "per_class": figures["per_class"]}
    else:
        measured, per_target = judged[0], dict(zip(labels, _rows(judged), strict=True))
        means = {each.title: each.figure for each in judged}
        lines = [*lines, *(f"mean {name} {mean} %" for name, mean in means.items())]
        lines.append(lowest("label", per_target))
        details = {**details, "task": "multilabel", "mean": means, "per_target": per_target}
        parts = {"per_class": dict(zip(labels, measured.column_figures, strict=True))}
        parts["outputs"] = measured.parts[0].float().numpy()
    return EvaluationResult(
        figure=measured.figure,
        measured=replace(measured, title=title.partition(",")[0]),
        path=path,
        details=evaluation(command, path, title, measured.figure, details),
        text="\n".join([*lines, *([str(path)] if path else [])]),
        **parts,
    )


def _rows(figures: Sequence[PerImageMetric]) -> list[dict[str, object]]:
    """Return the figures of each label by their names."""
    targets = figures[0].parts[1]
    columns: dict[str, Sequence[object]] = {each.title: each.column_figures for each in figures}
    columns |= {"AP of a guess": (100 * targets.mean(0)).tolist(), "images": targets.sum(0).int().tolist()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def has_two_classes(val: LabelledFeatures) -> bool:
    """Tell whether the images have an AUROC."""
    return val.task == "multiclass" and len(val.classes) == len(set(val.targets.tolist())) == 2


def score(val: LabelledFeatures, outputs: Tensor) -> list[PerImageMetric]:
    """Return all figures of outputs, of two classes the AUROC; raise if there is nothing to judge by."""
    figures = measure(val.task, val.indices, outputs, val.targets.view(len(val), -1))
    if math.isnan(figures[0].mean):
        raise ValueError(f"the {len(val):,} images to judge by have no labels: give more images")
    return figures


def lowest(what: str, figures: Mapping[str, Mapping[str, object]]) -> str:
    """Return a table with the figures of the classes or labels that are predicted worst."""
    columns = list(next(iter(figures.values())))
    order = sorted(figures, key=lambda name: getattr(figures[name][columns[0]], "value", math.inf))
    rows = [[brief(name), *map(_cell, figures[name].values())] for name in order[:_SHOWN]]
    return f"\n{format_table([f'{what}, the lowest of {len(figures):,}', *columns], rows)}\n"


def _cell(figure: object) -> str:
    return "-" if figure is None else f"{figure:.2f}" if isinstance(figure, float) else str(figure)

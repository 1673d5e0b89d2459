"""Results of evaluations: files, one for each command and data."""

import hashlib
import json
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

from dino_vit.config.outputs import check_outputs
from dino_vit.config.settings import Settings, get, settings_of, values
from dino_vit.core.distributed import is_main_process
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import Result, public, public_values
from dino_vit.core.work import after_figures, on_console
from dino_vit.eval.figures import Figure, Measured, Predictions, measured_share
from dino_vit.reports.record import FOLDER, RESULTS_VERSION


def output_of(config: Settings, loaded: str) -> Path:
    """Return the file for the results of weights that were loaded from a file: as given, or by default."""
    given = get(config, "output")
    path = default_output(config, loaded) if given is None else Path(str(given))
    if given is not None or path.parent.name != FOLDER:  # what lies in eval/ of a run is its own
        check_outputs(config, path)
    return path


def asked_output(config: Settings, loaded: str) -> Path | None:
    """Return the same, but in Python none unless it is given."""
    return output_of(config, loaded) if get(config, "output") or on_console() else None


def default_output(config: Settings, loaded: str) -> Path:
    """Return a file for results that is the same for the same weights, data and settings only.

    Its name has the step that was loaded: the newest checkpoint of a run may be another one by now.
    """
    name, given, facts = config.writes.rpartition("/")[2], values(config), dict[str, object]()
    for key, info in settings_of(type(config)).items():
        if key in given and not info.resumable:
            value = given[key]
            is_file = isinstance(value, str) and info.takes_text and os.path.exists(value)
            facts[key] = os.path.abspath(str(value)) if is_file else value
    mark = hashlib.sha256(json.dumps([name, facts], sort_keys=True).encode()).hexdigest()[:6]
    source = public(str(given[config.positional[0]]))
    data = re.sub(r"[^\w.-]+", "-", "/".join(Path(source).parts[-2:])).strip("-.")[-40:]
    return _beside(str(given["weights"]), loaded, f"{name}-{data}-{mark}.json")


def _beside(weights: str, loaded: str, name: str) -> Path:
    """Return the file of a name in eval/ of the run of some weights, with their step, or beside them."""
    from dino_vit.weights.hub import is_name  # a run that trains reads no weights

    if is_name(weights):
        return Path(f"{weights.replace(':', '-').replace('/', '-')}.{name}")
    path = Path(loaded)
    if path.parent.name == "checkpoints":
        return path.parent.parent / FOLDER / f"{path.stem}.{name}"
    if Path(weights).is_dir():
        return Path(weights) / FOLDER / name
    return path.with_name(f"{path.stem}.{name}")


def write_results(path: Path, results: Mapping[str, object]) -> dict[str, Any]:
    """Write results as JSON on rank 0, and return what the file holds."""
    content = {"version": RESULTS_VERSION, **plain(results)}
    if is_main_process():
        with after_figures():
            write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
    return content


def plain(results: Mapping[str, object]) -> dict[str, Any]:
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
    results = {**head, "figure": {"title": title, **figure.as_json()}, **details}
    return plain(results) if path is None else write_results(path, results)


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationResult(Result):
    """How well classes or labels are predicted."""

    figure: Figure  # top-1 accuracy; mAP of several labels an image
    top5: Figure | None = None  # of more than five classes
    per_class: dict[str, Figure | None]  # accuracy, or AP of each label
    measured: Measured  # the figure, with what each image contributes
    predictions: Predictions | None = None  # of classes
    outputs: NDArray[np.float32] | None = None  # of several labels, by image
    path: Path | None  # of the JSON file, if one was written
    details: dict[str, Any]  # all that the file holds


def conclude(
    command: str,
    path: Path | None,
    title: str,
    measured: Measured,
    details: Mapping[str, Any],
    lines: Sequence[str],
    **parts: Any,
) -> EvaluationResult:
    """Return the result of an evaluation; with a path, write the JSON file."""
    return EvaluationResult(
        figure=measured.figure,
        measured=replace(measured, title=title.partition(",")[0]),
        path=path,
        details=evaluation(command, path, title, measured.figure, details),
        text="\n".join([*lines, *([str(path)] if path else [])]),
        **parts,
    )


def conclude_classes(
    command: str,
    path: Path | None,
    title: str,
    predictions: Predictions,
    details: Mapping[str, Any],
    lines: Sequence[str],
) -> EvaluationResult:
    """Return the result of a classification; with a path, write the JSON file."""
    figures = predictions.figures()
    parts = {"predictions": predictions, "top5": figures["top5"], "per_class": figures["per_class"]}
    measured = measured_share(title, predictions.images, torch.from_numpy(predictions.right))
    return conclude(command, path, title, measured, details, lines, **parts)

"""Results of evaluations: files, one for each command and data."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dino_vit.config.settings import Settings, get, settings_of, values
from dino_vit.core.distributed import is_main_process
from dino_vit.core.outputs import MARK, after_figures, claim, on_console, write_output
from dino_vit.core.text import Result, public, public_values
from dino_vit.eval.figures import Accuracy, Interval, Predictions
from dino_vit.reports.record import FOLDER


def output_of(config: Settings, loaded: str) -> Path:
    """Return the file for the results of weights that were loaded from a file: as given, or by default."""
    given = get(config, "output")
    path = default_output(config, loaded) if given is None else Path(str(given))
    claim(path)
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
    content = {"file": MARK, **plain(results)}
    if is_main_process():
        with after_figures():
            write_output(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
    return content


def plain(results: Mapping[str, object]) -> dict[str, Any]:
    """Return results as JSON holds them, without what is not public."""
    content: dict[str, Any] = public_values(json.loads(json.dumps(results, default=asdict)))
    return content


def evaluation(
    command: str, path: Path | None, title: str, figure: Interval, details: Mapping[str, object]
) -> dict[str, Any]:
    """Return the results of a command, its main figure first, as JSON holds them; with a path, write them."""
    head = {"command": command, "written": datetime.now(UTC).isoformat(timespec="seconds")}
    results = {**head, "figure": {"title": title, **asdict(figure)}, **details}
    return plain(results) if path is None else write_results(path, results)


@dataclass(frozen=True, kw_only=True)
class Classification(Result):
    """Accuracies on labelled images."""

    top1: Accuracy
    top5: Accuracy | None  # of five classes or fewer
    per_class: dict[str, Accuracy] = field(repr=False)  # top-1
    predictions: Predictions = field(repr=False)
    path: Path | None  # of the JSON file, if one was written
    details: dict[str, Any] = field(repr=False)  # all that the file holds


def classification(
    command: str,
    path: str | Path | None,
    title: str,
    predictions: Predictions,
    details: Mapping[str, Any],
    text: str,
) -> Classification:
    """Return a result with the figures of predictions; with a path, write the JSON file."""
    figures, path = predictions.figures(), None if path is None else Path(path)
    return Classification(
        top1=figures["top1"],
        top5=figures["top5"],
        per_class=figures["per_class"],
        predictions=predictions,
        path=path,
        details=evaluation(command, path, title, figures["top1"], details),
        text=text if path is None else f"{text}\n{path}",
    )

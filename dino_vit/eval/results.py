"""Files of results: one for each command and data, and the list of those of a run, read from the files."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from dino_vit.config.commands import DenseConfig, KnnConfig, LinearConfig
from dino_vit.config.loading import write_yaml
from dino_vit.config.settings import Settings, flat, get, settings_of, values
from dino_vit.core import log
from dino_vit.core.distributed import is_main_process
from dino_vit.core.outputs import MARK, after_figures, claim, on_console, write_output
from dino_vit.core.text import public, public_values
from dino_vit.data.limits import read_regular
from dino_vit.eval.accuracy import Interval

CONFIGS = {"knn": KnnConfig, "linear": LinearConfig, "dense": DenseConfig}
FOLDER = "eval"  # in that of a run
_OWN_COLUMNS = ("source", "train", "weights")  # in the list


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


class Evaluation(NamedTuple):
    """What a file of results says first, as text."""

    command: str  # and the step of a checkpoint
    figure: str
    percent: str  # with its confidence interval
    data: str
    settings: str  # that differ from the defaults
    written: str  # UTC
    file: str


def read_evaluations(run: Path) -> list[Evaluation]:
    """Return the results in the folder of a run, the newest first."""
    evaluations = []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            evaluations.append(_read(path))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("%s is not listed, as it is damaged or holds no results: %s", path, error)
    return sorted(evaluations, key=lambda evaluation: evaluation.written, reverse=True)


def _read(path: Path) -> Evaluation:
    content = json.loads(read_regular(path))
    command = content.get("command", path.stem)  # programs of eval/ have a name, but no single figure
    figure = content.get("figure") or {"title": ""}
    settings = flat(content.get("settings") or {})
    step = content.get("weights", {}).get("step")
    changed = [
        f"{key}={write_yaml(settings[key])}"
        for key, info in settings_of(CONFIGS.get(command, Settings)).items()
        if key in settings.keys() - {*_OWN_COLUMNS}
        and not info.resumable
        and settings[key] != plain({key: info.default})[key]
    ]
    return Evaluation(
        command=f"{command}, step {step:,}" if step else command,
        figure=figure["title"],
        percent=str(Interval(figure["percent"], figure["low"], figure["high"])) if figure["title"] else "",
        data=" by ".join(str(settings[key]) for key in ("source", "train") if settings.get(key)),
        settings=", ".join(changed),
        written=content.get("written", "")[:19].replace("T", " "),
        file=path.name,
    )

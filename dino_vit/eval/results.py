"""What an evaluation found: where its JSON lies, and labels of two sets on one numbering."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dino_vit.storage import write_bytes

_NAMES_SHOWN = 5


def results_path(name: str, *, weights: str, output: str | None = None) -> Path:
    """Return where results go: where told, or eval/NAME.json in the folder of the run, or beside a file."""
    if output is not None:
        return Path(output)
    path = Path(weights)
    if path.is_dir():
        return path / "eval" / f"{name}.json"
    if path.parent.name == "checkpoints":
        return path.parent.parent / "eval" / f"{path.stem}.{name}.json"
    return path.with_name(f"{path.stem}.{name}.json")


def write_results(path: Path, results: Mapping[str, object]) -> None:
    """Write results as JSON, whole or not at all."""
    write_bytes(path, (json.dumps(results, indent=2, allow_nan=False) + "\n").encode())


def renumber(
    labels: NDArray[np.integer], classes: Sequence[str], known: Sequence[str], *, where: str
) -> NDArray[np.int64]:
    """Return labels of `classes` as numbers of the `known` ones, met by name; −1 stays −1.

    Two folders need not have the same classes, so that equal numbers need not be equal classes.
    """
    number = {name: place for place, name in enumerate(known)}
    used = sorted(set(labels[labels >= 0].tolist()))
    strange = [classes[label] for label in used if classes[label] not in number]
    if strange:
        more = f" and {len(strange) - _NAMES_SHOWN} more" if len(strange) > _NAMES_SHOWN else ""
        raise ValueError(
            f"{where} has classes that are not among the {len(known)} that are learned: "
            f"{', '.join(strange[:_NAMES_SHOWN])}{more}. Sets meet by the names of their classes."
        )
    table = np.array([number.get(name, -1) for name in classes] + [-1], dtype=np.int64)
    return table[labels]

"""What an evaluation found, as JSON beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dino_vit.core.storage import write_bytes


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

"""How often images are drawn, from a file: a weight for each by its name, as a part of the sum of all."""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dino_vit.data.labels import read_table
from dino_vit.data.sources.source import Source

log = logging.getLogger("dino_vit")

WEIGHT_WORDS = ("weight", "weights", "sample_weight", "probability")


def read_weights(source: Source, path: str | Path) -> NDArray[np.float64]:
    """Return the weight of each item; the file, CSV (name, weight) or JSON, must know them all by name."""
    table = read_table(str(path), WEIGHT_WORDS)
    names = [source.name(index) for index in range(len(source))]
    missing = [name for name in names if table.get(name) in (None, "")]
    if missing:
        raise ValueError(
            f"{path} has no weight for {len(missing)} of {len(names)} images, such as {missing[0]!r}. "
            f"Give each one, 0 to never draw it; names must be those of the source, suffix and all."
        )
    surplus = table.keys() - set(names)
    if surplus:
        text = "%s: %d weights are for names that are not in the source, such as %r"
        log.warning(text, path, len(surplus), min(surplus))
    weights = np.array([_weight(str(path), name, table[name]) for name in names])
    total = sum(weights.tolist())
    if not 1e-300 < total < math.inf:  # shares of less could not be told apart
        raise ValueError(f"{path}: the weights of all images add up to {total}, so none can be drawn.")
    return weights


def _weight(path: str, name: str, value: object) -> float:
    try:
        weight = float(str(value))
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"{path} gives {name!r} the weight {value!r}; it must be a finite number, 0 or more."
        )
    return weight


def describe(weights: NDArray[np.float64]) -> str:
    """Say how uneven weights are: (Σ w)² / Σ w² images of equal weight would be repeated as often."""
    share = weights / weights.sum()
    never = np.count_nonzero(weights == 0)
    said = (
        f"drawn by weight, which is as if {1 / (share**2).sum():,.0f} of {len(weights):,} were drawn equally"
    )
    return f"{said}; {never:,} are never drawn" if never else said


def fingerprint(weights: NDArray[np.float64] | None) -> str | None:
    """Return a text that differs for other weights."""
    if weights is None:
        return None
    return hashlib.sha256(weights.astype("<f8").tobytes()).hexdigest()[:16]

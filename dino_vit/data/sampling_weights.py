"""Sampling weights from a file: how often each image is drawn, relative to the others."""

import hashlib
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dino_vit.data.labels import values_by_name
from dino_vit.data.sources.source import Source

WEIGHT_COLUMNS = ("weight", "weights", "sample_weight", "probability")


def read_sampling_weights(source: Source, path: str | Path) -> NDArray[np.float64]:
    """Return the weight of each item from a CSV (name, weight) or JSON file, which must have them all."""
    values = values_by_name(source, str(path), WEIGHT_COLUMNS)
    missing = [index for index, value in enumerate(values) if value in (None, "")]
    if missing:
        count = f"{len(missing)} of {len(values)} images"
        example = source.name(missing[0])
        raise ValueError(f"{path} has no weight for {count}, such as '{example:.200}'; 0 is for never")
    weights = np.array([_weight(str(path), source.name(row), value) for row, value in enumerate(values)])
    total = sum(weights.tolist())
    if not 1e-300 < total < math.inf:  # smaller numbers lose precision
        raise ValueError(f"{path}: the weights add up to {total}, so no image can be drawn.")
    return weights


def _weight(path: str, name: str, value: object) -> float:
    try:
        weight = float(str(value))
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        text = "it must be a finite number, 0 or more"
        raise ValueError(f"{path} gives '{name:.200}' the weight {value!r:.200}; {text}")
    return weight


def describe_sampling(weights: NDArray[np.float64]) -> str:
    """Describe how uneven weights are, by the effective number of images (Σ w)² / Σ w²."""
    probabilities = weights / weights.sum()
    never = np.count_nonzero(weights == 0)
    text = f"sampling weights: {1 / (probabilities**2).sum():,.0f} of {len(weights):,} images effectively"
    return f"{text}; {never:,} are never drawn" if never else text


def sampling_fingerprint(weights: NDArray[np.float64] | None) -> str | None:
    """Return a digest of the weights."""
    if weights is None:
        return None
    return hashlib.sha256(weights.astype("<f8").tobytes()).hexdigest()[:16]

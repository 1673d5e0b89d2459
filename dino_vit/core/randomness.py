"""Random numbers without state: each is a function of a seed, a purpose and integer keys.

The function applies SplitMix64 once per key, so it gives the same bits on every platform, in every process.
Keys may be arrays, which are broadcast against each other, so that one call draws a whole batch.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = int | NDArray[np.integer[Any]]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class RngPurpose(IntEnum):
    """What a random number is for; the same keys give unrelated numbers for different purposes."""

    ORDER = 1
    BOXES = 2
    AUGMENT = 3
    NETWORK = 4
    SYNTHETIC = 5
    REPLACEMENT = 6
    EVALUATION = 7
    MASKS = 10  # 8 and 9 were purposes that are gone
    SHARDS = 11
    WINDOW = 12
    CLUSTERS = 13
    KEPT_PATCHES = 14


def random_bits(seed: int, purpose: RngPurpose, *keys: Key) -> NDArray[np.uint64]:
    """Return 64 random bits for every combination of the broadcast keys, as an array."""
    state = _mix(_as_uint64(seed))
    for key in (int(purpose), *keys):
        state = _mix(state + (_as_uint64(key) + np.uint64(1)) * _GAMMA)
    return state


def random_uniform(seed: int, purpose: RngPurpose, *keys: Key) -> NDArray[np.float64]:
    """Return numbers in [0, 1) for every combination of the broadcast keys, as an array."""
    return (random_bits(seed, purpose, *keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, purpose: RngPurpose, *keys: int) -> int:
    """Return a 64-bit seed for another generator, such as PyTorch's."""
    return int(random_bits(seed, purpose, *keys)[0])


def _as_uint64(key: Key) -> NDArray[np.uint64]:
    if isinstance(key, int):
        return np.array([key & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    return key.astype(np.uint64)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state ^ (state >> np.uint64(30))
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state

"""Random numbers without state: each is a function of (seed, what it is for, the keys it belongs to).

The function is SplitMix64, once per key, on integers: the same bits on every platform, in every process.
A key may be an array; keys broadcast against each other, so that a whole batch is drawn by one call.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = int | NDArray[np.integer[Any]]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class RngPurpose(IntEnum):
    """What a number is for: the same keys in two streams give unrelated numbers."""

    ORDER = 1
    BOXES = 2
    PHOTOMETRY = 3
    NETWORK = 4
    SYNTHETIC = 5
    REPLACEMENT = 6
    EVALUATION = 7
    LOOK = 8
    NOISE = 9


def random_bits(seed: int, stream: RngPurpose, *keys: Key) -> NDArray[np.uint64]:
    """Return 64 random bits for every combination of the broadcast keys, with at least one axis."""
    state = _mix(_words(seed))
    for key in (int(stream), *keys):
        state = _mix(state + (_words(key) + np.uint64(1)) * _GAMMA)
    return state


def random_uniform(seed: int, stream: RngPurpose, *keys: Key) -> NDArray[np.float64]:
    """Return numbers in [0, 1) for every combination of the broadcast keys, with at least one axis."""
    return (random_bits(seed, stream, *keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, stream: RngPurpose, *keys: int) -> int:
    """Return a 64-bit seed for a generator of someone else, such as torch's."""
    return int(random_bits(seed, stream, *keys)[0])


def _words(key: Key) -> NDArray[np.uint64]:
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

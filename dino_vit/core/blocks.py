"""Split images that nobody has split: by blocks of neighbours, as frames of one place are nearly the same."""

import re
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits

STRETCHES = 5  # of all images, about, with a held-out block in each
SHORTEST = 8  # images of a stretch, unless its series has fewer
_NUMBER = re.compile("[0-9]+")


def series_of(name: Callable[[int], str], indices: Sequence[int]) -> list[str]:
    """Return the series of each image: those whose names differ in numbers only, as frames and bursts do."""
    return [_NUMBER.sub("0", name(index)) for index in indices]


def choose_blocks(series: Sequence[Hashable], share: int, seed: int) -> NDArray[np.bool_]:
    """Hold out one in `share` images: of each series a block of neighbours, of a long one some blocks.

    The seed draws where the blocks lie. Of series of a few images, some have none.
    """
    members = dict[Hashable, list[int]]()
    for row, key in enumerate(series):
        members.setdefault(key, []).append(row)
    stretches = list[NDArray[np.int64]]()
    for rows in members.values():
        parts = min(round(STRETCHES * len(rows) / len(series)), len(rows) // SHORTEST)
        stretches += np.array_split(np.array(rows), max(1, parts))
    held, share, passed = np.zeros(len(series), bool), min(share, len(series)), 0
    order, places = random_bits(seed, RngPurpose.EVALUATION, np.arange(2)[:, None], np.arange(len(stretches)))
    for number in np.argsort(order, kind="stable").tolist():
        rows = stretches[number]
        count = (passed + len(rows)) // share - passed // share
        start = int(places[number]) % (len(rows) - count + 1)
        held[rows[start : start + count]] = True
        passed += len(rows)
    return held

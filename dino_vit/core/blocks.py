"""Split images that nobody has split: by blocks of neighbours, as frames of one place are nearly the same."""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits

STRETCHES = 5  # of all images, about, with a held-out block in each
SHORTEST = 8  # images of a stretch, unless its series has fewer
_NUMBER = re.compile("[0-9]+")


def series_of(name: Callable[[int], str], indices: Sequence[int]) -> list[str]:
    """Return the series of each image: those whose names differ in numbers only, as frames and bursts do."""
    return [_NUMBER.sub("0", name(index)) for index in indices]


def numbers_of(name: Callable[[int], str], indices: Sequence[int]) -> list[list[tuple[int, str]]]:
    """Return the numbers in each name such that they sort as numbers: frame 9 is before frame 10."""
    numbers = (_NUMBER.findall(name(index)) for index in indices)
    return [[(len(digits := each.lstrip("0")), digits) for each in parts] for parts in numbers]


def choose_blocks(
    series: Sequence[Hashable],
    share: int,
    seed: int,
    numbers: Sequence[Any] | None = None,
    classes: Sequence[int] | None = None,
) -> NDArray[np.bool_]:
    """Hold out one in `share` images: of each series a block of neighbours, of a long one some blocks.

    The seed draws where the blocks lie. Neighbours are those in the order of `numbers`, or of the images. Of
    series of a few images, some have none. With `classes` a series is of one class, and one in `share` images
    of each class is held out.
    """
    members = dict[Hashable, list[int]]()
    keys = series if classes is None else [*zip(series, classes, strict=True)]
    for row in sorted(range(len(series)), key=None if numbers is None else numbers.__getitem__):
        members.setdefault(keys[row], []).append(row)
    stretches = list[NDArray[np.int64]]()
    for rows in members.values():
        parts = min(round(STRETCHES * len(rows) / len(series)), len(rows) // SHORTEST)
        stretches += np.array_split(np.array(rows), max(1, parts))
    held, share, passed = np.zeros(len(series), bool), min(share, len(series)), 0
    order, places = random_bits(seed, RngPurpose.EVALUATION, np.arange(2)[:, None], np.arange(len(stretches)))
    by_draw = np.argsort(order, kind="stable").tolist()
    if classes is not None:  # class by class, in the order in which they are drawn first
        class_of = [classes[rows[0]] for rows in stretches]
        place_of = {each: place for place, each in enumerate(dict.fromkeys(class_of[n] for n in by_draw))}
        by_draw.sort(key=lambda number: place_of[class_of[number]])
    for number in by_draw:
        rows = stretches[number]
        count = (passed + len(rows)) // share - passed // share
        start = int(places[number]) % (len(rows) - count + 1)
        held[rows[start : start + count]] = True
        passed += len(rows)
    return held

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
    """Hold out one in `share` images: the first of as many folds (`choose_folds`)."""
    return choose_folds(series, share, seed, numbers, classes) == 0


def choose_folds(
    series: Sequence[Hashable],
    count: int,
    seed: int,
    numbers: Sequence[Any] | None = None,
    classes: Sequence[int] | None = None,
) -> NDArray[np.int64]:
    """Return the fold of each image: blocks of neighbours of each series, of a long one some for each fold.

    The seed draws where the blocks lie. Neighbours are those in the order of `numbers`, or of the images. A
    series of fewer images than folds is not in all of them. With `classes` a series is of one class, and each
    class is as evenly in all folds as its images allow.
    """
    members = dict[Hashable, list[int]]()
    keys = series if classes is None else [*zip(series, classes, strict=True)]
    for row in sorted(range(len(series)), key=None if numbers is None else numbers.__getitem__):
        members.setdefault(keys[row], []).append(row)
    stretches = list[NDArray[np.int64]]()
    for rows in members.values():
        parts = min(round(STRETCHES * len(rows) / len(series)), len(rows) // SHORTEST)
        stretches += np.array_split(np.array(rows), max(1, parts))
    folds, count, passed = np.zeros(len(series), np.int64), min(count, len(series)), 0
    order, places = random_bits(seed, RngPurpose.EVALUATION, np.arange(2)[:, None], np.arange(len(stretches)))
    by_draw = np.argsort(order, kind="stable").tolist()
    if classes is not None:  # class by class, in the order in which they are drawn first
        class_of = [classes[rows[0]] for rows in stretches]
        place_of = {each: place for place, each in enumerate(dict.fromkeys(class_of[n] for n in by_draw))}
        by_draw.sort(key=lambda number: place_of[class_of[number]])
    for number in by_draw:
        rows, before = stretches[number], passed + np.arange(count)
        sizes = (before + len(rows)) // count - before // count  # their sum is len(rows)
        start = int(places[number]) % (len(rows) - int(sizes[0]) + 1)
        folds[np.roll(rows, -start)] = np.repeat(np.arange(count), sizes)
        passed += len(rows)
    return folds

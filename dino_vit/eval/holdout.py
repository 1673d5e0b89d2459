"""Split images that nobody has split: by blocks of neighbours, as frames of one place are nearly the same."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits

STRETCHES = 5  # of all images, about, with a held-out block in each
SHORTEST = 8  # images of a stretch, unless its series has fewer
_NUMBER = re.compile("[0-9]+")


def series_of(name: str) -> str:
    """Return the series of an image: the names of one differ in numbers only, as frames and bursts do."""
    return _NUMBER.sub("0", name)


def numbers_of(name: str) -> list[tuple[int, str]]:
    """Return the numbers in a name such that they sort as numbers: frame 9 is before frame 10."""
    return [(len(digits := each.lstrip("0")), digits) for each in _NUMBER.findall(name)]


def choose_folds(
    series: Iterable[Hashable],
    count: int,
    seed: int,
    sort_key: Callable[[int], Any] | None = None,
    classes: Sequence[int] | None = None,
) -> NDArray[np.int64]:
    """Return the fold of each image: blocks of neighbours of each series, of a long one some for each fold.

    The seed draws where the blocks lie. Neighbours are those in the order of `sort_key`, or of the images. A
    series of fewer images than folds is not in all of them. With `classes` a series is of one class, and each
    class is as evenly in all folds as its images allow.
    """
    by_series = defaultdict[Hashable, list[int]](list)
    for row, each in enumerate(series if classes is None else zip(series, classes, strict=True)):
        by_series[each].append(row)
    members = [*by_series.values()]
    if sort_key:  # of a million images at once they would take a gigabyte
        for rows in members:
            rows.sort(key=sort_key)
        members.sort(key=lambda rows: (sort_key(rows[0]), rows[0]))
    images, stretches = sum(map(len, members)), list[NDArray[np.int64]]()
    for rows in members:
        parts = min(round(STRETCHES * len(rows) / images), len(rows) // SHORTEST)
        stretches += np.array_split(np.array(rows), max(1, parts))
    folds, count, passed = np.zeros(images, np.int64), min(count, images), 0
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

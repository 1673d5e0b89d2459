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
REACH = 5  # between numbers of a run, at most
_NUMBER = re.compile("[0-9]+")


def series_of(name: str) -> str:
    """Return the series of an image: the names of one differ in numbers only, as frames and bursts do."""
    return _NUMBER.sub("0", name)


def numbers_of(name: str) -> list[tuple[int, str]]:
    """Return the numbers in a name such that they sort as numbers: frame 9 is before frame 10."""
    return [(len(digits := each.lstrip("0")), digits) for each in _NUMBER.findall(name)]


def find_runs(names: Sequence[str], images: int, classes: Sequence[int] | None = None) -> NDArray[np.int64]:
    """Return the run of each labelled image, such as a burst: one class, one folder, numbers that follow.

    Where all photos are numbered in turn, some numbers of those that somebody labels follow by chance. So
    numbers of a run are at most a tenth of the usual step apart, as one in ten is by chance, or 1. The usual
    step is the images for each label, or the numbers for each, if these are more: with labelled images in
    folders of their own. Numbers of all folders count, as a camera's go on; where each folder starts from 1
    they are few. If a label is as usual as none, numbers that follow say nothing, and no image is in a run.
    """
    folders, files = zip(*(name.rpartition("/")[::2] for name in names), strict=True)
    numbers = np.array([int("".join(_NUMBER.findall(file))[-15:] or 0) for file in files])
    parts = [[*map(series_of, files)], folders, [0] * len(names) if classes is None else classes]
    kinds, *parts = (np.unique(part, return_inverse=True)[1] for part in parts)
    ascending = numbers[np.lexsort((numbers, kinds))]
    _, first, counts = np.unique(np.sort(kinds), return_index=True, return_counts=True)
    spans = ascending[first + counts - 1] - ascending[first] + 1
    usual = np.maximum(images / len(names), spans / counts)[kinds]
    reach = np.where(usual < 2, 0, np.clip(usual // 10, 1, REACH))
    order = np.lexsort((numbers, kinds, *parts))
    new = np.any([np.diff(part[order]) != 0 for part in (kinds, *parts)], axis=0)
    new |= np.diff(numbers[order]) > reach[order][1:]
    runs = np.zeros(len(names), np.int64)
    runs[order[1:]] = np.cumsum(new)
    return runs


def choose_folds(
    series: Iterable[Hashable],
    count: int,
    seed: int,
    sort_key: Callable[[int], Any] | None = None,
    classes: Sequence[int] | None = None,
    runs: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the fold of each image: blocks of neighbours of each series, of a long one some for each fold.

    The seed draws where the blocks lie. Neighbours are those in the order of `sort_key`, or of the images. A
    series of fewer images than folds is not in all of them. With `classes` a series is of one class, and each
    class is as evenly in all folds as its images allow. Of `runs` each is in one fold, that of its middle.
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
    if runs is not None:
        order = np.concatenate(members)
        order = order[np.argsort(runs[order], kind="stable")]
        _, starts, sizes = np.unique(runs[order], return_index=True, return_counts=True)
        folds = folds[order[starts + sizes // 2]][runs]
    return folds

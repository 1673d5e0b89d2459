"""Labels of any kind as class indices, and splits such as train and val."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.text import plural
from dino_vit.data.image_set import ImageSet
from dino_vit.data.targets import NO_LABEL, SEPARATOR

LABEL_COLUMNS = tuple(  # of lists, of tables and of the .json in shards
    ["label", "labels", "tags", "class", "cls", "target", "category", "class_id", "class_name", "fine_label"]
)
TRAIN = ("train", "training")
# The first of these that has labels is evaluated on.
HELD_OUT = ("val", "valid", "validation", "dev", "test", "testing")
_SPLITS = {*TRAIN, *HELD_OUT, "unlabeled", "unlabelled"}


class Labels(NamedTuple):
    """A class index for each item, −1 for no label, and the names of the classes."""

    numbers: NDArray[np.int32]
    classes: list[str]


def number_labels(
    values: Sequence[object], classes: Sequence[str] | None = None, title: str = "the set"
) -> Labels:
    """Number labels as the classes, which they name or are an index of; None, −1 and 'nan' are no label.

    Without classes, the distinct labels are: in numeric order if all are numbers, else sorted as text. A list
    is one label that joins several (`data/targets.py`). Bytes are the name of a folder, whatever it is.
    """
    if classes is not None and any(isinstance(value, list | tuple) for value in values):
        values, classes = [_named(value, classes, title) for value in values], None
    if classes is not None:
        numbers: dict[object, int] = {name: number for number, name in enumerate(classes)}
        numbers |= {number: number for number in range(-1, len(classes))} | {None: -1}
        if unknown := [value for value in values if value not in numbers]:
            text = f"{title} has the label {unknown[0]!r}, which is none of its"
            raise ValueError(f"{text} {len(classes)} classes, nor the index of one")
        return Labels(np.array([numbers[value] for value in values], dtype=np.int32), list(classes))
    absent = [not isinstance(value, bytes) and str(value).lower() in NO_LABEL for value in values]
    if any(absent):
        text = plural(sum(absent), "image has", "images have")
        log.warning("%s 'nan' or '-1' for a label, which counts as none", text)
    pairs = zip(values, absent, strict=True)
    texts = ["" if is_absent or value is None else label_text(value) for value, is_absent in pairs]
    names = sorted({text for text in texts if text}, key=os.fsencode)
    if None not in map(_as_number, names):  # so that 10 comes after 9
        names.sort(key=lambda text: (_as_number(text), text))
    numbers_by_text = {"": -1} | {name: number for number, name in enumerate(names)}
    return Labels(np.array([numbers_by_text[text] for text in texts], dtype=np.int32), names)


def _as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _named(value: object, classes: Sequence[str], title: str) -> object:
    """Return a list of classes, or of a 0 or 1 for each of more than two classes, by their names."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) == len(classes) > 2 and set(value) <= {0, 1}:
        return [name for name, has_label in zip(classes, value, strict=True) if has_label]
    numbers = number_labels(value, classes, title).numbers.tolist()
    return [classes[number] for number in numbers if number >= 0]


def label_text(value: object) -> str:
    """Return a label as text; a list is several labels of an image, joined."""
    if isinstance(value, list | tuple):
        return SEPARATOR.join(map(label_text, value)) or SEPARATOR
    return os.fsdecode(value) if isinstance(value, bytes) else str(value)


def folder_labels(names: Sequence[bytes]) -> Labels:
    """Label paths by their first-level folder below the folder that they all share.

    If these folders are splits, such as train and val, the labels are the folders in them.
    """
    paths = list(below_shared(names))
    if find_splits(paths):
        paths = [path.partition(b"/")[2] for path in paths]
    tops = (path.partition(b"/") for path in paths)
    return number_labels([top if slash else None for top, slash, _ in tops])


def below_shared(names: Sequence[bytes]) -> Iterator[bytes]:
    """Yield paths below the folder that they all share."""
    # What the first and the last in order share, all share.
    folders = (name.split(b"/")[:-1] for name in (min(names), max(names)))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(*folders, strict=False))
    start = sum(len(folder) + 1 for folder, _ in shared)
    return (name[start:] for name in names)


def find_splits(names: Iterable[bytes]) -> dict[str, tuple[int, int]]:
    """Return the first and the last index, plus one, of each split, which are all of it among sorted paths.

    The first-level folders are splits if there are several and all have names of splits; otherwise empty.
    """
    folders: dict[str, tuple[int, int]] = {}
    for index, name in enumerate(names):
        folder, slash, _ = name.partition(b"/")
        if slash:
            text = folder.decode(errors="replace")
            folders[text] = folders.get(text, (index, 0))[0], index + 1
    return folders if len(folders) > 1 and all(name.lower() in _SPLITS for name in folders) else {}


class Split(NamedTuple):
    """A part of a source: its folder, and the indices of its images."""

    name: str
    images: range


def choose_splits(source: ImageSet) -> tuple[Split, Split] | None:
    """Return what to learn from and what to evaluate on; None unless the source has both, with labels."""
    labelled = {
        name.lower(): Split(name, images)
        for name, images in source.splits.items()
        if any(source.label(index) is not None for index in images)
    }
    train = next((labelled[name] for name in TRAIN if name in labelled), None)
    held_out = next((labelled[name] for name in HELD_OUT if name in labelled), None)
    return (train, held_out) if train and held_out else None


def describe_use(source: ImageSet, train: Split, held_out: Split, name: str) -> str:
    """Return what a source is split into and how that is used, as a sentence."""
    sizes = (f"{split} ({plural(len(images), 'image')})" for split, images in source.splits.items())
    return f"{name} has the splits {', '.join(sizes)}: {held_out.name} is evaluated against {train.name}"

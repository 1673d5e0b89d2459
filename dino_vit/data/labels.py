"""Labels of images: of each a class, or several labels. What a label is is decided where it is read.

The name of a folder is a class, whatever it is. A list is several labels of an image: a cell of a table of
lists, a value in JSON, or a cell of text that is split because `several=true` asks for it. Any other text or
number is a class.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dino_vit.config.settings import Task
from dino_vit.core import log
from dino_vit.core.text import brief, plural

Rows = NDArray[np.int64]

LABEL_COLUMNS = tuple(  # of lists, of tables and of the .json in shards
    ["label", "labels", "tags", "class_name", "class", "cls", "target", "category", "class_id", "fine_label"]
)
TRAIN = ("train", "training")
# The first of these that has labels is evaluated on.
HELD_OUT = ("val", "valid", "validation", "dev", "test", "testing")
_SPLITS = {*TRAIN, *HELD_OUT, "unlabeled", "unlabelled"}
NO_LABELS = "none"  # in the place of a file of labels: those of the source are not taken
NO_LABEL = ("nan", "-1", "-1.0")  # what pandas, torchvision and others write for none
ZERO_OR_ONE = {"0", "1", "0.0", "1.0"}


def no_codes(rows: Rows) -> NDArray[Any]:
    return np.full(np.shape(rows), -1, np.int32)


@dataclass(frozen=True, eq=False)
class Column:
    """A column of names, of which each row of a store has one or none."""

    codes: Callable[[Rows], NDArray[Any]] = no_codes  # of rows: j is called names[j]; −1: none
    names: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Labels(Column):
    """A column of labels: of each row a class, or several labels.

    With several, the code of a row is that of its set of labels: `sets[code]` tells which of `names` it has,
    and the empty set has a code too.
    """

    sets: NDArray[np.bool_] | None = None  # (different sets, names); None: classes
    of_folders: bool = False  # nobody has given them: they are the names of folders

    @property
    def task(self) -> Task:
        return "multiclass" if self.sets is None else "multilabel"

    def values(self, codes: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Return what is to be predicted: classes, int64 (n,), or 0 or 1 by label, float32 (n, names)."""
        return codes.astype(np.int64) if self.sets is None else self.sets[codes].astype(np.float32)

    def names_of(self, code: int) -> list[str]:
        """Return the class of a code, or its labels."""
        if self.sets is None:
            return [self.names[code]]
        return [self.names[number] for number in np.flatnonzero(self.sets[code])]

    def as_sets(self) -> "Labels":
        """Return classes as sets of one label each."""
        return self if self.sets is not None else Labels(self.codes, self.names, np.eye(len(self.names)) > 0)

    def describe(self, codes: NDArray[np.integer[Any]]) -> str:
        """Say what the labels of images are."""
        images, names = plural(len(codes), "image"), brief(", ".join(self.names), 100)
        if self.sets is None:
            return f"one class for each of {images}, {plural(len(self.names), 'class', 'classes')}: {names}"
        mean = self.sets[codes].sum() / max(1, len(codes))
        return f"several labels for each of {images}, {mean:.1f} on average of {len(self.names)}: {names}"


def encode_labels(
    values: Sequence[object], classes: Sequence[str] | None = None, title: str = "the set"
) -> Labels:
    """Return a column of labels: None, −1 and 'nan' are none, a list is several, anything else a class.

    Values name the classes or are an index of one. Without classes, the different values are: in numeric
    order if all are numbers, else sorted as text. Bytes are the name of a folder, whatever it is.
    """
    if any(isinstance(value, list | tuple) for value in values):
        return _encode_sets([_named(value, classes, title) for value in values])
    if classes is not None:
        return Labels(_indices(values, classes, title).take, tuple(classes))
    absent = [_is_absent(value) for value in values]
    if any(absent):
        text = plural(sum(absent), "image has", "images have")
        log.warning("%s 'nan' or '-1' for a label, which counts as none", text)
    texts = ["" if none else _text(value) for value, none in zip(values, absent, strict=True)]
    names = sorted(set(texts) - {""}, key=os.fsencode)
    if None not in map(_as_number, names):  # so that 10 comes after 9
        names.sort(key=lambda text: (_as_number(text), text))
    codes = {"": -1} | {name: code for code, name in enumerate(names)}
    return Labels(np.array([codes[text] for text in texts], np.int32).take, tuple(names))


def is_label(value: object) -> bool:
    """Tell whether a value in JSON is a label: a text, a number, or a list of these."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(each, str | int | float) for each in values)


def parse_json(text: str | bytes, name: str) -> object:
    """Return what a text in JSON means, objects as tuples of their pairs, so that no key is lost."""
    try:
        return json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {brief(error, 300)}") from error


def _is_absent(value: object) -> bool:
    return not isinstance(value, bytes) and str(value).lower() in NO_LABEL


def _text(value: object) -> str:
    return "" if value is None else os.fsdecode(value) if isinstance(value, bytes) else str(value)


def _as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _indices(values: Sequence[object], classes: Sequence[str], title: str) -> NDArray[np.int32]:
    """Return the index of each value, which names a class or is its index."""
    codes: dict[object, int] = {name: code for code, name in enumerate(classes)}
    codes |= {code: code for code in range(-1, len(classes))} | {None: -1}
    if unknown := [value for value in values if value not in codes]:
        text = f"{title} has the label {unknown[0]!r}, which is none of its"
        raise ValueError(f"{text} {len(classes)} classes, nor the index of one")
    return np.array([codes[value] for value in values], np.int32)


def _named(value: object, classes: Sequence[str] | None, title: str) -> list[object] | None:
    """Return several labels by their names: of classes, or of a 0 or 1 for each of more than two classes."""
    if not isinstance(value, list | tuple):
        value = None if value in (None, "") or _is_absent(value) else [value]
    if value is None or classes is None:
        return None if value is None else list(value)
    if len(value) == len(classes) > 2 and {*value} <= {0, 1}:
        return [name for name, has_label in zip(classes, value, strict=True) if has_label]
    return [classes[index] for index in _indices(value, classes, title) if index >= 0]


def _encode_sets(values: Sequence[list[object] | None]) -> Labels:
    """Return a column of several labels of an image, None for none that are known."""
    texts = [None if value is None else [str(each).strip() for each in value] for value in values]
    given = [each for each in texts if each is not None]
    if all(len(each) == len(given[0]) > 2 and {*each} <= ZERO_OR_ONE for each in given):
        text = "is a 0 or 1 for each label, without the names of the labels: let the object have `classes`"
        shown = brief(", ".join(given[0]))
        raise ValueError(f"{shown} {text}, or write those of an image by name, as in sea;sky")
    sets = [None if each is None or (each and all(map(_is_absent, each))) else _known(each) for each in texts]
    different = sorted({each for each in sets if each is not None})
    names = tuple(sorted(set[str]().union(*different)))
    codes = {None: -1} | {each: code for code, each in enumerate(different)}
    numbers = {name: number for number, name in enumerate(names)}
    bits = to_bits([[numbers[name] for name in each] for each in different], len(names))
    return Labels(np.array([codes[each] for each in sets], np.int32).take, names, bits)


def _known(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({name for name in names if name and not _is_absent(name)}))


def to_bits(sets: Sequence[Sequence[int]], width: int) -> NDArray[np.bool_]:
    """Return sets of numbers below a width as a matrix."""
    bits = np.zeros((len(sets), width), np.bool_)
    for row, numbers in zip(bits, sets, strict=True):
        row[list(numbers)] = True
    return bits


def alike_names(names: Iterable[str]) -> list[str]:
    """Return a line on names that differ only by capital letters; none without such names."""
    names = list(names)
    by_case = Counter(map(str.casefold, names))
    alike = [name for name in names if by_case[name.casefold()] > 1]
    return [f"perhaps the same but for capital letters: {brief(', '.join(alike), 200)}"] if alike else []


@dataclass(frozen=True)
class Folders:
    """What the folders of paths are: splits, such as train and val, and below these the names of classes."""

    depth: int  # of the folders that are classes
    splits: tuple[str, ...] = ()  # the names of the folders above these, if they are splits

    @classmethod
    def of(cls, folders: Iterable[bytes]) -> "Folders":
        """Return what the first-level folders are, below the folder that all share.

        They are splits if there are several and all have names of splits.
        """
        parts = [folder.split(b"/")[:-1] for folder in folders]
        # What the first and the last in order share, all share.
        ends = zip(min(parts), max(parts), strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
        tops = sorted({each[shared] for each in parts if len(each) > shared})
        names = [top.decode(errors="replace") for top in tops]
        if len(names) > 1 and all(name.lower() in _SPLITS for name in names):
            return cls(shared + 1, tuple(names))
        return cls(shared)

    def label(self, folder: bytes) -> bytes | None:
        """Return the name of the class of images in a folder, which ends in a slash."""
        parts = folder.split(b"/")[:-1]
        return parts[self.depth] if len(parts) > self.depth else None

    def split(self, folder: bytes) -> int:
        """Return the number of the split of images in a folder, −1 for none."""
        parts = folder.split(b"/")[:-1]
        inside = bool(self.splits) and len(parts) >= self.depth
        return self.splits.index(parts[self.depth - 1].decode()) if inside else -1


def folder_of_name(name: bytes) -> bytes:
    """Return the folder of a path with its slash; empty without one."""
    folder, slash, _ = name.rpartition(b"/")
    return folder + slash


def folder_columns(names: Sequence[bytes]) -> tuple[Labels, Column]:
    """Return classes and splits by the folders of paths."""
    given = list(map(folder_of_name, names))
    folders = Folders.of(set(given))
    labels = encode_labels(list(map(folders.label, given)))
    splits = np.array(list(map(folders.split, given)), np.int32)
    return replace(labels, of_folders=True), Column(splits.take, folders.splits)

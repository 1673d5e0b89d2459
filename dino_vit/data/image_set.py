"""A set of images, wherever they are stored; parts of one, and several as one."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.core.text import brief, plural, printable, public
from dino_vit.data.labels import Column, Labels

if TYPE_CHECKING:
    from dino_vit.data.shards import Shards

Indices = Sequence[int] | NDArray[np.int64]
# Of a source with more images than MANY, evaluations choose among some that are drawn at random.
MANY, DRAWN = 2**24, 2**16
UNLABELLED, NO_SPLITS = Labels(), Column()


class Store(ABC):
    """Where images are stored, each in a row: one of the four in `data/stores/`."""

    root: str | None = None  # the folder of images that are files
    shards: "Shards | None" = None  # the files that hold many images each
    parts: Sequence["ImageSet"] = ()  # the sets of several sources, one after another

    @abstractmethod
    def read(self, row: int) -> bytes | Tensor:
        """Return the bytes of an image file, or a tensor (C, H, W) of any dtype."""

    def size(self, row: int) -> int:
        """Return the bytes of an image that an archive declares; 0: it is no archive."""
        return 0

    @abstractmethod
    def origins(self, rows: Iterable[int]) -> list[Hashable]:
        """Return for each row what is the same for the same image elsewhere: its file and place there."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageSet:
    """A table of images: their names, labels and splits in columns, and the store that reads them.

    Images with names are sorted by the bytes of their names, so that the same images in a folder, list, tar,
    zip or Parquet file have the same indices. Arrays, tables without names and generated images keep theirs.
    Columns have the rows of the store: an index or a catalogue may hold them. Parts of a set, and several
    sets joined, keep all columns.
    """

    store: Store
    rows: range | NDArray[np.int64]  # of the images in the store; a range: all of them
    names: Callable[[int], str]  # as they are stored: of any characters, addresses with their secrets
    labels: Labels = UNLABELLED
    splits: Column = NO_SPLITS  # such as train and val
    fingerprint: str  # differs between sets whose indices mean different images, by names and sizes
    # A digest of the size, version and times of each file, as it was opened. Empty: the fingerprint alone
    # identifies the images. None: changes cannot be detected.
    stamp: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes | Tensor:
        """Return the bytes of an image file, or a tensor (C, H, W) of any dtype."""
        return self.store.read(int(self.rows[index]))

    def size(self, index: int) -> int:
        """Return the bytes of an image that an archive declares; 0: it is in none."""
        return self.store.size(int(self.rows[index]))

    def name(self, index: int) -> str:
        """Return the name in a form that can be shown and written: `printable` and `public`."""
        return printable(public(self.full_name(index)))

    def distinct_names(self, indices: Sequence[int]) -> list[str]:
        """Return the names of images for a table; raise an error if two different images have the same.

        An image that a list names twice is in a table twice.
        """
        names = list(map(self.name, indices))
        if len(set(names)) < len(names):
            first = dict[str, int]()
            for index, name in zip(indices, names, strict=True):
                pair = first.setdefault(name, index), index
                if len({*self.store.origins(self.rows_of(pair).tolist())}) > 1:
                    text = f"images {pair[0]} and {index} (counted from 0) are both named {brief(name, 200)}"
                    advice = "rename one of them; addresses must differ before the question mark"
                    raise ValueError(f"{text}: {advice}")
        return names

    def full_name(self, index: int) -> str:
        """Return the name as it is stored: to look it up in a file, not to show or write."""
        return self.names(int(self.rows[index]))

    def codes(self, indices: Indices | None = None) -> NDArray[np.int32]:
        """Return the codes of the labels of some images, or of all, by `labels`; −1: no label."""
        return self.labels.codes(self.rows_of(indices))

    def label(self, index: int) -> int | None:
        """Return the code of the label of an image."""
        code = int(self.codes([index])[0])
        return None if code < 0 else code

    def split_sizes(self) -> dict[str, int]:
        """Return how many images each split has."""
        codes = self.splits.codes(self.rows_of()) if self.splits.names else np.empty(0, np.int32)
        return {name: int((codes == code).sum()) for code, name in enumerate(self.splits.names)}

    def split(self, name: str) -> NDArray[np.int64]:
        """Return the indices of the images of a split."""
        codes = self.splits.codes(self.rows_of())
        return np.flatnonzero(codes == self.splits.names.index(name))

    def rows_of(self, indices: Indices | None = None) -> NDArray[np.int64]:
        """Return the rows of some images, or of all, in the store."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, np.int64)
        return chosen if isinstance(self.rows, range) else self.rows[chosen]

    def origins(self) -> list[Hashable]:
        """Return for each image what is the same for it in other sets, whatever paths lead there."""
        return self.store.origins(map(int, self.rows))

    def describe(self) -> str:
        """Say what a process sees, so that others can be compared with it."""
        return f"{plural(len(self), 'image')} ({self.fingerprint})"

    def subset(self, indices: Indices) -> "ImageSet":
        """Return the images at some indices."""
        chosen = np.ascontiguousarray(indices, dtype="<i8")
        digest = hashlib.sha256(chosen.tobytes()).hexdigest()
        return replace(
            self,
            rows=self.rows_of(chosen),
            fingerprint=f"{self.fingerprint}-{len(chosen)}-{digest[:16]}",
        )

    def with_labels(self, labels: Labels) -> "ImageSet":
        """Return the same images with other labels, given by image."""
        if not isinstance(self.rows, range):
            by_row = np.full(self.rows.max(initial=-1) + 1, -1, np.int32)
            by_row[self.rows] = labels.codes(np.arange(len(self)))
            labels = replace(labels, codes=by_row.take)
        return replace(self, labels=labels)

    @property
    def shards(self) -> "Shards | None":
        """Return the shards of all images; a part of a set has none."""
        return self.store.shards if isinstance(self.rows, range) else None

    @property
    def parts(self) -> Sequence["ImageSet"]:
        """Return the sets of several sources, or this one."""
        return self.store.parts if isinstance(self.rows, range) and self.store.parts else [self]


def evenly_spaced(length: int, count: int) -> list[int]:
    """Return `count` different indices from all over a source of some length; all if it is shorter.

    Steps of the golden ratio share no rhythm with a sorted source, as every n-th index might.
    """
    if count >= length:
        return list(range(length))
    golden, indices, number = (5**0.5 - 1) / 2, set[int](), 0
    while len(indices) < count:  # several steps may fall on one index
        indices.add(int(length * (number * golden % 1)))
        number += 1
    return sorted(indices)


def random_indices(source: ImageSet, seed: int) -> list[int]:
    """Return the indices of a source in a random order; of a very large one some of them."""
    if len(source) > MANY:
        drawn = random_bits(seed, RngPurpose.EVALUATION, np.arange(DRAWN)) % np.uint64(len(source))
        return list(dict.fromkeys(drawn.tolist()))
    bits = random_bits(seed, RngPurpose.EVALUATION, np.arange(len(source)))
    return np.argsort(bits, kind="stable").tolist()


class JoinedStores(Store):
    """The stores of several sets, the rows of one after those of another."""

    def __init__(self, titles: Sequence[str], parts: Sequence[ImageSet]) -> None:
        self.titles, self.parts = [printable(public(title)) for title in titles], parts
        self.starts = np.concatenate([[0], np.cumsum(list(map(len, parts)))])

    def _locate(self, row: int) -> tuple[int, int]:
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return part, row - int(self.starts[part])

    def read(self, row: int) -> bytes | Tensor:
        part, index = self._locate(row)
        return self.parts[part].read(index)

    def size(self, row: int) -> int:
        part, index = self._locate(row)
        return self.parts[part].size(index)

    def origins(self, rows: Iterable[int]) -> list[Hashable]:
        by_part = [part.origins() for part in self.parts]
        return [by_part[part][index] for part, index in map(self._locate, rows)]

    def name(self, row: int) -> str:
        part, index = self._locate(row)
        return f"{self.titles[part]}/{self.parts[part].name(index)}"

    def codes(
        self, columns: Sequence[Column], code_of: Sequence[NDArray[np.int32]], rows: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """Return joined codes, given the column of each part and the joined code for each code in it."""
        codes, owners = np.full(np.shape(rows), -1, np.int32), np.searchsorted(self.starts, rows, "right") - 1
        for number in np.unique(owners).tolist():
            mine = owners == number
            own = columns[number].codes(self.parts[number].rows_of(rows[mine] - self.starts[number]))
            codes[mine] = np.append(code_of[number], np.int32(-1))[own]  # the last for −1
        return codes


def _join_labels(store: JoinedStores) -> Labels:
    """Return the labels of several sets: classes are those of the same name; with sets all are sets."""
    columns = [part.labels for part in store.parts]
    of_folders = any(column.of_folders for column in columns)
    if any(column.sets is not None for column in columns):
        columns = [column.as_sets() for column in columns]
    joined, code_of = _join_names(columns)
    if all(column.sets is None for column in columns):
        return Labels(partial(store.codes, columns, code_of), joined, None, of_folders)
    sets = list[NDArray[np.bool_]]()
    for number, column in enumerate(columns):
        assert column.sets is not None
        sets.append(np.zeros((len(column.sets), len(joined)), np.bool_))
        sets[-1][:, code_of[number]] = column.sets
        code_of[number] = np.arange(len(column.sets), dtype=np.int32) + sum(map(len, sets[:-1]))
    return Labels(partial(store.codes, columns, code_of), joined, np.concatenate(sets), of_folders)


def _join_names(columns: Sequence[Column]) -> tuple[tuple[str, ...], list[NDArray[np.int32]]]:
    """Return all names of several columns, and for each column the places of its names among them."""
    names = dict.fromkeys(chain.from_iterable(column.names for column in columns))
    places = {name: place for place, name in enumerate(names)}
    return tuple(names), [np.array([places[name] for name in column.names], np.int32) for column in columns]


def join_sets(titles: Sequence[str], parts: Sequence[ImageSet]) -> ImageSet:
    """Return the images of several sets as one, one set after another; `titles` precede their names."""
    store, splits = JoinedStores(titles, parts), [part.splits for part in parts]
    split_names, split_codes = _join_names(splits)
    stamps = [part.stamp for part in parts]
    digest = hashlib.sha256("\0".join(part.fingerprint for part in parts).encode()).hexdigest()
    return ImageSet(
        store=store,
        rows=range(sum(map(len, parts))),
        names=store.name,
        labels=_join_labels(store),
        splits=Column(partial(store.codes, splits, split_codes), split_names),
        fingerprint=f"joined-{store.starts[-1]}-{digest[:16]}",
        stamp=None if None in stamps else "\0".join(map(str, stamps)),
    )


def with_same_labels(*sets: ImageSet) -> list[ImageSet]:
    """Return sets whose labels are numbered alike, as in one set of all."""
    joined = join_sets([""] * len(sets), sets)
    parts = np.split(joined.codes(), np.cumsum(list(map(len, sets)))[:-1])
    labels = [replace(joined.labels, codes=codes.take) for codes in parts]
    return [each.with_labels(own) for each, own in zip(sets, labels, strict=True)]

"""Several sets of images as one table."""

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.text import printable, public
from dino_vit.data.image_set import ImageSet, Store
from dino_vit.data.labels import Column, Labels


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

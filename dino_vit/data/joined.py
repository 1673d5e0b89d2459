"""Several sets of images as one: all of each, or some shares in an epoch."""

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.text import plural, printable, public
from dino_vit.data.image_set import ImageSet, Mix, Store
from dino_vit.data.labels import Codes, Column, Labels


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

    def origins(self, rows: Iterable[int]) -> list[Hashable]:
        by_part = [part.origins() for part in self.parts]
        return [by_part[part][index] for part, index in map(self._locate, rows)]

    def name(self, row: int) -> str:
        part, index = self._locate(row)
        return f"{self.titles[part]}/{self.parts[part].name(index)}"


@dataclass(frozen=True)
class _JoinedCodes(Codes):
    """The codes of several columns, one after another, as codes of the joined column."""

    starts: NDArray[np.int64]
    parts: Sequence[tuple[Column, ImageSet, NDArray[np.int32]]]  # and the code for each code in it

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        codes, owners = np.full(np.shape(rows), -1, np.int32), np.searchsorted(self.starts, rows, "right") - 1
        for number in np.unique(owners).tolist():
            column, images, code_of = self.parts[number]
            mine = owners == number
            own = column.codes.take(images.rows_of(rows[mine] - self.starts[number]))
            codes[mine] = np.append(code_of, np.int32(-1))[own]  # the last for −1
        return codes


def _join_labels(starts: NDArray[np.int64], parts: Sequence[ImageSet]) -> Labels:
    """Return the labels of several sets: classes are those of the same name; with sets all are sets."""
    columns = [part.labels for part in parts]
    if any(column.sets is not None for column in columns):
        columns = [column.as_sets() for column in columns]
    names = tuple(dict.fromkeys(chain.from_iterable(column.names for column in columns)))
    sets, code_of = list[NDArray[np.bool_]](), list[NDArray[np.int32]]()
    for column in columns:
        places = np.array([names.index(name) for name in column.names], np.int32)
        if column.sets is None:
            code_of.append(places)
            continue
        code_of.append(np.arange(len(column.sets), dtype=np.int32) + sum(map(len, sets)))
        sets.append(np.zeros((len(column.sets), len(names)), np.bool_))
        sets[-1][:, places] = column.sets
    codes = _JoinedCodes(starts, [*zip(columns, parts, code_of, strict=True)])
    return Labels(codes, names, np.concatenate(sets) if sets else None)


def _join_splits(starts: NDArray[np.int64], parts: Sequence[ImageSet]) -> Column:
    names = tuple(dict.fromkeys(chain.from_iterable(part.splits.names for part in parts)))
    code_of = [np.array([names.index(name) for name in part.splits.names], np.int32) for part in parts]
    splits = [part.splits for part in parts]
    return Column(_JoinedCodes(starts, [*zip(splits, parts, code_of, strict=True)]), names)


def join_sets(titles: Sequence[str], parts: Sequence[ImageSet]) -> ImageSet:
    """Return the images of several sets as one, one set after another; `titles` precede their names."""
    store = JoinedStores(titles, parts)
    stamps = [part.stamp for part in parts]
    return ImageSet(
        store=store,
        rows=range(sum(map(len, parts))),
        names=store.name,
        labels=_join_labels(store.starts, parts),
        splits=_join_splits(store.starts, parts),
        fingerprint=_digest("joined", parts, ""),
        stamp=None if None in stamps else "\0".join(map(str, stamps)),
    )


def mix_sets(
    names: Sequence[str], parts: Sequence[ImageSet], shares: Sequence[float] | None = None
) -> ImageSet:
    """Return several sets as one, of which an epoch has some shares.

    It ends when the set that is used up first has been seen once, so no image comes twice in it.
    """
    lengths = list(map(len, parts))
    shares = shares or lengths
    if len(shares) != len(parts):
        given, sources = plural(len(shares), "share"), plural(len(parts), "source")
        raise ValueError(f"data.mix has {given}, data.source {sources}; give one for each")
    rate = min(length / share for length, share in zip(lengths, shares, strict=True))
    counts = [max(1, round(rate * share)) for share in shares]
    joined, titles = join_sets(names, parts), [printable(public(name)) for name in names]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return replace(
        joined, mix=Mix(titles, parts, starts, counts), fingerprint=_digest("mixed", parts, counts)
    )


def _digest(kind: str, parts: Sequence[ImageSet], facts: object) -> str:
    text = "\0".join(part.fingerprint for part in parts)
    digest = hashlib.sha256(f"{text}{facts}".encode()).hexdigest()
    return f"{kind}-{sum(map(len, parts))}-{digest[:16]}"

"""A set of images, wherever they are stored; parts of one, and several in one."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.text import plural, printable, public
from dino_vit.data.shards import Shards

Indices = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The images of each shard, in some bytes a shard where a source has them shard by shard."""

    starts: NDArray[np.int64]  # (shards + 1,), where the images of each begin
    images: NDArray[np.int64] | None = None  # all images, shard by shard; None: the source has them so

    @classmethod
    def of(cls, shards: NDArray[np.integer[Any]], count: int = 0) -> "ShardLayout":
        """Return the layout of images whose shards are given, of at least `count` shards."""
        starts = np.concatenate([[0], np.cumsum(np.bincount(shards, minlength=count))])
        in_order = bool((shards[1:] >= shards[:-1]).all())
        return cls(starts, None if in_order else np.argsort(shards, kind="stable"))

    def __len__(self) -> int:
        """Return the number of images."""
        return int(self.starts[-1])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Return how many images each shard has."""
        return np.diff(self.starts)

    def members(self, shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images of some shards."""
        sizes = self.starts[shards + 1] - self.starts[shards]
        before = np.cumsum(sizes) - sizes
        rows = np.arange(sizes.sum()) + np.repeat(self.starts[shards] - before, sizes)
        return rows if self.images is None else self.images[rows]

    def shards(self, images: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shard of each of some images."""
        if self.images is None:
            return np.searchsorted(self.starts, images, side="right") - 1
        by_image = np.empty(len(self), dtype=np.int64)
        by_image[self.images] = np.repeat(np.arange(len(self.starts) - 1), self.sizes)
        return by_image[images]


class Store(ABC):
    """Where images are stored, each in a row; all that a caller may ask of it."""

    key = ""  # differs between stores whose rows are different images, where these are not files
    root: str | None = None  # the folder of images that are files
    shards: Shards | None = None  # the files that hold many images each

    @abstractmethod
    def read(self, row: int) -> bytes | Tensor:
        """Return the bytes of an image file, or a tensor (C, H, W) of any dtype."""

    @property
    def layout(self) -> ShardLayout | None:
        """Return which rows lie in which shard, if they lie in shards."""
        return None

    def origins(self, rows: Iterable[int]) -> list[Hashable]:
        """Return for each row what is the same for the same image elsewhere: its file and place there."""
        return [(self.key, row) for row in rows]


def unlabelled(_: int) -> int:
    """Return the label of an image that has none."""
    return -1


class Mix(NamedTuple):
    """Several sets of which an epoch has some shares."""

    names: Sequence[str]
    parts: Sequence["ImageSet"]
    starts: NDArray[np.int64]  # (parts + 1,), where the images of each begin
    counts: Sequence[int]  # of an epoch


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageSet:
    """Images with their names, and with labels if they have some.

    Images with names are sorted by the bytes of their names, so that the same images in a folder, list, tar,
    zip or Parquet file have the same indices. Arrays, tables without names and generated images keep theirs.
    Names and labels are functions of a row of the store: an index or a catalogue may hold them.
    """

    store: Store
    rows: range | NDArray[np.int64]  # of the images in the store; a range: all of them
    names: Callable[[int], str]  # as they are stored: of any characters, addresses with their secrets
    labels: Callable[[int], int] = unlabelled  # -1: no label
    classes: Sequence[str] = ()  # the names of the labels
    splits: Mapping[str, range] = field(default_factory=dict)  # the images of each, by the name of its folder
    fingerprint: str  # differs between sets whose indices mean different images, by names and sizes
    # A digest of the size, version and times of each file, as it was opened. Empty: the fingerprint alone
    # identifies the images. None: changes cannot be detected.
    stamp: str | None = None
    mix: Mix | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes | Tensor:
        """Return the bytes of an image file, or a tensor (C, H, W) of any dtype."""
        return self.store.read(int(self.rows[index]))

    def name(self, index: int) -> str:
        """Return the name in a form that can be shown and written: `printable` and `public`."""
        return printable(public(self.full_name(index)))

    def full_name(self, index: int) -> str:
        """Return the name as it is stored: to look it up in a file, not to show or write."""
        return self.names(int(self.rows[index]))

    def label(self, index: int) -> int | None:
        """Return the label: j is called classes[j]."""
        label = self.labels(int(self.rows[index]))
        return None if label < 0 else label

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
            rows=np.asarray(self.rows)[chosen],
            splits={},
            mix=None,
            fingerprint=f"{self.fingerprint}-{len(chosen)}-{digest[:16]}",
        )

    def with_labels(self, numbers: NDArray[np.int32], classes: Sequence[str]) -> "ImageSet":
        """Return the same images with other labels."""
        if not isinstance(self.rows, range):
            by_row = np.full(self.rows.max(initial=-1) + 1, -1, dtype=np.int32)
            by_row[self.rows] = numbers
            numbers = by_row
        return replace(self, labels=numbers.item, classes=classes)

    @property
    def shards(self) -> Shards | None:
        return self.store.shards

    @property
    def layout(self) -> ShardLayout | None:
        """Return which images lie in which shard, if they lie in shards."""
        layout = self.store.layout
        if layout is None or isinstance(self.rows, range):
            return layout
        return ShardLayout.of(layout.shards(self.rows), len(layout.sizes))

    @property
    def parts(self) -> Sequence["ImageSet"]:
        """Return the sets that a run mixes."""
        return self.mix.parts if self.mix else [self]

    @property
    def images_per_epoch(self) -> int:
        return sum(self.mix.counts) if self.mix else len(self)

    def describe_epoch(self) -> str | None:
        """Say what an epoch of a mix is."""
        if not self.mix:
            return None
        total = self.images_per_epoch
        parts = (
            f"{count:,} of the {len(part):,} of {name} ({count / total:.1%})"
            for name, part, count in zip(self.mix.names, self.mix.parts, self.mix.counts, strict=True)
        )
        return f"an epoch is {total:,} images, none of them twice: {', '.join(parts)}"

    def evaluated_part(self) -> tuple["ImageSet", str | None]:
        """Return the set that a run is evaluated on, with its name if it is one of several.

        It is the first with labels, whose splits and classes are its own.
        """
        if not self.mix:
            return self, None
        number = next((number for number, part in enumerate(self.mix.parts) if part.classes), 0)
        return self.mix.parts[number], self.mix.names[number]


class _JoinedStore(Store):
    """The images of several sets, one set after another."""

    def __init__(self, titles: Sequence[str], parts: Sequence[ImageSet]) -> None:
        self.titles, self.parts = [printable(public(title)) for title in titles], parts
        self.starts = np.concatenate([[0], np.cumsum(list(map(len, parts)))])
        self.classes = list(dict.fromkeys(name for part in parts for name in part.classes))

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

    def label(self, row: int) -> int:
        part, index = self._locate(row)
        label = self.parts[part].label(index)
        return -1 if label is None else self.classes.index(self.parts[part].classes[label])


def join_sets(titles: Sequence[str], parts: Sequence[ImageSet]) -> ImageSet:
    """Return the images of several sets as one, one set after another; `titles` precede their names."""
    store = _JoinedStore(titles, parts)
    stamps = [part.stamp for part in parts]
    return ImageSet(
        store=store,
        rows=range(sum(map(len, parts))),
        names=store.name,
        labels=store.label,
        classes=store.classes,
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


def count_shared(source: ImageSet, train: ImageSet) -> int:
    """Return how many images of a source are those of another, whatever paths lead to them."""
    learned = set(train.origins())
    return sum(origin in learned for origin in source.origins())


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

"""The interface of a set of images, parts of one, and several in one."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.text import plural, printable, public, public_names

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy", ".avif", ".heic", ".heif"),
    *(".jp2", ".j2k", ".ppm", ".pgm", ".pbm"),
)
_HIDDEN = re.compile(r"(?:^|/)\.(?!\.?/)")


class Source(Protocol):
    """What the loader and the evaluators need from a set of images.

    Items with names are sorted by the bytes of their names, so that the same images in a folder, list, tar,
    zip or Parquet file are the same items. Arrays, tables without names and generated images keep theirs.
    """

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes | Tensor:
        """Return the bytes of an image file, or a tensor (C, H, W) of any dtype."""

    def label(self, index: int) -> int | None: ...

    def name(self, index: int) -> str:
        """Return the name in a form that can be shown and written: `printable` and `public`."""

    @property
    def classes(self) -> Sequence[str]:
        """Return the names of the labels: label j is called classes[j]."""

    @property
    def fingerprint(self) -> str:
        """Return a text that differs for sources whose indices mean different images, by names and sizes.

        A source that is copied elsewhere keeps it; what changes with each file is a `stamp` (`stamp_of`).
        """


def full_name(source: Source, index: int) -> str:
    """Return the name with the secrets of its address: to look it up in a file, not to show or write it."""
    found: str = getattr(source, "full_name", source.name)(index)
    return found


class Subset:
    """The items of a source at the given indices."""

    def __init__(self, source: Source, indices: Sequence[int] | NDArray[np.int64]) -> None:
        self.source, self.indices = source, indices
        self.classes: Sequence[str] = source.classes

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> bytes | Tensor:
        return self.source.read(int(self.indices[index]))

    def label(self, index: int) -> int | None:
        return self.source.label(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def full_name(self, index: int) -> str:
        return full_name(self.source, int(self.indices[index]))

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.indices, dtype="<i8").tobytes()).hexdigest()
        return f"{self.source.fingerprint}-{len(self)}-{digest[:16]}"


def stamp_of(source: Source) -> str | None:
    """Return a digest of the size, version and times of each file of a source, as it was opened.

    It is empty where the fingerprint alone identifies the images, which a source must say: its `stamp` is "".
    None: changes cannot be detected.
    """
    return getattr(unwrapped(source), "stamp", None)


def describe_images(source: Source) -> str:
    """Say what a process sees, so that others can be compared with it."""
    return f"{plural(len(source), 'image')} ({source.fingerprint})"


def unwrapped(source: Source) -> Source:
    """Return the source whose images a subset has, or one with other labels."""
    while isinstance(source, Subset):
        source = source.source
    return source


class Joined:
    """The images of several sources, one source after another."""

    def __init__(self, names: Sequence[str], parts: Sequence[Source]) -> None:
        self.names, self.parts = list(map(printable, public_names(names))), parts
        self._full_names = list(map(printable, names))
        self.starts = np.concatenate([[0], np.cumsum(list(map(len, parts)))])
        self.classes: Sequence[str] = list(dict.fromkeys(name for part in parts for name in part.classes))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, index: int) -> bytes | Tensor:
        part, row = self._locate(index)
        return self.parts[part].read(row)

    def label(self, index: int) -> int | None:
        part, row = self._locate(index)
        label = self.parts[part].label(row)
        return None if label is None else self.classes.index(self.parts[part].classes[label])

    def name(self, index: int) -> str:
        part, row = self._locate(index)
        return f"{self.names[part]}/{self.parts[part].name(row)}"

    def full_name(self, index: int) -> str:
        part, row = self._locate(index)
        return f"{self._full_names[part]}/{full_name(self.parts[part], row)}"

    @property
    def fingerprint(self) -> str:
        return self._digest("joined", "")

    def _digest(self, kind: str, facts: object) -> str:
        text = "\0".join(part.fingerprint for part in self.parts)
        return f"{kind}-{len(self)}-{hashlib.sha256(f'{text}{facts}'.encode()).hexdigest()[:16]}"

    @property
    def stamp(self) -> str | None:
        stamps = list(map(stamp_of, self.parts))
        return None if None in stamps else "\0".join(map(str, stamps))

    def _locate(self, index: int) -> tuple[int, int]:
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return part, index - int(self.starts[part])


class MixedSource(Joined):
    """Several sources of which an epoch has some shares.

    It ends when the source that is used up first has been seen once, so no image comes twice in it.
    """

    def __init__(
        self, names: Sequence[str], parts: Sequence[Source], shares: Sequence[float] | None = None
    ) -> None:
        super().__init__(names, parts)
        lengths = list(map(len, parts))
        shares = shares or lengths
        if len(shares) != len(parts):
            given, sources = plural(len(shares), "share"), plural(len(parts), "source")
            raise ValueError(f"data.mix has {given}, data.source {sources}; give one for each")
        rate = min(length / share for length, share in zip(lengths, shares, strict=True))
        self.counts = [max(1, round(rate * share)) for share in shares]  # of an epoch
        self.images_per_epoch = sum(self.counts)

    @property
    def fingerprint(self) -> str:
        return self._digest("mixed", self.counts)

    def describe_epoch(self) -> str:
        """Say what an epoch is."""
        parts = (
            f"{count:,} of the {len(part):,} of {name} ({count / self.images_per_epoch:.1%})"
            for count, part, name in zip(self.counts, self.parts, self.names, strict=True)
        )
        return f"an epoch is {self.images_per_epoch:,} images, none of them twice: {', '.join(parts)}"


def parts_of(source: Source) -> Sequence[Source]:
    """Return the sources that a run mixes."""
    return source.parts if isinstance(source, MixedSource) else [source]


def images_per_epoch(source: Source) -> int:
    return source.images_per_epoch if isinstance(source, MixedSource) else len(source)


def evaluated_part(source: Source) -> tuple[Source, str | None]:
    """Return the source that a run is evaluated on, with its name if it is one of several.

    It is the first with labels, whose splits and classes are its own.
    """
    if not isinstance(source, MixedSource):
        return source, None
    number = next((number for number, part in enumerate(source.parts) if part.classes), 0)
    return source.parts[number], source.names[number]


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
        of_all = np.empty(len(self), dtype=np.int64)
        of_all[self.images] = np.repeat(np.arange(len(self.starts) - 1), self.sizes)
        return of_all[images]


def suffix_of(name: str) -> str:
    """Return the suffix of a name in lower case, of an address without its query."""
    return os.path.splitext(public(name))[1].lower()


def folder_of(path: str) -> str:
    """Return the folder of a file, of an address without its query, which may have slashes."""
    if path.lower().startswith(("http://", "https://")):
        path = path.partition("?")[0]
    return os.path.dirname(path)


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the names of files, or where some are equal, their paths below the folder that all share."""
    paths = list(map(public, paths))
    names = [os.path.basename(path) for path in paths]
    if len({*names}) == len(names):
        return names
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, shared) for path in paths]


def is_image(name: str | bytes) -> bool:
    """Tell whether this is the name of an image file that is not hidden, nor in a hidden folder."""
    text = os.fsdecode(name)
    return suffix_of(text) in IMAGE_SUFFIXES and not _HIDDEN.search(text)


def spread(length: int, count: int) -> list[int]:
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

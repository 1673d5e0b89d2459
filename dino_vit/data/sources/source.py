"""The interface of a set of images, and parts of one."""

import hashlib
import os
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
        """Return the name in a form that can be shown and written: `printable`."""

    @property
    def classes(self) -> Sequence[str]:
        """Return the names of the labels: label j is called classes[j]."""

    @property
    def fingerprint(self) -> str:
        """Return a text that differs for sources whose indices mean different images, by names and sizes.

        A source that is copied elsewhere keeps it; what changes with each file is a `stamp` (`stamp_of`).
        """


class Subset:
    """The items of a source at the given indices."""

    def __init__(self, source: Source, indices: Sequence[int] | NDArray[np.int64]) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> bytes | Tensor:
        return self.source.read(int(self.indices[index]))

    def label(self, index: int) -> int | None:
        return self.source.label(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    @property
    def classes(self) -> Sequence[str]:
        return self.source.classes

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.indices, dtype="<i8").tobytes()).hexdigest()
        return f"{self.source.fingerprint}-{len(self)}-{digest[:16]}"


def stamp_of(source: Source) -> str | None:
    """Return a digest of the size, version and times of each file of a source, as it was opened.

    Where the fingerprint alone identifies the images, it is empty. None: nothing tells whether they changed.
    """
    while isinstance(source, Subset):
        source = source.source
    return getattr(source, "stamp", "")


def suffix_of(name: str) -> str:
    """Return the suffix of a name in lower case."""
    return os.path.splitext(name)[1].lower()


def is_image(name: str | bytes) -> bool:
    """Tell whether this is the name of an image file that is not hidden, nor in a hidden folder."""
    text = os.fsdecode(name)
    return suffix_of(text) in IMAGE_SUFFIXES and not _HIDDEN.search(text)


def spread(length: int, count: int) -> list[int]:
    """Return up to `count` different indices from all over a source of some length.

    Steps of the golden ratio share no rhythm with a sorted source, as every n-th index might.
    """
    if count >= length:
        return list(range(length))
    golden = (5**0.5 - 1) / 2
    return sorted({int(length * (number * golden % 1)) for number in range(count)})

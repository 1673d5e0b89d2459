"""What a set of images is to everything that reads one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy")
_HIDDEN = re.compile(r"(?:^|/)\.(?!\.?/)")


class Source(Protocol):
    """What the loader and the evaluators need from a set of images.

    Where items have names they come in the order of the names' bytes, so that the same images as folder,
    list, tar, zip or Parquet are the same items; arrays, nameless tables and generated sets keep their own.
    """

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes | Tensor:
        """Return the bytes of an image file, or a tensor (C, H, W) of any dtype."""

    def label(self, index: int) -> int | None: ...

    def name(self, index: int) -> str: ...

    @property
    def classes(self) -> Sequence[str]:
        """Return the names of the labels: label j is called classes[j]."""

    @property
    def fingerprint(self) -> str:
        """Return a text that differs for sets whose indices mean different images."""


def is_image(name: str | bytes) -> bool:
    """Tell whether a name is that of an image file which is not hidden, nor in a hidden folder."""
    text = os.fsdecode(name)
    return os.path.splitext(text)[1].lower() in IMAGE_SUFFIXES and not _HIDDEN.search(text)


def spread(length: int, count: int) -> list[int]:
    """Return up to `count` different indices from all over a source of some length.

    Steps of the golden ratio share no rhythm with a sorted source, as every n-th index might.
    """
    if count >= length:
        return list(range(length))
    golden = (5**0.5 - 1) / 2
    return sorted({int(length * (number * golden % 1)) for number in range(count)})

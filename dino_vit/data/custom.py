"""A source of the user's own: an object with `read(i)` and `name(i)`, or a PyTorch Dataset."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image
from torch import Tensor

from dino_vit.config.objects import title_of
from dino_vit.core.text import printable
from dino_vit.data.images import formats
from dino_vit.data.images.pixels import MAX_PIXELS
from dino_vit.data.labels import number_labels


class CustomSource:
    """Wrap an object with a length, and `read(i)` or `object[i]`, which return an image.

    An image is the bytes of a file, a path, a Pillow image, an array (H, W, C) or a tensor (C, H, W); of a
    tuple the first. It must be the same at every call. `name(i)`, `label(i)`, `targets`, `classes` and
    `fingerprint` are used where the object has them.
    """

    def __init__(self, given: Any) -> None:
        if not hasattr(given, "__len__") or not (hasattr(given, "read") or hasattr(given, "__getitem__")):
            raise ValueError(
                f"{title_of(given)} is not a source of images: it needs __len__, and read(i) or [i]"
            )
        self.given = given
        if not len(self):
            raise ValueError(f"{title_of(given)} has no images")
        labels = number_labels(self._labels())
        self._numbers = labels.numbers
        self.classes: Sequence[str] = tuple(getattr(given, "classes", None) or labels.classes)
        self.fingerprint: str = getattr(given, "fingerprint", None) or self._digest()

    def __len__(self) -> int:
        return len(self.given)

    def read(self, index: int) -> bytes | Tensor:
        item = self.given.read(index) if hasattr(self.given, "read") else self.given[index]
        if isinstance(item, tuple):
            item = item[0]
        if isinstance(item, str | os.PathLike):
            return Path(item).read_bytes()
        if isinstance(item, Image):
            return formats.by_pillow(item, alpha=True, max_pixels=MAX_PIXELS)
        if isinstance(item, np.ndarray):
            return formats.from_array(item)
        if isinstance(item, bytes | Tensor):
            return item
        raise ValueError(f"it is of the type {type(item).__name__}, which is no image")

    def label(self, index: int) -> int | None:
        number = int(self._numbers[index])
        return None if number < 0 else number

    def name(self, index: int) -> str:
        return printable(self.given.name(index)) if hasattr(self.given, "name") else str(index)

    @property
    def title(self) -> str:
        """What tells this source from others, such as another part of the same data set."""
        digest = hashlib.sha256(self.fingerprint.encode()).hexdigest()
        return f"{title_of(self.given)}-{digest[:12]}"

    def _labels(self) -> list[object]:
        if hasattr(self.given, "label"):
            return [self.given.label(index) for index in range(len(self))]
        return list(getattr(self.given, "targets", None) or [None] * len(self))

    def _digest(self) -> str:
        """Return a digest of the names; without names other images of the same number look the same."""
        names = "\n".join(self.name(index) for index in range(len(self)))
        return f"{title_of(self.given)}-{hashlib.sha256(names.encode()).hexdigest()[:32]}"

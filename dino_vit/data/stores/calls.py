"""Images that a function returns, given their row; such as those of an array, mapped into memory."""

import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.text import brief, public
from dino_vit.data.image_set import ImageSet, Store
from dino_vit.data.images.formats import from_array
from dino_vit.data.remote import file_signature, is_url

FINGERPRINTED = 64  # images whose pixels go into the fingerprint, as sizes say nothing here


class Calls(Store):
    """Images that a function returns; `key` differs between functions of different images."""

    def __init__(self, function: Callable[[int], bytes | Tensor], key: str) -> None:
        self.function, self.key = function, key

    def read(self, row: int) -> bytes | Tensor:
        return self.function(row)

    def origins(self, rows: Iterable[int]) -> list[Hashable]:
        return [(self.key, row) for row in rows]


class _Array:
    """The images of an array: (N, H, W), (N, H, W, C) or (N, C, H, W)."""

    def __init__(self, path: str) -> None:
        self.path, self.images = path, _load(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Array, (self.path,)  # NumPy would pickle the pixels

    def read(self, row: int) -> Tensor:
        return from_array(np.array(self.images[row]))

    def fingerprint(self) -> str:
        count = len(self.images)
        digest = hashlib.sha256(f"{self.images.shape} {self.images.dtype.str}".encode())
        for row in np.linspace(0, count - 1, min(FINGERPRINTED, count)).astype(int).tolist():
            digest.update(np.ascontiguousarray(self.images[row]).data)
        return f"array-{count}-{digest.hexdigest()[:16]}"


def open_array(path: str) -> ImageSet:
    """Open the images of an array."""
    if is_url(path):
        raise ValueError(f"{public(path)} is remote, but arrays are mapped into memory: copy it here first.")
    array = _Array(path)
    fingerprint = array.fingerprint()
    return ImageSet(
        store=Calls(array.read, fingerprint),
        rows=range(len(array.images)),
        names="{:09d}".format,
        fingerprint=fingerprint,
        stamp=str(file_signature(path)),
    )


def _load(path: str) -> NDArray[Any]:
    """Map an array of images into memory."""
    try:
        images = open_memmap(path, mode="r")
        from_array(np.array(images[0]))  # raises an error if it is no image
    except OSError:
        raise
    except Exception as error:  # Python's parser, which reads the header, has errors of its own
        raise ValueError(f"{path} is damaged or not an array of images: {brief(error, 300)}") from error
    return images

"""Images that a function returns, given their row; such as those of an array, mapped into memory."""

import hashlib
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache, partial
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


def open_array(path: str) -> ImageSet:
    """Open the images of an array: (N, H, W), (N, H, W, C) or (N, C, H, W)."""
    if is_url(path):
        raise ValueError(f"{public(path)} is remote, but arrays are mapped into memory: copy it here first.")
    stamp = str(file_signature(path))
    images = _map(path, stamp)
    digest = hashlib.sha256(f"{images.shape} {images.dtype.str}".encode())
    for row in np.linspace(0, len(images) - 1, min(FINGERPRINTED, len(images))).astype(int).tolist():
        digest.update(np.ascontiguousarray(images[row]).data)
    fingerprint = f"array-{len(images)}-{digest.hexdigest()[:16]}"
    return ImageSet(
        store=Calls(partial(_read, path, stamp), fingerprint),
        rows=range(len(images)),
        names="{:09d}".format,
        fingerprint=fingerprint,
        stamp=stamp,
    )


def _read(path: str, stamp: str, row: int) -> Tensor:
    return from_array(np.array(_map(path, stamp)[row]))


@lru_cache(16)
def _map(path: str, stamp: str) -> NDArray[Any]:
    """Map an array of images into memory."""
    try:
        images = open_memmap(path, mode="r")
        from_array(np.array(images[0]))  # raises an error if it is no image
    except OSError:
        raise
    except Exception as error:  # Python's parser, which reads the header, has errors of its own
        raise ValueError(f"{path} is damaged or not an array of images: {brief(error, 300)}") from error
    return images

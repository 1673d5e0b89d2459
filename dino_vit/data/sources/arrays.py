"""Images in one array of a .npy or .npz file: (N, H, W), (N, H, W, C) or (N, C, H, W).

A .npy file is mapped into memory; the array of a .npz file is read into it, which worker processes share.
"""

import hashlib
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.text import brief, printable, public, public_names
from dino_vit.data.image_set import ImageSet, Store
from dino_vit.data.labels import Labels, number_labels
from dino_vit.data.limits import open_regular
from dino_vit.data.sources.files import file_signature, is_url

FINGERPRINTED = 64  # images whose pixels go into the fingerprint, as sizes say nothing here


class ArrayStore(Store):
    """The images of one array, read as values of one type."""

    def __init__(self, path: str, key: str | None = None, dtype: np.dtype[Any] | None = None) -> None:
        self.path, self.array_name = path, key
        arrays = _load(path)
        self.images = _choose(path, arrays, key)
        self.labels = _labels(path, arrays, len(self.images))
        self.channels_last = _channels_last(path, self.images.shape)
        self.dtype = dtype or _narrowest(path, self.images)
        self.key = _fingerprint(self.images)

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayStore, (self.path, self.array_name, self.dtype)  # NumPy would pickle the pixels

    def read(self, row: int) -> Tensor:
        image = self.images[row]
        if image.ndim == 2:
            image = image[None]
        elif self.channels_last:
            image = np.moveaxis(image, -1, 0)
        return torch.from_numpy(np.array(image, dtype=self.dtype, order="C"))


def open_array(path: str, key: str | None = None) -> ImageSet:
    """Open the images of an array; another array of the same length in a .npz holds their labels."""
    if is_url(path):
        raise ValueError(f"{public(path)} is remote, but arrays are mapped into memory: copy it here first.")
    store = ArrayStore(path, key)
    return ImageSet(
        store=store,
        rows=range(len(store.images)),
        names="{:09d}".format,
        labels=store.labels.numbers.item,
        classes=list(map(printable, public_names(store.labels.classes))),
        fingerprint=store.key,
        stamp=str(file_signature(path)),
    )


def _fingerprint(images: NDArray[Any]) -> str:
    count = len(images)
    digest = hashlib.sha256(f"{images.shape} {images.dtype.str}".encode())
    for row in np.linspace(0, count - 1, min(FINGERPRINTED, count)).astype(int).tolist():
        digest.update(np.ascontiguousarray(images[row]).data)
    return f"array-{count}-{digest.hexdigest()[:16]}"


def _load(path: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file by name; the one of a .npy, which has no name, is mapped into memory."""
    open_regular(path).close()
    try:
        if not zipfile.is_zipfile(path):
            return {"": open_memmap(path, mode="r")}
        arrays = {}
        with np.load(path) as file:
            for name in file:
                with suppress(ValueError):  # of Python objects, such as names of files
                    arrays[name] = file[name]
        return arrays
    except OSError:
        raise
    except Exception as error:  # zipfile and the decompressors raise nearly anything
        raise ValueError(f"{path} is damaged or holds no plain arrays: {brief(error, 300)}") from error


def _choose(path: str, arrays: Mapping[str, NDArray[Any]], key: str | None) -> NDArray[Any]:
    """Return the array of images: the one of the given name, or the only one with three or four axes."""
    candidates = [name for name, array in arrays.items() if array.ndim in (3, 4)]
    chosen = candidates if key is None else [name for name in candidates if name == key]
    if len(chosen) != 1:
        shapes = ", ".join(f"{brief(name) or 'one'} {array.shape}" for name, array in arrays.items())
        ways = ", ".join(f"{path}:{name}" for name in candidates)
        advice = f": choose one of {ways}" if ways and key is None else ""
        text = "must have one array of images, (N, H, W), (N, H, W, C) or (N, C, H, W), but has"
        raise ValueError(f"{path} {text} {shapes}{advice}")
    images = arrays[chosen[0]]
    if images.dtype.kind not in "uif" or images.dtype.itemsize > 8 or not images.size:
        text = f"not {images.dtype} of shape {images.shape}"
        raise ValueError(f"{path}: images must be integers or floats, {text}")
    return images


def _narrowest(path: str, images: NDArray[Any]) -> np.dtype[Any]:
    """Return the type to read images as: integers of 32 and 64 bits, which lists become, by their values.

    It is one for all images, so that a dark one stays dark.
    """
    native = images.dtype.newbyteorder("=")
    if native.kind == "f" or native.itemsize <= 2 or images.min() < 0:
        return native
    highest = images.max()
    dtype = next((np.dtype(name) for name in ("uint8", "uint16") if highest <= np.iinfo(name).max), native)
    if dtype != native:
        log.warning("%s: %s values up to %d are read as %s", path, native, highest, dtype)
    return dtype


def _channels_last(path: str, shape: tuple[int, ...]) -> bool:
    """Tell where the channels are: on the shorter of the first and last axis of an image."""
    if len(shape) == 3:
        return False
    _, first, middle, last = shape
    if last < min(first, middle):
        return True
    if first < min(middle, last):
        return False
    raise ValueError(f"{path}: cannot tell which axis of {shape} has the channels; let it be the shortest")


def _labels(path: str, arrays: Mapping[str, NDArray[Any]], count: int) -> Labels:
    candidates = [name for name, array in arrays.items() if array.shape in ((count,), (count, 1))]
    if len(candidates) > 1:
        log.warning("%s: no labels, as they could be any of %s", path, ", ".join(candidates))
    elif candidates:
        return number_labels(arrays[candidates[0]].flatten().tolist())
    return number_labels([None] * count)

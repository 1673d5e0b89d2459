"""Images in one array of a .npy or .npz file: (N, H, W), (N, H, W, C) or (N, C, H, W).

A .npy file is mapped into memory; the array of a .npz file is unpacked into the index, which is.
"""

import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.text import brief
from dino_vit.data.labels import Labels, number_labels
from dino_vit.data.sources.files import is_url
from dino_vit.data.sources.index import IndexContents, IndexedSource, WriteImages, open_index

BATCH_BYTES = 2**26  # of images that are unpacked together
FINGERPRINTED = 64  # images whose pixels go into the fingerprint, as sizes say nothing here


class ArraySource(IndexedSource):
    """The images of one array; another array of the same length in a .npz holds their labels."""

    def __init__(self, path: str, key: str | None = None) -> None:
        if is_url(path):
            raise ValueError(f"{path} is remote, but arrays are mapped into memory: copy it here first.")
        self._path, self._key = path, key
        self._mapped: NDArray[Any] | None = None
        super().__init__(open_index("array", f"{path}:{key}" if key else path, self._build, [path]))

    def read(self, index: int) -> Tensor:
        metadata = self.index.metadata
        if self.index.images is not None:
            flat = np.frombuffer(self.index.images[index].as_buffer(), metadata["dtype"])
            image = flat.reshape(metadata["shape"])
        else:
            if self._mapped is None:
                self._mapped = npy.open_memmap(self._path, mode="r")
            image = self._mapped[index]
        if image.ndim == 2:
            image = image[None]
        elif metadata["channels_last"]:
            image = np.moveaxis(image, -1, 0)
        return torch.from_numpy(np.array(image, dtype=image.dtype.newbyteorder("="), order="C"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}

    def _build(self, write_images: WriteImages) -> IndexContents:
        headers = _read_headers(self._path)
        name = _choose(self._path, headers, self._key)
        images = _load(self._path, name)
        count = len(images)
        digest = hashlib.sha256(f"{images.shape} {images.dtype.str}".encode())
        for row in np.linspace(0, count - 1, min(FINGERPRINTED, count)).astype(int).tolist():
            digest.update(np.ascontiguousarray(images[row]).data)
        if name:  # of a .npz
            _write(images, write_images)
        return IndexContents(
            names=[b"%09d" % number for number in range(count)],
            sizes=np.full(count, images.nbytes // count, dtype=np.int64),
            labels=_labels(self._path, headers, count),
            metadata={
                "fingerprint": f"array-{count}-{digest.hexdigest()[:16]}",
                "shape": images.shape[1:],
                "dtype": images.dtype.str,
                "channels_last": _channels_last(self._path, images.shape),
            },
        )


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _read_headers(path: str) -> dict[str, _Header]:
    """Return the shapes and types of the arrays in a file by name; the one of a .npy has no name."""
    with _reading(path):
        if not zipfile.is_zipfile(path):
            array = npy.open_memmap(path, mode="r")
            return {"": _Header(array.shape, array.dtype)}
        headers = {}
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                with archive.open(info) as member:
                    version = npy.read_magic(member)
                    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                    shape, _, dtype = read(member)
                    headers[info.filename.removesuffix(".npy")] = _Header(shape, dtype)
        return headers


def _load(path: str, name: str) -> NDArray[Any]:
    """Return an array; the one of a .npy, which has no name, is mapped into memory."""
    with _reading(path):
        if not name:
            return npy.open_memmap(path, mode="r")
        with np.load(path) as arrays:
            return arrays[name]


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # zipfile and the decompressors raise nearly anything
        raise ValueError(f"{path} is damaged or holds no plain arrays: {brief(error, 300)}") from error


def _write(images: NDArray[Any], write_images: WriteImages) -> None:
    """Write images in batches."""
    each = images.nbytes // len(images)
    rows = max(BATCH_BYTES // each, 1)
    for start in range(0, len(images), rows):
        batch = images[start : start + rows]
        buffers = [None, pa.py_buffer(np.arange(len(batch) + 1) * each), pa.py_buffer(batch.tobytes())]
        write_images(pa.Array.from_buffers(pa.large_binary(), len(batch), buffers))


def _choose(path: str, headers: Mapping[str, _Header], key: str | None) -> str:
    """Return the name of the array of images: the given one, or the only one with three or four axes."""
    candidates = [name for name, header in headers.items() if len(header.shape) in (3, 4)]
    chosen = candidates if key is None else [name for name in candidates if name == key]
    if len(chosen) != 1:
        shapes = ", ".join(f"{brief(name) or 'one'} {header.shape}" for name, header in headers.items())
        ways = ", ".join(f"{path}:{name}" for name in candidates)
        advice = f": choose one of {ways}" if ways and key is None else ""
        text = "must have one array of images, (N, H, W), (N, H, W, C) or (N, C, H, W), but has"
        raise ValueError(f"{path} {text} {shapes}{advice}")
    (name,) = chosen
    shape, dtype = headers[name]
    if dtype.kind not in "uif" or dtype.itemsize > 8 or 0 in shape:
        raise ValueError(f"{path}: images must be integers or floats, not {dtype} of shape {shape}")
    return name


def _channels_last(path: str, shape: tuple[int, ...]) -> bool:
    """Tell where the channels are: on the shorter of the first and last axis of an image."""
    if len(shape) == 3:
        return False
    _, first, middle, last = shape
    if last < min(first, middle):
        return True
    if first < min(middle, last):
        return False
    raise ValueError(
        f"{path}: cannot tell which axis of {shape} has the channels; it must be the shortest of an image"
    )


def _labels(path: str, headers: Mapping[str, _Header], count: int) -> Labels:
    candidates = [name for name, header in headers.items() if header.shape in ((count,), (count, 1))]
    if len(candidates) > 1:
        log.warning("%s: no labels, as they could be any of %s", path, ", ".join(candidates))
    elif candidates and headers[candidates[0]].dtype.hasobject:
        log.warning("%s: no labels, as %s holds Python objects", path, brief(candidates[0]))
    elif candidates:
        return number_labels(_load(path, candidates[0]).flatten().tolist())
    return number_labels([None] * count)

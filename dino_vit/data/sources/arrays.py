"""Images in one array of a .npy or .npz file, mapped into memory: (N, H, W), (N, H, W, C) or (N, C, H, W)."""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.data.labels import Labels, number_labels
from dino_vit.data.sources.archives import member_start
from dino_vit.data.sources.files import is_url, stamps
from dino_vit.data.sources.index import Draft, Sink, open_index
from dino_vit.data.sources.indexed import IndexedSource, draft_items

log = logging.getLogger("dino_vit")

PIECE = 2**24  # bytes unpacked at a time
INSPECTED = 64  # images whose pixels stand for all in the fingerprint


class _Array(NamedTuple):
    """An array in a file: what it holds, and where it begins unless it is compressed."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    offset: int | None


class ArraySource(IndexedSource):
    """Images of one array, in its order; in a .npz an array of as many numbers or texts holds the labels."""

    def __init__(self, path: str, key: str | None = None) -> None:
        if is_url(path):
            raise ValueError(f"{path} is remote, and arrays are mapped into memory: copy it here first.")
        self._path, self._key = path, key
        self._mapped: NDArray[Any] | None = None
        super().__init__(open_index("array", f"{path}:{key}" if key else path, self._build, [path]))

    def read(self, index: int) -> Tensor:
        if self._mapped is None:
            self._mapped = _map(self._path, self.index.metadata, self.index["data"])
        image = self._mapped[self._row(index)]
        if image.ndim == 2:
            image = image[None]
        elif self.index.metadata["channels_last"]:
            image = np.moveaxis(image, -1, 0)
        return torch.from_numpy(np.array(image, dtype=image.dtype.newbyteorder("="), order="C"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}

    def _build(self, sink: Sink) -> Draft:
        before = stamps([self._path])
        arrays = _arrays(self._path)
        key, found = _images(self._path, arrays, self._key)
        metadata = {
            "shape": found.shape,
            "fortran": found.fortran,
            "dtype": found.dtype.str,
            "offset": found.offset,
            "channels_last": _channels_last(self._path, found),
        }
        if found.offset is None:
            _unpack(self._path, key, sink)
        count = found.shape[0]
        size = int(np.prod(found.shape[1:])) * found.dtype.itemsize
        return draft_items(
            names=[b"%09d" % number for number in range(count)],
            sizes=np.full(count, size, dtype=np.int64),
            labels=_labels(self._path, key, arrays, count),
            metadata={"fingerprint": _fingerprint(self._path, key, found), **metadata},
            watched=[self._path],
            stamps=before,
        )


def _map(path: str, metadata: Mapping[str, Any], data: NDArray[np.uint8]) -> NDArray[Any]:
    shape = tuple(metadata["shape"])
    order: Literal["C", "F"] = "F" if metadata["fortran"] else "C"
    if metadata["offset"] is None:
        return data.view(metadata["dtype"]).reshape(shape, order=order)
    return np.memmap(path, np.dtype(metadata["dtype"]), "r", metadata["offset"], shape, order)


def _arrays(path: str) -> dict[str, _Array]:
    """Return what arrays a file holds, by name; the one of a .npy has none."""
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                file.seek(0)
                return {"": _header(file, 0)}
            with zipfile.ZipFile(file) as archive:
                return {
                    info.filename.removesuffix(".npy"): _member(archive, file, info)
                    for info in archive.infolist()
                }
    except (ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is broken or holds no plain arrays: {error}") from error


def _member(archive: zipfile.ZipFile, file: BinaryIO, info: zipfile.ZipInfo) -> _Array:
    with archive.open(info) as member:
        header = _header(member, 0)
    if info.compress_type != zipfile.ZIP_STORED:
        return header._replace(offset=None)
    assert header.offset is not None
    return header._replace(offset=member_start(file, info) + header.offset)


def _header(file: Any, start: int) -> _Array:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return _Array(shape, fortran, dtype, start + file.tell())


def _images(path: str, arrays: Mapping[str, _Array], key: str | None) -> tuple[str, _Array]:
    """Choose the array of images: the one that is asked for, or the only one with three axes or four."""
    candidates = [name for name, array in arrays.items() if len(array.shape) in (3, 4)]
    if key is not None:
        candidates = [name for name in candidates if name == key]
    if len(candidates) != 1:
        known = ", ".join(f"{name or 'one'} {array.shape}" for name, array in arrays.items())
        ways = ", ".join(f"{path}:{name}" for name, array in arrays.items() if len(array.shape) in (3, 4))
        raise ValueError(
            f"{path} must have one array of images, (N, H, W), (N, H, W, C) or (N, C, H, W), but has {known}."
            + (f" Write which: {ways}." if ways and key is None else "")
        )
    (name,) = candidates
    array = arrays[name]
    if array.dtype.kind not in "uif" or 0 in array.shape:
        raise ValueError(
            f"{path}: the array of images has dtype {array.dtype} and shape {array.shape}; "
            f"integers or floats are read."
        )
    return name, array


def _channels_last(path: str, array: _Array) -> bool:
    """Tell where the channels are: on the axis at either end of an image that is shorter than the others."""
    if len(array.shape) == 3:
        return False
    _, first, middle, last = array.shape
    if last < min(first, middle):
        return True
    if first < min(middle, last):
        return False
    raise ValueError(
        f"{path}: which axis of {array.shape} has the channels? It must be shorter than height and width: "
        f"(N, H, W, C) or (N, C, H, W). Save images of one channel as (N, H, W)."
    )


def _unpack(path: str, key: str, sink: Sink) -> None:
    """Decompress the numbers of an array into the index, where they can be mapped."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as member:
        _header(member, 0)
        while piece := member.read(PIECE):
            sink(piece)


def _labels(path: str, key: str, arrays: Mapping[str, _Array], count: int) -> Labels:
    fitting = [
        name for name, array in arrays.items() if name != key and array.shape in ((count,), (count, 1))
    ]
    if len(fitting) > 1:
        log.warning("%s: no labels, as they could be any of %s", path, ", ".join(fitting))
    if len(fitting) != 1:
        return number_labels([None] * count)
    with np.load(path, allow_pickle=False) as file:
        return number_labels(file[fitting[0]].reshape(-1).tolist())


def _fingerprint(path: str, key: str, array: _Array) -> str:
    """Digest shape, type and, as sizes say nothing here, the pixels of some images from all over."""
    digest = hashlib.sha256(f"{array.shape} {array.dtype.str}".encode())
    loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    images = loaded[key] if key else loaded
    for place in np.linspace(0, len(images) - 1, min(INSPECTED, len(images))).astype(int):
        digest.update(np.ascontiguousarray(images[place]).data)
    if os.path.splitext(path)[1].lower() == ".npz":
        loaded.close()
    return f"array-{array.shape[0]}-{digest.hexdigest()[:16]}"

"""Images in one array of a .npy or .npz file: (N, H, W), (N, H, W, C) or (N, C, H, W).

A .npy file is mapped into memory; the array of a .npz file is unpacked into the index, which is.
"""

import hashlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from math import prod
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.progress import plural
from dino_vit.core.text import brief
from dino_vit.data.images.pixels import MAX_PIXELS
from dino_vit.data.labels import Labels, number_labels
from dino_vit.data.npy import Header, map_array, read_header
from dino_vit.data.sources.archives import check_ratio
from dino_vit.data.sources.files import is_url, open_file
from dino_vit.data.sources.index import Draft, IndexedSource, WriteImages, open_index

BATCH_BYTES = 2**26  # of images that are unpacked together
MANY, FEW_PIXELS = 2**20, 64  # more images than this must have so many pixels each
FINGERPRINTED = 64  # images whose pixels go into the fingerprint, as sizes say nothing here


class _Array(NamedTuple):
    header: Header
    available: int  # bytes after the header
    member: zipfile.ZipInfo | None  # of a .npz

    def check(self, name: str) -> None:
        """Refuse an array that is truncated, or that would fill the disk or the memory."""
        if self.header.nbytes > self.available:
            raise OSError(
                f"{name} has {self.available:,} of its {self.header.nbytes:,} bytes, so it is truncated"
            )
        if self.member is not None:
            check_ratio(self.member.compress_size, self.member.file_size, name)


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
                self._mapped = map_array(self._path)
            image = self._mapped[index]
        if image.ndim == 2:
            image = image[None]
        elif metadata["channels_last"]:
            image = np.moveaxis(image, -1, 0)
        return torch.from_numpy(np.array(image, dtype=image.dtype.newbyteorder("="), order="C"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}

    def _build(self, write_images: WriteImages) -> Draft:
        arrays = _read_headers(self._path)
        name = _choose(self._path, {name: array.header for name, array in arrays.items()}, self._key)
        header, _, member = arrays[name]
        arrays[name].check(f"array {brief(name)}" if name else "it")
        count = header.shape[0]
        channels_last = _channels_last(self._path, header.shape)
        digest = hashlib.sha256(f"{header.shape} {header.dtype.str}".encode())
        sampled = np.linspace(0, count - 1, min(FINGERPRINTED, count)).astype(int).tolist()
        if member is None:
            mapped = map_array(self._path)
            for row in sampled:
                digest.update(np.ascontiguousarray(mapped[row]).data)
        else:
            done = 0
            for images in _unpack(self._path, header, member, write_images):
                rows = [row - done for row in sampled if done <= row < done + len(images)]
                digest.update(images[rows].tobytes())
                done += len(images)
        return Draft(
            names=[b"%09d" % number for number in range(count)],
            sizes=np.full(count, header.nbytes // count, dtype=np.int64),
            labels=_labels(self._path, name, arrays),
            metadata={
                "fingerprint": f"array-{count}-{digest.hexdigest()[:16]}",
                "shape": header.shape[1:],
                "dtype": header.dtype.str,
                "channels_last": channels_last,
            },
        )


def _read_headers(path: str) -> dict[str, _Array]:
    """Return the arrays in a file by name, by their headers only; the one of a .npy has no name."""
    try:
        with open_file(path) as file:
            if not zipfile.is_zipfile(file):
                file.seek(0)
                header = read_header(file)
                return {"": _Array(header, os.fstat(file.fileno()).st_size - file.tell(), None)}
        arrays = {}
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                with archive.open(info) as member:
                    header = read_header(member)
                    array = _Array(header, info.file_size - member.tell(), info)
                    arrays[info.filename.removesuffix(".npy")] = array
        return arrays
    except OSError:
        raise
    except Exception as error:  # zipfile and the decompressors raise nearly anything
        raise ValueError(f"{path} is damaged or holds no plain arrays: {brief(error, 300)}") from error


def _unpack(
    path: str, header: Header, member: zipfile.ZipInfo, write_images: WriteImages
) -> Iterator[NDArray[Any]]:
    """Write the images of a member, and yield them in batches; one in Fortran's order is read as a whole."""
    count, each = header.shape[0], header.nbytes // header.shape[0]
    rows = max(BATCH_BYTES // each, 1)
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
        read_header(file)
        whole = np.empty(0)
        if header.fortran:
            data = _read(path, file, header.nbytes)
            whole = np.frombuffer(data, header.dtype).reshape(header.shape, order="F")
        for start in range(0, count, rows):
            batch = min(rows, count - start)
            part = whole[start : start + batch]
            data = part.tobytes() if header.fortran else _read(path, file, batch * each)
            buffers = [None, pa.py_buffer(np.arange(batch + 1) * each), pa.py_buffer(data)]
            write_images(pa.Array.from_buffers(pa.large_binary(), batch, buffers))
            yield np.frombuffer(data, np.uint8).reshape(batch, each)


def _read(path: str, file: IO[bytes], size: int) -> bytes:
    try:
        data = file.read(size)
    except Exception as error:  # as above
        raise ValueError(f"{path} is damaged: {brief(error, 300)}. Copy it again.") from error
    if len(data) < size:
        raise ValueError(f"{path} is damaged: an array ends early. Copy it again.")
    return data


def _choose(path: str, headers: Mapping[str, Header], key: str | None) -> str:
    """Return the name of the array of images: the given one, or the only one with three or four axes."""
    candidates = [name for name, header in headers.items() if len(header.shape) in (3, 4)]
    chosen = candidates if key is None else [name for name in candidates if name == key]
    if len(chosen) != 1:
        known = ", ".join(f"{brief(name) or 'one'} {header.shape}" for name, header in headers.items())
        ways = ", ".join(f"{path}:{name}" for name in candidates)
        raise ValueError(
            f"{path} must have one array of images, (N, H, W), (N, H, W, C) or (N, C, H, W), but has {known}."
            + (f" Choose one of {ways}." if ways and key is None else "")
        )
    (name,) = chosen
    header = headers[name]
    if not header.numeric or 0 in header.shape:
        raise ValueError(
            f"{path}: the array of images has dtype {header.dtype} and shape {header.shape}; "
            f"it must have integers or floats and must not be empty."
        )
    count, pixels = header.shape[0], prod(header.shape[1:])
    if pixels > 4 * MAX_PIXELS:
        raise ValueError(f"{path}: images of shape {header.shape[1:]} are too large")
    if count > MANY and pixels < FEW_PIXELS:
        raise ValueError(
            f"{path} has {count:,} images of {plural(pixels, 'pixel')}, but more than {MANY:,} images must "
            f"have {FEW_PIXELS} pixels or more each."
        )
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
        f"{path}: cannot tell which axis of {shape} has the channels. It must be the shortest: "
        f"(N, H, W, C) or (N, C, H, W). Save images of one channel as (N, H, W)."
    )


def _labels(path: str, key: str, arrays: Mapping[str, _Array]) -> Labels:
    count = arrays[key].header.shape[0]
    fitting = {name: array for name, array in arrays.items() if array.header.shape in ((count,), (count, 1))}
    if len(fitting) > 1:
        log.warning("%s: no labels, as they could be any of %s", path, ", ".join(fitting))
    if len(fitting) != 1:
        return number_labels([None] * count)
    ((name, array),) = fitting.items()
    header, _, member = array
    if header.dtype.hasobject or not header.dtype.itemsize:
        log.warning("%s: no labels, as %s holds Python objects or nothing", path, brief(name))
        return number_labels([None] * count)
    array.check(f"array {brief(name)}")
    assert member is not None
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
        read_header(file)
        data = _read(path, file, header.nbytes)
    return number_labels(np.frombuffer(data, header.dtype).tolist())

"""Images in one array of a .npy or .npz file: (N, H, W), (N, H, W, C) or (N, C, H, W).

A .npy file is mapped into memory; the array of a .npz file is unpacked into the index, which is.
"""

import hashlib
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core import log
from dino_vit.data.labels import Labels, number_labels
from dino_vit.data.sources.files import is_url
from dino_vit.data.sources.index import Draft, IndexedSource, WriteImages, binary_array, open_index

BATCH = 256  # images
FINGERPRINTED = 64  # images whose pixels go into the fingerprint, as sizes say nothing here


class _Header(NamedTuple):
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]


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
                self._mapped = np.load(self._path, mmap_mode="r", allow_pickle=False)
            image = self._mapped[index]
        if image.ndim == 2:
            image = image[None]
        elif metadata["channels_last"]:
            image = np.moveaxis(image, -1, 0)
        return torch.from_numpy(np.array(image, dtype=image.dtype.newbyteorder("="), order="C"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}

    def _build(self, write_images: WriteImages) -> Draft:
        headers = _read_headers(self._path)
        name = _choose(self._path, headers, self._key)
        header = headers[name]
        channels_last = _channels_last(self._path, header.shape)
        file = np.load(self._path, mmap_mode="r", allow_pickle=False)
        images = file[name] if name else file
        if name:
            for start in range(0, len(images), BATCH):
                batch = [image.tobytes() for image in images[start : start + BATCH]]
                write_images(binary_array(batch))
        count = len(images)
        return Draft(
            names=[b"%09d" % number for number in range(count)],
            sizes=np.full(count, images[0].nbytes, dtype=np.int64),
            labels=_labels(self._path, name, headers, file),
            metadata={
                "fingerprint": _fingerprint(images),
                "shape": header.shape[1:],
                "dtype": header.dtype.str,
                "channels_last": channels_last,
            },
        )


def _read_headers(path: str) -> dict[str, _Header]:
    """Return the headers of the arrays in a file by name; the one of a .npy has none."""
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                return {"": _header(file)}
        headers = {}
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    headers[name.removesuffix(".npy")] = _header(member)
        return headers
    except (ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or holds no plain arrays: {error}") from error


def _header(file: Any) -> _Header:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    return _Header(*read(file))


def _choose(path: str, headers: Mapping[str, _Header], key: str | None) -> str:
    """Return the name of the array of images: the given one, or the only one with three or four axes."""
    candidates = [name for name, header in headers.items() if len(header.shape) in (3, 4)]
    chosen = candidates if key is None else [name for name in candidates if name == key]
    if len(chosen) != 1:
        known = ", ".join(f"{name or 'one'} {header.shape}" for name, header in headers.items())
        ways = ", ".join(f"{path}:{name}" for name in candidates)
        raise ValueError(
            f"{path} must have one array of images, (N, H, W), (N, H, W, C) or (N, C, H, W), but has {known}."
            + (f" Choose one of {ways}." if ways and key is None else "")
        )
    (name,) = chosen
    header = headers[name]
    if header.dtype.kind not in "uif" or 0 in header.shape:
        raise ValueError(
            f"{path}: the array of images has dtype {header.dtype} and shape {header.shape}; "
            f"it must have integers or floats and must not be empty."
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


def _labels(path: str, key: str, headers: Mapping[str, _Header], file: Any) -> Labels:
    count = headers[key].shape[0]
    fitting = [name for name, header in headers.items() if header.shape in ((count,), (count, 1))]
    if len(fitting) > 1:
        log.warning("%s: no labels, as they could be any of %s", path, ", ".join(fitting))
    if len(fitting) != 1:
        return number_labels([None] * count)
    return number_labels(file[fitting[0]].reshape(-1).tolist())


def _fingerprint(images: NDArray[Any]) -> str:
    digest = hashlib.sha256(f"{images.shape} {images.dtype.str}".encode())
    for index in np.linspace(0, len(images) - 1, min(FINGERPRINTED, len(images))).astype(int):
        digest.update(np.ascontiguousarray(images[index]).data)
    return f"array-{len(images)}-{digest.hexdigest()[:16]}"

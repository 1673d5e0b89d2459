"""Images that code returns, given their row: of an array, mapped into memory, or of an object of Python."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset as TorchSubset

from dino_vit.config.objects import title_of
from dino_vit.core.text import brief, plural, printable, public
from dino_vit.data.image_set import ImageSet, Store, evenly_spaced
from dino_vit.data.images.decode import from_given
from dino_vit.data.images.formats import from_array
from dino_vit.data.labels import Labels, encode_labels
from dino_vit.data.paths import is_image
from dino_vit.data.remote import file_signature, is_url

FINGERPRINTED = 64  # images of an array whose pixels go into the fingerprint, as sizes say nothing here
OWN_FINGERPRINTED = 4  # images that tell an object from others with the same names
TARGETS = ("targets", "labels", "_labels")  # where data sets, those of torchvision too, keep their labels


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


class _Own:
    """An object with a length, and `read(i)` or `object[i]`, which return an image.

    An image is the bytes of a file, a path, a Pillow image (whose alpha is dropped), an array (H, W, C) or a
    tensor (C, H, W). An item may also be a tuple of an image and its label. It must be the same at every
    call. `name(i)`, `label(i)`, `targets`, `classes` and `fingerprint` are used where the object has them.
    """

    def __init__(self, given: Any) -> None:
        if not hasattr(given, "__len__") or not (hasattr(given, "read") or hasattr(given, "__getitem__")):
            raise ValueError(f"{title_of(given)} is no source of images: give it __len__, and read(i) or [i]")
        if not len(given):
            raise ValueError(f"{title_of(given)} has no images")
        self.given = given

    def read(self, row: int) -> bytes | Tensor:
        read = _method(self.given, "read")
        try:
            item = read(row) if read else self.given[row]
            return from_given(item[0] if isinstance(item, tuple) else item)
        except (OSError, ValueError):
            raise
        except Exception as error:  # of any kind, as the code is not ours; the image counts as unreadable
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def name(self, row: int) -> str:
        samples = getattr(self.given, "samples", None)  # of torchvision's folders: path and class
        if name := _method(self.given, "name"):
            return str(name(row))
        return str(samples[row][0] if isinstance(samples, list) else row)

    def fingerprint(self) -> str:
        """Return the object's own, or a digest of the names and of a few images."""
        if stated := getattr(self.given, "fingerprint", None):
            return str(stated)
        names = [printable(self.name(row)) for row in range(len(self.given))]
        digest = hashlib.sha256("\n".join(names).encode())
        for row in evenly_spaced(len(names), OWN_FINGERPRINTED):
            with suppress(Exception):  # an image that cannot be read is met when it is used
                item = self.read(row)
                digest.update(item if isinstance(item, bytes) else item.contiguous().numpy().tobytes())
        return f"{title_of(self.given)}-{len(names)}-{digest.hexdigest()[:32]}"


def wrap(given: Any) -> ImageSet:
    """Return a data set as images; a part of one has the names and labels of the whole."""
    if isinstance(given, ImageSet):
        return given
    if isinstance(given, TorchSubset) and len(given):
        return wrap(given.dataset).subset(given.indices)
    if hasattr(given, "cast_column"):
        from dino_vit.data.stores.rows import open_dataset  # imports readers of Parquet

        return open_dataset(given)
    own = _Own(given)
    fingerprint = own.fingerprint()
    return ImageSet(
        store=Calls(own.read, fingerprint),
        rows=range(len(given)),
        names=own.name,
        labels=_labels_of(given),
        fingerprint=fingerprint,
        # Images of code change without a trace.
        stamp="" if getattr(given, "fingerprint", None) else None,
    )


def _method(given: Any, name: str) -> Callable[[int], Any] | None:
    method = getattr(given, name, None)  # a data set may have a `name` that is a text
    return method if callable(method) else None


def _labels_of(given: Any) -> Labels:
    """Return the labels of an object: of each item a class or its name, None without one."""
    targets: Any = [None] * len(given)
    if label := _method(given, "label"):
        targets = [label(index) for index in range(len(given))]
    else:
        found = (getattr(given, name, None) for name in TARGETS)
        targets = next((each for each in found if each is not None and not callable(each)), targets)
    targets = targets.tolist() if hasattr(targets, "tolist") else list(targets)
    if len(targets) != len(given):
        text = f"{title_of(given)} has {len(targets):,} targets, but {plural(len(given), 'image')}"
        raise ValueError(f"{text}; each needs one, which may be None")
    classes = getattr(given, "classes", None)
    if classes is None or callable(classes):
        return encode_labels(targets, None, title_of(given))
    names = [str(name) for name in classes]
    counts = Counter(names)  # ImageNet has two cranes
    names = [name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]
    return encode_labels(targets, names, title_of(given))


def names_sources(given: object) -> bool:
    """Tell whether a list is of sources, by their paths, and not of images."""
    each = given if isinstance(given, list | tuple) else [None]
    return all(isinstance(path, str | os.PathLike) and not is_image(os.fspath(path)) for path in each)

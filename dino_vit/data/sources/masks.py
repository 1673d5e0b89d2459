"""Images with masks: the class of every pixel."""

import io
import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from dino_vit.config.commands import IGNORED
from dino_vit.core import log
from dino_vit.core.text import plural
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.files import is_folder, plain, read_file
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import Source, Subset

INDEXED = ("P", "L", "1")  # Pillow's names for a palette, grey and black and white
_PNG_BITS = 24  # place of the byte that says how many bits a value has
_ORIENTATION = 274  # EXIF's tag


@runtime_checkable
class MaskedSource(Source, Protocol):
    """A set of images of which each has a mask; `classes` are those of the pixels."""

    def mask(self, index: int) -> Tensor:
        """Return the class of every pixel, uint8 (H, W); `IGNORED` where there is none."""


class FilesWithMasks(Subset):
    """Images and their masks: PNG files of one channel, whose values are the classes."""

    def __init__(
        self, images: Subset, masks: Subset, *, classes: Sequence[str] | None, ignore_value: int
    ) -> None:
        super().__init__(images.source, images.indices)
        self._masks, self._ignore_value = masks, ignore_value
        self._classes = classes or [str(value) for value in range(IGNORED)]

    @property
    def classes(self) -> Sequence[str]:
        return self._classes

    def label(self, index: int) -> int | None:
        return None  # the labels of the images are of other classes

    def mask(self, index: int) -> Tensor:
        """Return the class of every pixel, uint8 (H, W); `IGNORED` where there is none."""
        name = self._masks.name(index)
        try:
            values, size = _read_indexed(self._masks.read(index)), _size(self.read(index))
        except UnidentifiedImageError as error:  # whose text is the address of an object
            raise UnreadableImage(name, "the mask cannot be read: it is not an image") from error
        except Exception as error:  # Pillow raises anything on damaged files
            raise UnreadableImage(name, f"the mask cannot be read: {error}") from error
        if size is not None and values.shape != size:
            (height, width), (h, w) = values.shape, size
            raise UnreadableImage(
                name, f"the mask has {width} × {height} pixels, its image {w} × {h}; they must be the same"
            )
        highest = values[values != self._ignore_value].max(initial=0)
        if highest >= len(self.classes):
            raise ValueError(
                f"{name}: the mask has the value {highest}, but values of classes go from 0 to "
                f"{len(self.classes) - 1}; set ignore_value, or give more class_names (at most {IGNORED})"
            )
        return torch.from_numpy(np.where(values == self._ignore_value, IGNORED, values).astype(np.uint8))


def open_masks(
    spec: str, masks: str | None = None, *, class_names: str | None = None, ignore_value: int = IGNORED
) -> MaskedSource:
    """Open a set of images with masks; null: masks/ beside the folder of images.

    A mask has the name of its image but for the suffix. `class_names` is a text file with a name a line.
    """
    source = open_source(spec)
    if isinstance(source, MaskedSource):
        if masks or class_names or ignore_value != IGNORED:
            raise ValueError(f"{spec} has masks of its own: leave out masks, class_names and ignore_value")
        return source
    beside = f"{plain(spec).rstrip('/').rpartition('/')[0] or '.'}/masks"
    if masks is None and not is_folder(beside):
        raise ValueError(
            f"{spec} has no masks: {beside} does not exist. Give masks=FOLDER with indexed PNG files that "
            "are named as the images (synthetic:scenes has masks)"
        )
    folder = open_source(masks or beside)
    masks_by_stem = {_stem(folder.name(index)): index for index in range(len(folder))}
    with_mask = [index for index in range(len(source)) if _stem(source.name(index)) in masks_by_stem]
    if not with_mask:
        raise ValueError(
            f"no image of {spec} has a mask in {masks or beside}: "
            f"there is no {_stem(source.name(0))}.png, for example"
        )
    if len(with_mask) < len(source):
        text = "left out: %s of %s without a mask in %s"
        log.info(text, plural(len(source) - len(with_mask), "image"), spec, masks or beside)
    of_images = [masks_by_stem[_stem(source.name(index))] for index in with_mask]
    return FilesWithMasks(
        Subset(source, with_mask),
        Subset(folder, of_images),
        classes=_read_names(class_names) if class_names else None,
        ignore_value=ignore_value,
    )


def _read_names(path: str) -> list[str]:
    names = [name.strip() for name in read_file(plain(path)).decode().rstrip().splitlines()]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        lines = ", ".join(str(line) for line, name in enumerate(names, 1) if name == repeated)
        raise ValueError(f"{path} has the class {repeated!r} on lines {lines}; each needs its own name")
    return names


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _read_indexed(data: bytes | Tensor) -> NDArray[np.uint8]:
    """Return the values (H, W) of a file's only channel."""
    if isinstance(data, Tensor):
        raise ValueError("masks are files of images, not arrays")
    with Image.open(io.BytesIO(data)) as file:
        shallow_grey = file.mode == "L" and data[_PNG_BITS] != 8  # Pillow would stretch the values to 255
        if file.format != "PNG" or file.mode not in INDEXED or shallow_grey:
            raise ValueError(
                f"it must be a PNG with a palette, or grey with 8 bits, but is {file.format} {file.mode}"
            )
        return np.asarray(file).astype(np.uint8)


def _size(item: bytes | Tensor) -> tuple[int, int] | None:
    """Return the height and width of an upright image; None if only its reader can tell."""
    if isinstance(item, Tensor):
        return int(item.shape[1]), int(item.shape[2])
    try:
        with Image.open(io.BytesIO(item)) as file:
            width, height = file.size
            turned = file.getexif().get(_ORIENTATION, 1) >= 5
    except Exception:
        return None
    return (width, height) if turned else (height, width)

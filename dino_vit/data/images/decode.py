"""Read images: of a source, of a file, or of any kind that a program gives."""

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL.Image import Image
from torch import Tensor

from dino_vit.core.text import brief, printable, public
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images import formats
from dino_vit.data.images.pixels import MAX_PIXELS, RGB, Pixels

MOST_BYTES = 8  # of a pixel in a file: four channels of 16 bits
LISTED = 10  # unreadable images that are named in a sentence


class UnreadableImage(Exception):
    """An image that cannot be read, and why."""

    exit_code = 2

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = printable(public(name)), brief(reason, 1000)
        super().__init__(self.name, self.reason)

    def __str__(self) -> str:
        name = brief(self.name, 3000)  # a list may have names longer than any path
        return f"{name}: {self.reason}" if self.reason else name


def listed(unreadable: Sequence[UnreadableImage], count: int | None = None) -> str:
    """Return a line for each of the first of `count` unreadable images, with its reason."""
    lines = [f"\n  {image}" for image in unreadable[:LISTED]]
    more = (len(unreadable) if count is None else count) - LISTED
    return "".join([*lines, f"\n  and {more:,} more"] if more > 0 else lines)


def read_image(source: ImageSet, index: int, pixels: Pixels = RGB) -> Tensor:
    """Return item `index` of a source, decoded and converted to `pixels`."""
    return decode_item(read_item(source, index, pixels.max_pixels), source.name(index), pixels)


def read_item(source: ImageSet, index: int, max_pixels: int = MAX_PIXELS) -> bytes | Tensor:
    """Return item `index` of a source as it is stored, unless it is larger than an image can be."""
    try:
        if (size := source.size(index)) > MOST_BYTES * max_pixels:
            raise ValueError(f"its {size:,} bytes are more than an image of data.max_pixels={max_pixels} has")
        return source.read(index)
    except (OSError, ValueError) as error:
        raise unreadable(source.name(index), error) from error


def decode_item(
    item: bytes | Tensor, name: str, pixels: Pixels, reduction: formats.Reduction | None = None
) -> Tensor:
    """Return an item of a source, decoded and converted to `pixels`; JPEG may be reduced."""
    try:
        alpha, most = pixels.keeps_alpha, pixels.max_pixels
        return pixels.conform(decode(item, name, alpha=alpha, max_pixels=most, reduction=reduction))
    except (OSError, ValueError) as error:
        raise unreadable(name, error) from error


def read_given(image: object, pixels: Pixels = RGB) -> Tensor:
    """Return an image of any kind, converted to `pixels`."""
    name = str(image) if isinstance(image, str | os.PathLike) else "the image"
    item = decode(from_given(image, pixels), name, alpha=pixels.keeps_alpha, max_pixels=pixels.max_pixels)
    return pixels.conform(item)


def from_given(image: object, pixels: Pixels = RGB) -> bytes | Tensor:
    """Return an image of any kind as the bytes of a file, or as a tensor (C, H, W)."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    if isinstance(image, Image):
        return formats.by_pillow(image, pixels.keeps_alpha, pixels.max_pixels)
    if isinstance(image, np.ndarray):
        return formats.from_array(image)
    if isinstance(image, Tensor):
        return image[None] if image.ndim == 2 else image
    raise TypeError(
        f"{type(image).__name__} is not an image: give a path, the bytes of a file, a Pillow image, an array "
        "(height, width, channels) or a tensor (channels, height, width)"
    )


def unreadable(name: str, error: OSError | ValueError) -> UnreadableImage:
    """Return the error of an image that its source cannot read."""
    return UnreadableImage(name, (isinstance(error, OSError) and error.strerror) or str(error))


def decode(
    item: bytes | Tensor,
    name: str,
    *,
    alpha: bool = True,
    max_pixels: int = MAX_PIXELS,
    reduction: formats.Reduction | None = None,
) -> Tensor:
    """Decode an image file without conversion: upright by its EXIF tag, the first frame of an animation.

    Palettes, CMYK and Lab become RGB. Without `alpha`, an alpha channel is dropped. JPEG may be reduced.
    A tensor is returned as it is.
    """
    if isinstance(item, Tensor):
        return item
    if not item:
        raise UnreadableImage(name, "the file is empty")
    kind = formats.format_of(item)
    if kind == "unknown":
        kinds = ", ".join(sorted({*formats.KINDS.values(), *formats.BRANDS.values()}, key=str.lower))
        raise UnreadableImage(name, f"its format is none of {kinds}")
    try:
        if kind == "JPEG":
            return formats.read_jpeg(item, alpha, max_pixels, reduction)
        reader = formats.READERS[kind]
        if isinstance(reader, type):
            return formats.by_pillow(reader(BytesIO(item)), alpha, max_pixels)
        return reader(item, alpha, max_pixels)
    except Exception as error:  # decoders raise anything on damaged files
        message = str(error).partition("\n")[0]
        reason = message if " " in message else f"{type(error).__name__} {message}".strip()
        raise UnreadableImage(name, f"it cannot be decoded: {reason}") from error

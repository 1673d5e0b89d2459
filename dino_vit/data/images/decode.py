"""Decode image files, and read items of a source as pixels."""

import re
import struct
from collections.abc import Callable
from functools import partial

from PIL import BmpImagePlugin, GifImagePlugin, WebPImagePlugin
from torch import Tensor

from dino_vit.core.native import silenced
from dino_vit.core.text import brief, printable
from dino_vit.data.images import formats
from dino_vit.data.images.pixels import MAX_PIXELS, RGB, Pixels
from dino_vit.data.sources.open import Source

Reader = Callable[[bytes, bool, int], Tensor]
_LOCATION = re.compile(r"^\S+, \S+:\d+, ")

_BY_START: dict[bytes, tuple[str, Reader]] = {
    b"\xff\xd8\xff": ("JPEG", formats.read_jpeg),
    b"\x89PNG\r\n\x1a\n": ("PNG", formats.read_png),
    b"RIFF": ("WebP", partial(formats.read_by, WebPImagePlugin.WebPImageFile)),
    b"GIF8": ("GIF", partial(formats.read_by, GifImagePlugin.GifImageFile)),
    b"BM": ("BMP", partial(formats.read_by, BmpImagePlugin.BmpImageFile)),
    b"\x93NUMPY": ("npy", formats.read_npy),
    b"II*\0": ("TIFF", formats.read_tiff),
    b"MM\0*": ("TIFF", formats.read_tiff),
    b"II+\0": ("TIFF", formats.read_tiff),  # more than 4 GB
    b"MM\0+": ("TIFF", formats.read_tiff),
}


class UnreadableImage(Exception):
    """An image that cannot be read, and why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = printable(name), brief(reason, 1000)
        super().__init__(self.name, self.reason)

    def __str__(self) -> str:
        return f"{brief(self.name, 3000)}: {self.reason}"  # a list may have names longer than any path


def read_image(
    source: Source, index: int, pixels: Pixels = RGB, reduction: formats.Reduction | None = None
) -> Tensor:
    """Return item `index` of a source, decoded and converted to `pixels`; JPEG may be reduced."""
    return decode_item(read_item(source, index), source.name(index), pixels, reduction)


def read_item(source: Source, index: int) -> bytes | Tensor:
    """Return item `index` of a source as it is stored."""
    try:
        return source.read(index)
    except (OSError, ValueError) as error:
        raise unreadable(source.name(index), error) from error


def decode_item(
    item: bytes | Tensor, name: str, pixels: Pixels = RGB, reduction: formats.Reduction | None = None
) -> Tensor:
    """Return an item of a source, decoded and converted to `pixels`; JPEG may be reduced."""
    try:
        if not isinstance(item, Tensor):
            alpha, most = pixels.keeps_alpha, pixels.max_pixels
            item = decode(item, name, alpha=alpha, max_pixels=most, reduction=reduction)
        return pixels.conform(item)
    except (OSError, ValueError) as error:
        raise unreadable(name, error) from error


def read_given(image: object, pixels: Pixels = RGB) -> Tensor:
    """Return an image of any kind, converted to `pixels`."""
    alpha, max_pixels = pixels.keeps_alpha, pixels.max_pixels
    item = formats.from_given(image, alpha=alpha, max_pixels=max_pixels)
    if isinstance(item, bytes):
        name = "the image" if isinstance(image, bytes) else str(image)
        item = decode(item, name, alpha=alpha, max_pixels=max_pixels)
    return pixels.conform(item)


def unreadable(name: str, error: OSError | ValueError) -> UnreadableImage:
    """Return the error of an image that its source cannot read."""
    return UnreadableImage(name, (isinstance(error, OSError) and error.strerror) or str(error))


def decode(
    data: bytes,
    name: str,
    *,
    alpha: bool = True,
    max_pixels: int = MAX_PIXELS,
    reduction: formats.Reduction | None = None,
) -> Tensor:
    """Decode an image file without conversion: upright by its EXIF tag, the first frame of an animation.

    Palettes, CMYK and Lab become RGB. Without `alpha`, an alpha channel is dropped. JPEG may be reduced.
    """
    if not data:
        raise UnreadableImage(name, "the file is empty")
    known = _known(data)
    if known is None:
        raise UnreadableImage(name, "it is not a JPEG, PNG, WebP, GIF, BMP, TIFF or npy file")
    try:
        with silenced():
            if reduction and known[0] == "JPEG":
                return formats.read_jpeg(data, alpha, max_pixels, reduction)
            return known[1](data, alpha, max_pixels)
    except formats.Refused as error:
        raise UnreadableImage(name, str(error)) from error
    except Exception as error:  # decoders raise anything on damaged files
        raise UnreadableImage(name, f"it cannot be decoded: {_reason(error)}") from error


def format_of(data: bytes) -> str:
    """Return the name of a file's format by its first bytes."""
    known = _known(data)
    return known[0] if known else "unknown"


def _known(data: bytes) -> tuple[str, Reader] | None:
    return next((known for start, known in _BY_START.items() if data.startswith(start)), None)


def _reason(error: Exception) -> str:
    """Return an error's message as one line, without the location in torchvision's source code."""
    if isinstance(error.__cause__ or error, struct.error):  # unpacking beyond the end
        return "it is truncated"
    message = _LOCATION.sub("", str(error).partition("\n")[0])
    return message if " " in message else f"{type(error).__name__} {message}".strip()

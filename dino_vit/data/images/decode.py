"""From the bytes of an image file to a tensor, and from an item of a source to the pixels that are wanted."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from torch import Tensor

from dino_vit.data.images import formats
from dino_vit.data.images.pixels import MAX_PIXELS, RGB, Pixels
from dino_vit.data.images.png import read_png
from dino_vit.data.images.tiff import read_tiff
from dino_vit.data.sources.open import Source

Reader = Callable[[bytes, bool, int], Tensor]
_PLACE = re.compile(r"^\S+, \S+:\d+, ")

_BY_START: dict[bytes, tuple[str, Reader]] = {
    b"\xff\xd8\xff": ("JPEG", formats.read_jpeg),
    b"\x89PNG\r\n\x1a\n": ("PNG", read_png),
    b"RIFF": ("WebP", formats.read_webp),
    b"GIF8": ("GIF", formats.read_gif),
    b"BM": ("BMP", formats.read_bmp),
    b"\x93NUMPY": ("npy", formats.read_npy),
    b"II*\0": ("TIFF", read_tiff),
    b"MM\0*": ("TIFF", read_tiff),
    b"II+\0": ("TIFF", read_tiff),  # more than 4 GB
    b"MM\0+": ("TIFF", read_tiff),
}


class UnreadableImage(Exception):
    """An image that cannot be read, with its name and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def read_image(source: Source, index: int, pixels: Pixels = RGB) -> Tensor:
    """Return item `index` of a source, decoded and converted as `pixels` says."""
    name = source.name(index)
    try:
        item = source.read(index)
        if not isinstance(item, Tensor):
            item = decode(item, name, alpha=pixels.keeps_alpha, max_pixels=pixels.max_pixels)
        return pixels.conform(item)
    except OSError as error:
        raise UnreadableImage(name, error.strerror or str(error)) from error
    except ValueError as error:
        raise UnreadableImage(name, str(error)) from error


def decode(data: bytes, name: str, *, alpha: bool = True, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decode an image file as it is: turned upright as EXIF says, of an animation the first frame.

    Palettes, CMYK and Lab become RGB. Without `alpha`, a channel of transparency is left out.
    """
    if not data:
        raise UnreadableImage(name, "the file is empty")
    known = _known(data)
    if known is None:
        raise UnreadableImage(name, "it is no JPEG, PNG, WebP, GIF, BMP, TIFF or npy file")
    try:
        return known[1](data, alpha, max_pixels)
    except formats.Refused as error:
        raise UnreadableImage(name, str(error)) from error
    except Exception as error:  # on damaged files decoders raise whatever comes
        raise UnreadableImage(name, f"it cannot be decoded: {_reason(error)}") from error


def format_of(data: bytes) -> str:
    """Return the name of a file's format, going by its first bytes."""
    known = _known(data)
    return known[0] if known else "unknown"


def _known(data: bytes) -> tuple[str, Reader] | None:
    return next((known for start, known in _BY_START.items() if data.startswith(start)), None)


def _reason(error: Exception) -> str:
    """Return what an error says, in a line, without the place in torchvision's sources."""
    if isinstance(error.__cause__ or error, struct.error):  # a reader asked for more bytes than there are
        return "it is truncated"
    said = _PLACE.sub("", str(error).partition("\n")[0])
    return said if " " in said else f"{type(error).__name__} {said}".strip()

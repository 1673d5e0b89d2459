"""PNG: Pillow reads it, but for 16 bits in colour, which only torchvision keeps.

Torchvision's decoder ends the process on a damaged file (a libpng error while it reads rows is a segmentation
fault in 0.29), so what could go wrong there is looked for before.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from io import BytesIO

import numpy as np
from PIL.PngImagePlugin import PngImageFile
from torch import Tensor

from dino_vit.data.images.formats import Refused, by_pillow, by_torchvision, check_size

# The offset and the step of the seven passes of an interlaced image: x, y, x, y.
_WHOLE = ((0, 0, 1, 1),)
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # by colour type
_LAST_FILTER = 4


def read_png(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    file = PngImageFile(BytesIO(data))
    depth, colour_type, interlaced = data[24], data[25], data[28]
    if depth < 16 or file.mode == "I;16":
        return by_pillow(file, alpha, max_pixels)
    channels = _CHANNELS[colour_type]
    check_size(*file.size, channels, max_pixels)
    _check_rows(data, *file.size, stride=2 * channels, passes=_PASSES if interlaced else _WHOLE)
    image = by_torchvision(data)
    return image[:-1] if channels in (2, 4) and not alpha else image


def _check_rows(
    data: bytes, width: int, height: int, *, stride: int, passes: tuple[tuple[int, int, int, int], ...]
) -> None:
    """Refuse what libpng would stumble over: wrong sums, missing rows and unknown filters."""
    shapes = [(-(-(height - y) // down), -(-(width - x) // right)) for x, y, right, down in passes]
    shapes = [(rows, 1 + stride * columns) for rows, columns in shapes if rows > 0 and columns > 0]
    expected = sum(rows * length for rows, length in shapes)
    packed = b"".join(body for kind, body in _chunks(data) if kind == b"IDAT")
    inflate = zlib.decompressobj()
    filtered = np.frombuffer(inflate.decompress(packed, expected + 1), dtype=np.uint8)
    if len(filtered) != expected or not inflate.eof:
        raise Refused("its rows are damaged")
    for rows, length in shapes:
        if filtered[: rows * length : length].max() > _LAST_FILTER:
            raise Refused("its rows are damaged")
        filtered = filtered[rows * length :]


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the content of each chunk up to the end, verified."""
    place, kind = 8, b""
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, place)
        body = data[place + 8 : place + 8 + length]
        (check,) = struct.unpack_from(">I", data, place + 8 + length)
        if zlib.crc32(kind + body) != check:
            raise Refused("its check sums are wrong")
        yield kind, body
        place += 12 + length

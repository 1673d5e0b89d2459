"""Readers of file formats, each from bytes to a tensor (C, H, W) of the channels and type that the file has.

The size is checked before anything is decoded. Torchvision decodes JPEG, as it is faster than Pillow. Its
operator is called directly, since its Python function warns at every call from 0.29 on.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from math import ceil, prod
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import ImageOps, JpegImagePlugin, PngImagePlugin
from PIL.Image import Image
from torch import Tensor
from torchvision.io import ImageReadMode

# Pillow's modes that encode RGB or grey.
_CONVERTED = {
    "1": "L",
    "P": "RGB",
    "CMYK": "RGB",
    "YCbCr": "RGB",
    "LAB": "RGB",
    "HSV": "RGB",
    "RGBX": "RGB",
    "PA": "RGBA",
    "RGBa": "RGBA",
    "La": "LA",
}
_WITH_ALPHA = ("LA", "RGBA")


class Refused(ValueError):
    """A file that is recognised but cannot be used."""


def read_jpeg(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    file = JpegImagePlugin.JpegImageFile(BytesIO(data))
    if file.mode == "CMYK":
        return by_pillow(file, alpha, max_pixels)
    check_size(*file.size, 3, max_pixels)
    return by_torchvision(data)


def read_by(plugin: Callable[[BytesIO], Image], data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read by a plugin of Pillow."""
    return by_pillow(plugin(BytesIO(data)), alpha, max_pixels)


def read_npy(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read an array (H, W), (C, H, W) or (H, W, C); the shorter of first and last axis has the channels."""
    file = BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version > (2, 0):
        raise Refused("an array of records is not an image")
    header = np.lib.format
    read_header = header.read_array_header_1_0 if version == (1, 0) else header.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.kind not in "buif":
        raise Refused(f"an array of {dtype} is not an image")
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] == shape[2]):
        raise Refused(
            f"an array of shape {shape} is not an image (height, width) or (channels, height, width)"
        )
    last = len(shape) == 3 and shape[2] < shape[0]
    height, width = shape[:2] if last else shape[-2:]
    check_size(width, height, shape[-1] if last else prod(shape[:-2]), max_pixels)
    if prod(shape) * dtype.itemsize > len(data) - file.tell():
        raise Refused("the file is truncated")
    array = np.load(BytesIO(data), allow_pickle=False)
    return to_tensor(array if last else rearrange(array.reshape(-1, height, width), "c h w -> h w c"))


def read_png(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read PNG by Pillow, except 16 bits in colour, which only torchvision keeps."""
    file = PngImagePlugin.PngImageFile(BytesIO(data))
    depth, color_type, interlaced = data[24], data[25], data[28]
    if depth < 16 or file.mode == "I;16":
        return by_pillow(file, alpha, max_pixels)
    channels = {2: 3, 4: 2, 6: 4}[color_type]
    check_size(*file.size, channels, max_pixels)
    _check_rows(data, *file.size, stride=2 * channels, passes=_PASSES if interlaced else _ONE_PASS)
    image = by_torchvision(data)
    return image[:-1] if channels in (2, 4) and not alpha else image


# Offset and step of the pixels in each pass: x, y, x, y.
_ONE_PASS = ((0, 0, 1, 1),)
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def _check_rows(
    data: bytes, width: int, height: int, *, stride: int, passes: tuple[tuple[int, int, int, int], ...]
) -> None:
    """Refuse wrong checksums, missing rows and unknown filters.

    On these, torchvision's decoder (0.29) ends the process with a segmentation fault. Pillow is no substitute
    for the check: it accepts missing rows.
    """
    shapes = [(-(-(height - y) // down), -(-(width - x) // right)) for x, y, right, down in passes]
    shapes = [(rows, 1 + stride * columns) for rows, columns in shapes if rows > 0 and columns > 0]
    expected = sum(rows * length for rows, length in shapes)
    packed = b"".join(body for kind, body in _chunks(data) if kind == b"IDAT")
    inflate = zlib.decompressobj()
    filtered = np.frombuffer(inflate.decompress(packed, expected + 1), dtype=np.uint8)
    if len(filtered) != expected or not inflate.eof:
        raise Refused("its rows are damaged")
    for rows, length in shapes:
        if filtered[: rows * length : length].max() > 4:  # the first byte of a row is its filter, 0 to 4
            raise Refused("its rows are damaged")
        filtered = filtered[rows * length :]


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the content of each chunk, and check their checksums."""
    position, kind = 8, b""
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, position)
        body = data[position + 8 : position + 8 + length]
        (checksum,) = struct.unpack_from(">I", data, position + 8 + length)
        if zlib.crc32(kind + body) != checksum:
            raise Refused("a checksum is wrong")
        yield kind, body
        position += 12 + length


def check_size(width: int, height: int, channels: int, max_pixels: int) -> None:
    """Refuse an empty image, and one that would fill the memory."""
    if not width * height * channels:
        raise Refused("the image has no pixels")
    if width * height * ceil(channels / 4) > max_pixels:
        raise Refused(f"{width} × {height} pixels exceed data.max_pixels={max_pixels}")


def by_torchvision(data: bytes) -> Tensor:
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    apply_exif_orientation = True
    mode = ImageReadMode.UNCHANGED.value
    return torch.ops.image.decode_image(encoded, mode, apply_exif_orientation)


def by_pillow(file: Image, alpha: bool, max_pixels: int) -> Tensor:
    """Decode an opened file, upright and with its encodings of RGB (palettes, CMYK, ...) as RGB."""
    check_size(*file.size, len(file.getbands()), max_pixels)
    has_clear_color = file.mode == "P" and "transparency" in file.info
    mode = "RGBA" if has_clear_color else _CONVERTED.get(file.mode, file.mode)
    if not alpha and mode in _WITH_ALPHA:
        mode = mode[:-1]
    file.load()
    image = ImageOps.exif_transpose(file)
    return to_tensor(np.array(image if image.mode == mode else image.convert(mode)))


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array (H, W) or (H, W, C) of any byte order as a tensor (C, H, W)."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if native.ndim == 2:
        native = native[..., None]
    return torch.from_numpy(np.ascontiguousarray(rearrange(native, "h w c -> c h w")))

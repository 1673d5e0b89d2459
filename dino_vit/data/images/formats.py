"""Readers of file formats, each from bytes to a tensor (C, H, W) of the channels and type that the file has.

The size is checked before anything is decoded. Torchvision decodes JPEG, as it is faster than Pillow. Its
operator is called directly, since its Python function warns at every call from 0.29 on.
"""

import logging
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import ImageOps, JpegImagePlugin, PngImagePlugin
from PIL.Image import Image
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor
from torchvision.io import ImageReadMode

from dino_vit.data.npy import read_header

if TYPE_CHECKING:
    from tifffile import TiffPage, TiffPageSeries

# Pillow's modes that encode RGB or grey.
_CONVERTED = dict.fromkeys(("P", "CMYK", "YCbCr", "LAB", "HSV", "RGBX"), "RGB")
_CONVERTED |= {"1": "L", "La": "LA", "PA": "RGBA", "RGBa": "RGBA"}
_WITH_ALPHA = ("LA", "RGBA")
# Values of TIFF tags.
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _IN_RGB = 0, 1, 2
_UNSPECIFIED = 0  # use of an extra sample; others are alpha
_ORIENTATION = 274  # the tag
_PAGES = "QI"  # axes of TIFF of unknown meaning

# A file is reported once, by its exception, and one that can be read in spite of its damage is not.
for _library in ("tifffile", "PIL"):
    logging.getLogger(_library).addHandler(logging.NullHandler())
    logging.getLogger(_library).propagate = False
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.|tifffile|numpy\.lib")


class Refused(ValueError):
    """A file that is recognised but cannot be used."""


# Given the height and width of an image, return by how much it may be reduced: 1, 2, 4 or 8.
Reduction = Callable[[int, int], int]


def read_jpeg(data: bytes, alpha: bool, max_pixels: int, reduction: Reduction | None = None) -> Tensor:
    """Read JPEG; if it may be reduced, by its own transform, which decodes fewer pixels of each block."""
    file = JpegImagePlugin.JpegImageFile(BytesIO(data))
    if file.mode == "CMYK":
        return by_pillow(file, alpha, max_pixels)
    check_size(*file.size, 3, max_pixels)
    if reduction:
        width, height = file.size
        factor = reduction(*((width, height) if _lies(file) else (height, width)))
        if factor > 1:
            file.draft(None, (width // factor, height // factor))
            return by_pillow(file, alpha, max_pixels)
    return by_torchvision(data)


def _lies(file: Image) -> bool:
    """Tell whether an image that is shown upright is stored on its side."""
    return int(file.getexif().get(_ORIENTATION, 1)) >= 5


def read_by(plugin: Callable[[BytesIO], Image], data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read by a plugin of Pillow."""
    return by_pillow(plugin(BytesIO(data)), alpha, max_pixels)


def read_npy(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read an array (H, W), (C, H, W) or (H, W, C); the shorter of first and last axis has the channels."""
    file = BytesIO(data)
    header = read_header(file)
    shape, dtype = header.shape, header.dtype
    if not header.numeric and dtype.kind != "b":
        raise Refused(f"an array of {dtype} is not an image")
    last = _channels_last(shape)
    height, width = shape[:2] if last else shape[-2:]
    check_size(width, height, shape[-1] if last else prod(shape[:-2]), max_pixels)
    if header.nbytes > len(data) - file.tell():
        raise Refused("the file is truncated")
    flat = np.frombuffer(bytearray(data), dtype, prod(shape), file.tell())
    return from_array(flat.reshape(shape, order="F" if header.fortran else "C"))


def from_array(array: NDArray[Any]) -> Tensor:
    """Return an array (H, W), (C, H, W) or (H, W, C) as a tensor (C, H, W)."""
    if _channels_last(array.shape) or array.ndim == 2:
        return to_tensor(array)
    return to_tensor(rearrange(array, "c h w -> h w c"))


def from_given(image: object, *, alpha: bool, max_pixels: int) -> bytes | Tensor:
    """Return an image of any kind as the bytes of a file, or as a tensor (C, H, W)."""
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    if isinstance(image, Image):
        return by_pillow(image, alpha, max_pixels)
    if isinstance(image, np.ndarray):
        return from_array(image)
    if isinstance(image, Tensor):
        return image[None] if image.ndim == 2 else image
    if isinstance(image, bytes):
        return image
    raise TypeError(
        f"{type(image).__name__} is not an image: give a path, the bytes of a file, a Pillow image, an array "
        "(height, width, channels) or a tensor (channels, height, width)"
    )


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Tell whether an image's last axis has the channels, the shorter of first and last axis."""
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] == shape[2]):
        raise Refused(
            f"an array of shape {shape} is not an image (height, width) or (channels, height, width)"
        )
    return len(shape) == 3 and shape[2] < shape[0]


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


def read_tiff(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read TIFF by Pillow if that loses nothing, else by tifffile.

    Pillow knows all compressions, but silently reduces 16-bit RGB to 8 bits and drops channels beyond the
    fourth. Channels are the samples of a pixel, an axis named so, or grey pages of one size. Of several color
    pages the first is read; a stack along depth or time is refused.
    """
    from tifffile import TiffFile, TiffPage

    _check_chain(data)
    with TiffFile(BytesIO(data)) as file:
        series, page = file.series[0], file.pages[0]
        assert isinstance(page, TiffPage)
        if _pillow_reads_all(page, series):
            return by_pillow(TiffImageFile(BytesIO(data)), alpha, max_pixels)
        array = _by_tifffile(page, series, max_pixels)
        if page.extrasamples and page.extrasamples[-1] != _UNSPECIFIED and not alpha:
            array = array[..., :-1]
        turned = page.tags.get(_ORIENTATION)
        return to_tensor(_upright(array, int(turned.value) if turned else 1))


def _check_chain(data: bytes) -> None:
    """Refuse pages that form a circle. tifffile (2026.3) finds only some and reads others for ever."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    count, offset, entry, first = ("Q", "Q", 20, 8) if big else ("H", "I", 12, 4)
    visited: set[int] = set()
    try:
        (position,) = struct.unpack_from(order + offset, data, first)
        while position:
            if position in visited:
                raise Refused("its pages form a circle")
            visited.add(position)
            (entries,) = struct.unpack_from(order + count, data, position)
            end = position + struct.calcsize(order + count) + entry * entries
            (position,) = struct.unpack_from(order + offset, data, end)
    except struct.error:
        return  # a page beyond the end of the file, which the readers handle


def _pillow_reads_all(page: "TiffPage", series: "TiffPageSeries") -> bool:
    """Tell whether Pillow has a mode for the first page, and the other pages are not channels."""
    if page.axes == "YX" and series.axes != "YX":
        return False
    if page.bitspersample <= 8 and page.dtype is not None and page.dtype.kind in "ub":
        return page.samplesperpixel <= 4 and _UNSPECIFIED not in page.extrasamples
    plain = page.samplesperpixel == 1 and page.photometric == _BLACK_IS_ZERO
    return plain and str(page.dtype) in ("uint16", "float32")


def _by_tifffile(page: "TiffPage", series: "TiffPageSeries", max_pixels: int) -> NDArray[Any]:
    """Return the channels, which may be samples or pages, as (H, W, C)."""
    if page.photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _IN_RGB):
        raise Refused(f"TIFF of this color space is supported with 8 bits only, not {page.dtype}")
    lengths = dict(zip(series.axes, series.shape, strict=True))
    stacked = [axis for axis in lengths if axis not in "YXS" and ("S" in lengths or axis not in "C" + _PAGES)]
    if "S" in lengths and len(stacked) == 1 and stacked[0] in _PAGES:
        lengths, stacked = dict(zip(page.axes, page.shape, strict=True)), []
    if stacked or len(lengths) > 3 or len(lengths) < len(page.axes):
        raise Refused(f"a stack along {' and '.join(lengths)} is not an image; save its planes as files")
    channels = next((axis for axis in lengths if axis not in "YX"), None)
    check_size(lengths["X"], lengths["Y"], lengths[channels] if channels else 1, max_pixels)
    array = np.asarray(page.asarray() if "S" in lengths else series.asarray())
    if page.photometric == _WHITE_IS_ZERO and array.dtype.kind == "u":
        array = np.iinfo(array.dtype).max - array
    if channels is None:
        return array[..., None]
    names = " ".join(lengths)
    return rearrange(array, f"{names} -> Y X {channels}")


def _upright(array: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Turn (H, W, C) by the orientation tag of EXIF."""
    if orientation >= 5:
        array = rearrange(array, "h w c -> w h c")
    down = orientation in (3, 4, 7, 8)
    right = orientation in (2, 3, 6, 7)
    return array[:: -1 if down else 1, :: -1 if right else 1]


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

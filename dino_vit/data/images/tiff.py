"""TIFF: Pillow reads what it reads without loss, tifffile the rest.

Pillow knows all compressions, but silently reduces 16-bit RGB to 8 bits and drops channels beyond the fourth.
Channels are the samples of a pixel, an axis named so, or grey pages of one size. Of several color pages the
first is read; a stack along depth or time is refused.
"""

from __future__ import annotations

import logging
import struct
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from dino_vit.data.images.formats import Refused, by_pillow, check_size, to_tensor

if TYPE_CHECKING:
    from tifffile import TiffPage, TiffPageSeries

# Values of tags.
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _IN_RGB = 0, 1, 2
_UNSPECIFIED = 0  # use of an extra sample; others are alpha
_ORIENTATION = 274
_SILENT = logging.NullHandler()  # an unreadable file is reported by its exception
_PAGES = "QI"  # axes of unknown meaning


def read_tiff(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    from tifffile import TiffFile, TiffPage

    logging.getLogger("tifffile").addHandler(_SILENT)
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


def _pillow_reads_all(page: TiffPage, series: TiffPageSeries) -> bool:
    """Tell whether Pillow has a mode for the first page, and the other pages are not channels."""
    if page.axes == "YX" and series.axes != "YX":
        return False
    if page.bitspersample <= 8 and page.dtype is not None and page.dtype.kind in "ub":
        return page.samplesperpixel <= 4 and _UNSPECIFIED not in page.extrasamples
    plain = page.samplesperpixel == 1 and page.photometric == _BLACK_IS_ZERO
    return plain and str(page.dtype) in ("uint16", "float32")


def _by_tifffile(page: TiffPage, series: TiffPageSeries, max_pixels: int) -> NDArray[Any]:
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

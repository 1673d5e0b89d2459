"""TIFF, which can hold anything: what Pillow reads as it is written goes to Pillow, the rest to tifffile.

Pillow knows all compressions, but turns 16-bit RGB into 8 bits and leaves out channels beyond the fourth
without a word. Channels are the samples of a pixel, an axis named so, or grey pages of one size. Of pages in
colour the first is read, as of an animation; a stack along depth or time is refused.
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

# What the tags of a file say by number.
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _IN_RGB = 0, 1, 2
_UNSPECIFIED = 0  # the use of a further sample; others are transparency
_ORIENTATION = 274
_ELSEWHERE = logging.NullHandler()  # what is wrong with a file is told once, in its exception
_PAGES = "QI"  # the names of an axis of which nothing is known


def read_tiff(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    from tifffile import TiffFile, TiffPage

    logging.getLogger("tifffile").addHandler(_ELSEWHERE)
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
    """Refuse pages of which one is followed by an earlier one: tifffile would read them for ever."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    count, offset, entry, first = ("Q", "Q", 20, 8) if big else ("H", "I", 12, 4)
    seen: set[int] = set()
    try:
        (place,) = struct.unpack_from(order + offset, data, first)
        while place:
            if place in seen:
                raise Refused("its pages form a circle")
            seen.add(place)
            (entries,) = struct.unpack_from(order + count, data, place)
            end = place + struct.calcsize(order + count) + entry * entries
            (place,) = struct.unpack_from(order + offset, data, end)
    except struct.error:
        return  # a page beyond the end of the file, which the readers are prepared for


def _pillow_reads_all(page: TiffPage, series: TiffPageSeries) -> bool:
    """Tell whether Pillow has a mode for the first page, and the other pages are no channels."""
    if page.axes == "YX" and series.axes != "YX":
        return False
    if page.bitspersample <= 8 and page.dtype is not None and page.dtype.kind in "ub":
        return page.samplesperpixel <= 4 and _UNSPECIFIED not in page.extrasamples
    plain = page.samplesperpixel == 1 and page.photometric == _BLACK_IS_ZERO
    return plain and str(page.dtype) in ("uint16", "float32")


def _by_tifffile(page: TiffPage, series: TiffPageSeries, max_pixels: int) -> NDArray[Any]:
    """Return the channels, as they stand in the samples or the pages of a file, as (H, W, C)."""
    if page.photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _IN_RGB):
        raise Refused(f"TIFF of this colour space is read with 8 bits only, not {page.dtype}")
    lengths = dict(zip(series.axes, series.shape, strict=True))
    stacked = [axis for axis in lengths if axis not in "YXS" and ("S" in lengths or axis not in "C" + _PAGES)]
    if "S" in lengths and len(stacked) == 1 and stacked[0] in _PAGES:
        lengths, stacked = dict(zip(page.axes, page.shape, strict=True)), []
    if stacked or len(lengths) > 3 or len(lengths) < len(page.axes):
        raise Refused(f"a stack along {' and '.join(lengths)} is no image; save its planes as files")
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
    """Turn (H, W, C) as the tag of EXIF says, whose first column and row may be any side of the picture."""
    if orientation >= 5:
        array = rearrange(array, "h w c -> w h c")
    down = orientation in (3, 4, 7, 8)
    right = orientation in (2, 3, 6, 7)
    return array[:: -1 if down else 1, :: -1 if right else 1]

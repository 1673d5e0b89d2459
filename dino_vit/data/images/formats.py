"""The formats of image files: how each is recognised, and read to a tensor (C, H, W).

The size is checked before anything is decoded. simplejpeg decodes JPEG: 1.7 times as fast as Pillow, and with
equal pixels, as both use libjpeg-turbo. tifffile reads deep TIFF, imagecodecs deep PNG, Pillow the rest.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from math import ceil
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import numpy as np
import simplejpeg
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    ImageOps,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    WebPImagePlugin,
)
from PIL.Image import DecompressionBombWarning, Image
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from dino_vit.core.process import return_freed_memory

if TYPE_CHECKING:
    from tifffile import TiffPage, TiffPageSeries

# Given the height and width of an image, return by how much it may be reduced: 1, 2, 4 or 8.
Reduction = Callable[[int, int], int]
Reader = Callable[[bytes, bool, int], Tensor]

# Pillow's modes that encode RGB or grey.
_CONVERTED = dict.fromkeys(("P", "CMYK", "YCbCr", "LAB", "HSV", "RGBX"), "RGB")
_CONVERTED |= {"1": "L", "La": "LA", "PA": "RGBA", "RGBa": "RGBA"}
_WITH_ALPHA = ("LA", "RGBA")
# Values of TIFF tags.
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _IN_RGB = 0, 1, 2
_UNSPECIFIED = 0  # use of an extra sample; others are alpha
LARGE = 2**26  # pixels of an image with which threads take turns; those of cameras are smaller
_PAGES = ("Q", "I")  # axes of TIFF of unknown meaning
_ORIENTATION = 274  # the tag, of TIFF and of EXIF
_NO_DEEP = "{} of more than 8 bits is not read; save it as TIFF or PNG"
_PNG_EXIF = b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp"  # what marks a part that may have it

# A file is reported once, by its exception, and one that can be read in spite of its damage is not.
for _library in ("tifffile", "PIL", "imagecodecs"):
    logging.getLogger(_library).addHandler(logging.NullHandler())
    logging.getLogger(_library).propagate = False
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.|tifffile|numpy\.lib")
warnings.filterwarnings("ignore", category=DecompressionBombWarning)  # data.max_pixels is the limit


def format_of(data: bytes) -> str:
    """Return the name of a file's format by its first bytes."""
    if data[4:8] == b"ftyp":  # a container of pictures or films
        return BRANDS.get(data[8:12], "unknown")
    return next((kind for start, kind in KINDS.items() if data.startswith(start)), "unknown")


def read_jpeg(data: bytes, alpha: bool, max_pixels: int, reduction: Reduction | None) -> Tensor:
    """Read JPEG; if it may be reduced, by its own transform, which decodes fewer pixels of each block."""
    file = JpegImagePlugin.JpegImageFile(BytesIO(data))
    if file.mode == "CMYK":
        return by_pillow(file, alpha, max_pixels)
    width, height = file.size
    orientation = int(file.getexif().get(_ORIENTATION, 1))
    factor = 1
    if reduction and width * height:
        factor = reduction(*((width, height) if orientation >= 5 else (height, width)))
    smallest = {"min_height": ceil(height / factor), "min_width": ceil(width / factor)} if factor > 1 else {}
    with _sized(width, height, 3, max_pixels):
        try:
            array = simplejpeg.decode_jpeg(data, "GRAY" if file.mode == "L" else "RGB", **smallest)
        except ValueError:  # also where libjpeg only warns; Pillow tells such a file from a truncated one
            if factor > 1:
                file.draft(None, (width // factor, height // factor))
            return by_pillow(file, alpha, max_pixels)
        return rearrange(torch.from_numpy(_upright(array, orientation)), "h w c -> c h w")


def _read_png(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read PNG by Pillow, except 16 bits in colour, which it would reduce to 8."""
    file = PngImagePlugin.PngImageFile(BytesIO(data))
    depth, color_type = data[24], data[25]
    if depth < 16 or file.mode == "I;16":
        return by_pillow(file, alpha, max_pixels)
    has_alpha = color_type in (4, 6) or "transparency" in file.info  # a clear colour, which is expanded
    has_exif = any(mark in data for mark in _PNG_EXIF)  # if not, Pillow would decode all to look for it
    orientation = int(file.getexif().get(_ORIENTATION, 1)) if has_exif else 1
    with _sized(*file.size, len(file.getbands()), max_pixels):
        try:
            from imagecodecs import png_decode
        except ImportError as error:
            text = "PNG with 16-bit colours needs another library: pip install imagecodecs"
            raise ValueError(text) from error
        array = png_decode(data)
        return _to_tensor(_upright(array[..., :-1] if has_alpha and not alpha else array, orientation))


def _read_ppm(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read PPM by Pillow, which would reduce 16 bits to 8 in colour."""
    file = PpmImagePlugin.PpmImageFile(BytesIO(data))
    tile: Any = file.tile[0]
    decoder, _, _, arguments = tile
    if arguments == "I;16B" or (decoder == "ppm" and int(arguments[1]) > 255):
        raise ValueError(_NO_DEEP.format("PPM"))
    return by_pillow(file, alpha, max_pixels)


def _read_jpeg2000(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read JPEG 2000 by Pillow, which would reduce more than 8 bits to 8, or scale them to 16."""
    file = Jpeg2KImagePlugin.Jpeg2KImageFile(BytesIO(data))
    if (data[data.index(_CODESTREAM) + 42] & 127) + 1 > 8:  # bits of the first channel
        raise ValueError(_NO_DEEP.format("JPEG 2000"))
    return by_pillow(file, alpha, max_pixels)


def _read_heif(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    try:
        from pillow_heif import HeifImageFile
    except ImportError as error:
        raise ValueError("HEIC needs another library: pip install pillow-heif") from error
    return by_pillow(HeifImageFile(BytesIO(data)), alpha, max_pixels)


_npy_lock = Lock()


def _read_npy(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    with _npy_lock:  # its header goes through `ast`, which may fail in threads of Python 3.11 (gh-106905)
        array = np.load(BytesIO(data))
    image = from_array(array)
    channels, height, width = image.shape
    with _sized(width, height, channels, max_pixels):
        return image


def from_array(array: NDArray[Any]) -> Tensor:
    """Return an array (H, W), (C, H, W) or (H, W, C) as a tensor (C, H, W).

    The shorter of first and last axis has the channels.
    """
    if array.dtype.kind not in "buif":
        raise ValueError(f"{array.dtype} values are no brightness")
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] < array.shape[0]):
        return _to_tensor(array)
    if array.ndim == 3 and array.shape[0] < array.shape[2]:
        return _to_tensor(rearrange(array, "c h w -> h w c"))
    raise ValueError(f"an array of shape {array.shape} is not an image: (H, W), (H, W, C) or (C, H, W)")


def _read_tiff(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read TIFF by Pillow if that loses nothing, else by tifffile.

    Pillow knows all compressions, but silently reduces 16-bit RGB to 8 bits and drops channels beyond the
    fourth. Channels are the samples of a pixel, an axis named so, or grey pages of one size. Of several color
    pages the first is read; a stack along depth or time is refused.
    """
    from tifffile import TiffFile, TiffPage

    with TiffFile(BytesIO(data)) as file:
        series, page = file.series[0], file.pages[0]
        assert isinstance(page, TiffPage)
        if _pillow_reads_all(page, series):
            return by_pillow(TiffImageFile(BytesIO(data)), alpha, max_pixels)
        array = _by_tifffile(page, series, max_pixels)
        if page.extrasamples and page.extrasamples[-1] != _UNSPECIFIED and not alpha:
            array = array[..., :-1]
        orientation = page.tags.get(_ORIENTATION)
        return _to_tensor(_upright(array, int(orientation.value) if orientation else 1))


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
        raise ValueError(f"TIFF of this color space is supported with 8 bits only, not {page.dtype}")
    several_in_color = "S" in series.axes and series.axes.strip("YXS") in _PAGES
    part = page if several_in_color else series
    lengths = dict(zip(part.axes, part.shape, strict=True))
    channels = "".join(axis for axis in lengths if axis not in "YX")
    if channels not in ("", "S", "C", *_PAGES):
        raise ValueError(f"a stack along {' and '.join(lengths)} is not an image; save its planes as files")
    with _sized(lengths["X"], lengths["Y"], lengths.get(channels, 1), max_pixels):
        array = np.asarray(part.asarray())
    if page.photometric == _WHITE_IS_ZERO and array.dtype.kind == "u":
        array = np.iinfo(array.dtype).max - array
    return rearrange(array, f"{' '.join(lengths)} -> Y X {channels}") if channels else array[..., None]


def by_pillow(file: Image, alpha: bool, max_pixels: int) -> Tensor:
    """Decode an opened file, upright and with its encodings of RGB (palettes, CMYK, ...) as RGB."""
    has_clear_color = file.mode == "P" and "transparency" in file.info
    mode = "RGBA" if has_clear_color else _CONVERTED.get(file.mode, file.mode)
    if not alpha and mode in _WITH_ALPHA:
        mode = mode[:-1]
    with _sized(*file.size, len(file.getbands()), max_pixels):
        file.load()
        turned = file.getexif().get(_ORIENTATION) in range(2, 9)  # or a copy would be made of each
        image = ImageOps.exif_transpose(file) if turned else file
        return _to_tensor(np.array(image if image.mode == mode else image.convert(mode)))


def _upright(array: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Turn (H, W, C) by the orientation tag of EXIF."""
    if not 2 <= orientation <= 8:
        return array
    if orientation >= 5:
        array = rearrange(array, "h w c -> w h c")
    down = orientation in (3, 4, 7, 8)
    right = orientation in (2, 3, 6, 7)
    return np.ascontiguousarray(array[:: -1 if down else 1, :: -1 if right else 1])


@contextmanager
def _sized(width: int, height: int, channels: int, max_pixels: int) -> Iterator[None]:
    """Refuse an empty image, and one that would fill the memory; decode large ones one at a time."""
    if not width * height * channels:
        raise ValueError("the image has no pixels")
    pixels = width * height * ceil(channels / 4)
    if pixels > max_pixels:
        raise ValueError(f"{width} × {height} pixels exceed data.max_pixels={max_pixels}")
    with taking_turns(pixels):
        yield


_turn = RLock()


@contextmanager
def taking_turns(pixels: int) -> Iterator[None]:
    """Let the threads of a process work on large images one after another: each may take a GB."""
    if pixels <= LARGE:
        yield
        return
    with _turn:
        return_freed_memory()  # of the last one
        yield


def _to_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array (H, W) or (H, W, C) of any byte order as a tensor (C, H, W).

    Its channels lie side by side, as in JPEG: so an image is cropped and resized faster.
    """
    native = torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))
    return rearrange(native if native.ndim == 3 else native[..., None], "h w c -> c h w")


_CODESTREAM = b"\xff\x4f\xff\x51"  # of JPEG 2000, by itself or in a file with other parts
KINDS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"RIFF": "WebP",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"\x93NUMPY": "npy",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",  # more than 4 GB
    b"MM\0+": "TIFF",
    b"\0\0\0\x0cjP  \r\n\x87\n": "JPEG 2000",
    _CODESTREAM: "JPEG 2000",
    **dict.fromkeys((b"P4", b"P5", b"P6"), "PPM"),
}
BRANDS = dict.fromkeys((b"avif", b"avis"), "AVIF")
BRANDS |= dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC")
READERS: dict[str, Reader | type[ImageFile]] = {  # or Pillow's
    "PNG": _read_png,
    "npy": _read_npy,
    "TIFF": _read_tiff,
    "JPEG 2000": _read_jpeg2000,
    "HEIC": _read_heif,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
    "PPM": _read_ppm,
}

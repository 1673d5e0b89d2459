"""Readers of file formats, each from bytes to a tensor (C, H, W) of the channels and type that the file has.

A size that no memory holds is refused before anything is decoded. JPEG is decoded by torchvision, which is
faster than Pillow; below its Python function, which since 0.29 warns at every call that torchcodec shall
replace it.
"""

from __future__ import annotations

from io import BytesIO
from math import ceil, prod
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import BmpImagePlugin, GifImagePlugin, ImageOps, JpegImagePlugin, WebPImagePlugin
from PIL.Image import Image
from torch import Tensor
from torchvision.io import ImageReadMode

# Modes of Pillow that are ways to write down RGB, or grey.
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
    """A file that is whole, but that is not read."""


def read_jpeg(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    file = JpegImagePlugin.JpegImageFile(BytesIO(data))
    if file.mode == "CMYK":
        return by_pillow(file, alpha, max_pixels)
    check_size(*file.size, 3, max_pixels)
    return by_torchvision(data)


def read_webp(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    return by_pillow(WebPImagePlugin.WebPImageFile(BytesIO(data)), alpha, max_pixels)


def read_gif(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    return by_pillow(GifImagePlugin.GifImageFile(BytesIO(data)), alpha, max_pixels)


def read_bmp(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    return by_pillow(BmpImagePlugin.BmpImageFile(BytesIO(data)), alpha, max_pixels)


def read_npy(data: bytes, alpha: bool, max_pixels: int) -> Tensor:
    """Read an array (H, W), (C, H, W) or (H, W, C), whose shorter end are the channels."""
    file = BytesIO(data)
    read_header = _NPY_HEADERS.get(np.lib.format.read_magic(file))
    if read_header is None:
        raise Refused("an array of records is no image")
    shape, _, dtype = read_header(file)
    if dtype.kind not in "buif":
        raise Refused(f"an array of {dtype} is no image")
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] == shape[2]):
        raise Refused(f"an array of shape {shape} is no image (height, width) or (channels, height, width)")
    last = len(shape) == 3 and shape[2] < shape[0]
    height, width = shape[:2] if last else shape[-2:]
    check_size(width, height, shape[-1] if last else prod(shape[:-2]), max_pixels)
    if prod(shape) * dtype.itemsize > len(data) - file.tell():
        raise Refused("the file is truncated")
    array = np.load(BytesIO(data), allow_pickle=False)
    return to_tensor(array if last else rearrange(array.reshape(-1, height, width), "c h w -> h w c"))


_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def check_size(width: int, height: int, channels: int, max_pixels: int) -> None:
    """Refuse an image that would fill the memory, or none at all."""
    if not width * height * channels:
        raise Refused("the image has no pixels")
    if width * height * ceil(channels / 4) > max_pixels:
        raise Refused(f"{width} × {height} pixels are more than data.max_pixels={max_pixels}")


def by_torchvision(data: bytes) -> Tensor:
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    upright = True  # as EXIF says
    image: Tensor = torch.ops.image.decode_image(encoded, ImageReadMode.UNCHANGED.value, upright)
    return image


def by_pillow(file: Image, alpha: bool, max_pixels: int) -> Tensor:
    """Decode a file that was opened, upright and without what only encodes RGB."""
    check_size(*file.size, len(file.getbands()), max_pixels)
    see_through = file.mode == "P" and "transparency" in file.info
    mode = "RGBA" if see_through else _CONVERTED.get(file.mode, file.mode)
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

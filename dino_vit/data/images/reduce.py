"""Write image files again with fewer pixels: photos for training, and masks of classes."""

import io
from collections.abc import Callable

import torch
from einops import rearrange
from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from torch.nn import functional as F

from dino_vit.data.images.decode import decode, format_of
from dino_vit.data.images.formats import INDEXED

QUALITY = 95  # of JPEG
_LOSSLESS_WEBP = b"VP8L"  # the first chunk of such a file
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels
# Not by Image.open, which refuses what data.max_pixels allows.
_OPENERS: dict[str, Callable[[io.BytesIO], Image.Image]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
}


class Irreducible(ValueError):
    """A large image that cannot be written again without a loss that nobody asked for."""


def reduce_photo(data: bytes, name: str, side: int) -> bytes | None:
    """Return a file of the image, upright, with `side` pixels on its shorter side; None if it has no more.

    What was lossy becomes JPEG, anything else PNG. The colour profile stays.
    """

    def reduction(height: int, width: int) -> int:  # so that twice the pixels remain to be averaged
        return next((factor for factor in (8, 4, 2) if min(height, width) >= 2 * factor * side), 1)

    kind = format_of(data)
    image = decode(data, name, reduction=reduction)
    if min(image.shape[1:]) <= side:
        return None
    with_alpha = len(image) in (2, 4)
    if image.dtype != torch.uint8 or len(image) > 4 or (with_alpha and kind not in _OPENERS):
        raise Irreducible("it is deeper than 8 bits, or has other channels than grey, RGB and alpha")
    size = _fitted(image.shape[1], image.shape[2], side)
    small = F.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0]
    written = Image.fromarray(rearrange(small, "c y x -> y x c").squeeze(-1).numpy(), _MODES[len(image)])
    profile = _OPENERS[kind](io.BytesIO(data)).info.get("icc_profile") if kind in _OPENERS else None
    lossy = kind == "JPEG" or (kind == "WebP" and data[12:16] != _LOSSLESS_WEBP)
    buffer = io.BytesIO()
    if lossy and not with_alpha:
        written.save(buffer, "JPEG", quality=QUALITY, icc_profile=profile)
    else:
        written.save(buffer, "PNG", icc_profile=profile)
    return buffer.getvalue()


def reduce_mask(data: bytes, side: int) -> bytes | None:
    """Return an indexed PNG with `side` pixels on its shorter side, by nearest neighbours; None as above."""
    file = PngImagePlugin.PngImageFile(io.BytesIO(data)) if format_of(data) == "PNG" else None
    if file is None or file.mode not in INDEXED:
        raise Irreducible("it is no PNG with a palette, or grey with 8 bits")
    if min(file.size) <= side:
        return None
    height, width = _fitted(file.height, file.width, side)
    buffer = io.BytesIO()
    file.resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()


def _fitted(height: int, width: int, side: int) -> tuple[int, int]:
    """Return the size whose shorter side is `side`."""
    shorter = min(height, width)
    return round(height * side / shorter), round(width * side / shorter)

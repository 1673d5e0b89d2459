"""Write images again with fewer pixels."""

import io
from typing import Any

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_vit.data.images.decode import decode, format_of

_QUALITY = 95
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


class NotReducible(Exception):
    """An image is larger, but would lose more than pixels: deep values, or channels that are no colours."""


def reduced_size(height: int, width: int, side: int) -> tuple[int, int]:
    """Return the size of an image whose shorter side is reduced to `side`; the same if it is not larger."""
    shorter = min(height, width)
    if shorter <= side:
        return height, width
    return round(height * side / shorter), round(width * side / shorter)


def reduce_image(item: bytes | Tensor, name: str, side: int) -> bytes | Tensor | None:
    """Return an image as a smaller file, or an array as a smaller array; None if it is not larger.

    The file is upright, and JPEG where the source was lossy, otherwise PNG. It keeps the colour profile.
    """
    image = item if isinstance(item, Tensor) else decode(item, name)
    size = reduced_size(image.shape[1], image.shape[2], side)
    if size == image.shape[1:]:
        return None
    channels = len(image)
    if not isinstance(item, Tensor) and channels in (2, 4):  # alpha, or channels that only TIFF and npy have
        channels = len(decode(item, name, alpha=False))
    if image.dtype != torch.uint8 or channels not in (1, 3):
        raise NotReducible
    # Channels are resized one by one: Pillow would blacken the pixels under a transparent alpha.
    image = F.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0]
    return image if isinstance(item, Tensor) else _encode(image, item)


def _encode(image: Tensor, source: bytes) -> bytes:
    kind, mode = format_of(source), _MODES[len(image)]
    lossy = kind == "JPEG" or (kind == "WebP" and b"VP8L" not in source)
    options: dict[str, Any] = {"format": "PNG"}
    if lossy and mode in ("L", "RGB"):
        options = {"format": "JPEG", "quality": _QUALITY, "subsampling": 0}
    if kind in ("JPEG", "PNG", "WebP"):
        with Image.open(io.BytesIO(source)) as file:
            # A profile of another kind of colours, such as CMYK, is not one of what was decoded.
            if file.mode.removesuffix("A") == mode.removesuffix("A"):
                options["icc_profile"] = file.info.get("icc_profile")
    pixels = rearrange(image, "c y x -> y x c").contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if mode == "L" else pixels).save(buffer, **options)
    return buffer.getvalue()

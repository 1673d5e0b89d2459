"""Tensors as pictures inside a page: data URIs, and many small images on one sheet.

n images, c channels, y x rows and columns
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core.sizes import Size

# Sides and WebP qualities for thumbnails, the best first; the first that fits the page is taken.
THUMBNAILS = ((64, 80), (64, 65), (48, 65), (40, 60), (32, 60), (32, 40), (24, 40), (16, 40))


@dataclass(frozen=True)
class Atlas:
    """Images of one size side by side on one picture, row by row."""

    uri: str
    columns: int
    size: Size


def data_uri(image: Tensor, *, quality: int = 80) -> str:
    """Return a uint8 image (3, y, x) as a WebP that stands in the page itself."""
    buffer = io.BytesIO()
    pixels = rearrange(image, "c y x -> y x c").contiguous().cpu().numpy()
    Image.fromarray(pixels).save(buffer, "WEBP", quality=quality, method=4)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def resized(image: Tensor, size: Size) -> Tensor:
    """Resample a uint8 image (c, y, x)."""
    if image.shape[-2:] == torch.Size(size):
        return image
    return F.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0]


def within(size: Size, side: int) -> Size:
    """Return a size with the same aspect whose longer side is at most `side`."""
    shrink = min(1.0, side / max(size))
    return max(1, round(size[0] * shrink)), max(1, round(size[1] * shrink))


def atlas(images: Tensor, budget: int) -> Atlas:
    """Put uint8 images (n, 3, y, x) on one sheet of at most so many bytes, smaller if need be."""
    part = max(1, len(images) // 400)  # a sample large enough to foresee the size of all
    for side, quality in THUMBNAILS:
        size = within((images.shape[-2], images.shape[-1]), side)
        sample = _sheet(images[::part], size, quality)
        if len(sample.uri) * part > budget:
            continue
        whole = sample if part == 1 else _sheet(images, size, quality)
        if len(whole.uri) <= budget:
            return whole
    raise ValueError(f"{len(images):,} images do not fit a page, however small; take fewer with images=3000")


def _sheet(images: Tensor, size: Size, quality: int) -> Atlas:
    columns = max(1, math.isqrt(len(images) - 1) + 1)
    rows = -(-len(images) // columns)
    cells = torch.zeros(rows * columns, 3, *size, dtype=torch.uint8)
    for place, image in enumerate(images):
        cells[place] = resized(image, size)
    sheet = rearrange(cells, "(row column) c y x -> c (row y) (column x)", row=rows)
    return Atlas(data_uri(sheet, quality=quality), columns, size)


def packed(values: NDArray[np.generic]) -> str:
    """Return an array as base64 of its bytes, little-endian whatever the machine."""
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()

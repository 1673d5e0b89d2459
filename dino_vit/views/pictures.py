"""Pictures of images and maps: overlays and masks, and sheets of many pictures.

Pictures are uint8 (3, H, W).
"""

import base64
import warnings
from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core import Size
from dino_vit.core.storage import replacing
from dino_vit.views.eval_transform import resize

_PANEL_INCHES = 1.5  # the longer side of a picture on a sheet


def as_picture(image: Tensor) -> Tensor:
    """Convert an image (C, H, W), uint8 or float from 0 to 1: RGB as it is, otherwise its first channel."""
    picture = image if len(image) == 3 else image[:1].expand(3, -1, -1)
    return picture if picture.dtype == torch.uint8 else (picture.clamp(0, 1) * 255).round().to(torch.uint8)


def resize_sides(image: Tensor, shorter: int | None, longest: int | None) -> Tensor:
    """Resize an image so that its shorter side is `shorter`, then its longer side at most `longest`."""
    height, width = image.shape[-2:]
    factor = shorter / min(height, width) if shorter else 1.0
    if longest:
        factor = min(factor, longest / max(height, width))
    return resize(image, (max(1, round(height * factor)), max(1, round(width * factor))))


def enlarge(values: Tensor, size: Size, patch: Size, mode: str = "nearest") -> Tensor:
    """Enlarge values of patches (..., y, x) to pixels and crop them to the image's size."""
    pixels = values.shape[-2] * patch[0], values.shape[-1] * patch[1]
    flat = values.float().reshape(1, -1, *values.shape[-2:])
    enlarged = F.interpolate(flat, size=pixels, mode=mode)
    return enlarged.reshape(*values.shape[:-2], *pixels)[..., : size[0], : size[1]]


def relative(values: Tensor) -> Tensor:
    """Divide values of 0 or more by their 97th percentile, at most 1, so that a hot patch hides no others."""
    flat = values.flatten()
    sample = flat[:: 1 + len(flat) // 1_000_000]  # torch.quantile takes at most 2**24 values
    return (values / torch.quantile(sample, 0.97).clamp_min(1e-12)).clamp_max(1)


def heat(values: Tensor) -> Tensor:
    """Colour the relative size of values (H, W) of 0 or more: black, purple, orange, yellow."""
    return _inferno(relative(values))


def _inferno(values: Tensor) -> Tensor:
    from matplotlib import colormaps

    colours = torch.from_numpy(colormaps["inferno"](values.numpy(), bytes=True)[..., :3])
    return rearrange(colours, "y x c -> c y x").contiguous()


def overlay(picture: Tensor, values: Tensor, patch: Size) -> Tensor:
    """Blend the heat of patches (y, x) over their picture, more opaque where the values are larger."""
    values = enlarge(relative(values), (picture.shape[-2], picture.shape[-1]), patch, "bilinear")
    opacity = 0.35 + 0.5 * values.sqrt()
    blended = picture * (1 - opacity) + _inferno(values) * opacity
    return blended.round().to(torch.uint8)


def side_by_side(pictures: Iterable[Tensor]) -> Tensor:
    """Join pictures of one height with white gaps between them."""
    first, *others = pictures
    padded = [F.pad(picture, (4, 0), value=255) for picture in others]
    return torch.cat([first, *padded], dim=2)


def write_png(picture: Tensor, path: Path) -> None:
    """Write a PNG of exactly the picture's pixels."""
    save_png(Image.fromarray(rearrange(picture, "c y x -> y x c").contiguous().numpy()), path)


def save_png(image: Image.Image, path: Path) -> None:
    """Write an image of Pillow as a PNG."""
    with replacing(path) as partial:
        image.save(partial, format="PNG")


def draw_sheet(rows: Sequence[Sequence[Tensor]], *, names: Sequence[str], titles: Sequence[str]) -> bytes:
    """Return a PNG of rows of pictures, with their names at the left and the titles of columns on top."""
    from matplotlib.figure import Figure

    shares = [max(min(1.0, picture.shape[1] / picture.shape[2]) for picture in row) for row in rows]
    heights = [_PANEL_INCHES * share for share in shares]
    size = 1.03 * _PANEL_INCHES * len(titles) + 0.25, 1.03 * sum(heights) + 0.04 * len(rows) + 0.25
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.015, h_pad=0.015, wspace=0, hspace=0)  # type: ignore[union-attr,call-arg]
    axes = figure.subplots(len(rows), len(titles), squeeze=False, height_ratios=heights)
    for picture, axis in zip(chain.from_iterable(rows), axes.flat, strict=True):
        axis.imshow(rearrange(picture, "c y x -> y x c").numpy(), interpolation="antialiased")
        axis.set(xticks=[], yticks=[], anchor="N")
        axis.spines[:].set_visible(False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        axis.set_ylabel(shorten(name), fontsize=6, parse_math=False)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=8)
    sheet = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a letter that the font lacks is drawn as a box
        figure.savefig(sheet, dpi=130, format="png")
    return sheet.getvalue()


def shorten(name: str, length: int = 22) -> str:
    """Return the end of a name that is too long to show."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


TILE_SIDE = 192  # pixels of a picture in a row


class Tile(NamedTuple):
    """A picture and its caption."""

    uri: str
    caption: str


def draw_tile(image: Tensor, caption: str) -> Tile:
    """Draw an image, made smaller if it is large."""
    return Tile(data_uri(resize_sides(as_picture(image), None, TILE_SIDE)), caption)


def draw_patches(colours: Tensor, caption: str) -> Tile:
    """Draw the colours of patches (3, y, x) as squares of whole pixels, which have sharp edges."""
    side = max(1, TILE_SIDE // max(colours.shape))
    return Tile(data_uri(colours.repeat_interleave(side, 1).repeat_interleave(side, 2)), caption)


def data_uri(picture: Tensor, *, quality: int | None = 80) -> str:
    """Return a picture (3, y, x) as a WebP inside a `data:` address; without loss if quality is None."""
    buffer = BytesIO()
    pixels = rearrange(picture, "c y x -> y x c").contiguous().numpy()
    Image.fromarray(pixels).save(buffer, "WEBP", quality=quality or 80, lossless=quality is None, method=4)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def principal_components(values: Tensor, count: int) -> Tensor:
    """Return the first principal components (n, count) of rows (n, d).

    Each is in the direction in which its largest entry is positive, so that it is the same on every machine.
    """
    values = values.double()
    centred = values - values.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    axes = vectors.flip(1)[:, :count]
    return centred @ (axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign())


def principal_colours(tokens: Sequence[Tensor]) -> list[Tensor]:
    """Turn the patch tokens (y, x, d) of some images into colours (y, x, 3) from 0 to 1.

    Red, green and blue are the first three principal components over all patches of all images, so that a
    colour means the same in each. Each component runs from its 1st to its 99th percentile.
    """
    values = principal_components(torch.cat([image.flatten(0, 1) for image in tokens]), 3)
    sample = values[:: 1 + len(values) // 1_000_000]  # torch.quantile takes at most 2**24 values
    low, high = torch.quantile(sample, torch.tensor([0.01, 0.99]).double(), dim=0)
    colours = ((values - low) / (high - low).clamp_min(1e-12)).clamp(0, 1).float()
    parts = colours.split([image.shape[0] * image.shape[1] for image in tokens])
    return [part.reshape(*image.shape[:2], 3) for part, image in zip(parts, tokens, strict=True)]

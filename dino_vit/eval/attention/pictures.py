"""Pictures of maps: a heat laid over its image, and sheets that show several things of several images.

Pictures are uint8 (3, H, W).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core.storage import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = 1.5  # the longer side of a panel on a sheet
DPI = 130


class Panels(NamedTuple):
    """A row of a sheet: the name of an image, and pictures that belong to it."""

    name: str
    pictures: Sequence[Tensor]


def as_picture(image: Tensor) -> Tensor:
    """Show an image (C, H, W), uint8 or float from 0 to 1: RGB as it is, of others the first channel."""
    shown = image if len(image) == 3 else image[:1].expand(3, -1, -1)
    return shown if shown.dtype == torch.uint8 else (shown.clamp(0, 1) * 255).round().to(torch.uint8)


def enlarge(values: Tensor, size: tuple[int, int], patch: tuple[int, int], *, smooth: bool) -> Tensor:
    """Spread values (..., y, x) over their patches and cut off what lies beyond the image's (H, W)."""
    rows, columns = values.shape[-2] * patch[0], values.shape[-1] * patch[1]
    flat = values.float().reshape(1, -1, *values.shape[-2:])
    if smooth:
        spread = F.interpolate(flat, size=(rows, columns), mode="bilinear")
    else:
        spread = F.interpolate(flat, size=(rows, columns), mode="nearest")
    return spread.reshape(*values.shape[:-2], rows, columns)[..., : size[0], : size[1]]


def heat(values: Tensor) -> Tensor:
    """Colour values (H, W) of 0 or more by the share of their largest: black, purple, orange, yellow."""
    from matplotlib import colormaps

    shares = values / values.max().clamp_min(1e-12)
    colours = torch.from_numpy(colormaps["inferno"](shares.numpy(), bytes=True)[..., :3])
    return rearrange(colours, "y x c -> c y x").contiguous()


def overlay(picture: Tensor, values: Tensor) -> Tensor:
    """Lay the heat of values (H, W) over a picture of that size: where it is great, little shows through."""
    share = (values / values.max().clamp_min(1e-12)).sqrt()
    opacity = 0.35 + 0.5 * share
    blended = picture * (1 - opacity) + heat(values) * opacity
    return blended.round().to(torch.uint8)


def spotlight(picture: Tensor, mask: Tensor) -> Tensor:
    """Darken what lies outside a mask (H, W)."""
    return torch.where(mask, picture, picture // 4)


def side_by_side(pictures: Iterable[Tensor], gap: int = 4) -> Tensor:
    """Join pictures of one height with white gaps between them."""
    first, *others = pictures
    between = torch.full((3, first.shape[1], gap), 255, dtype=torch.uint8)
    return torch.cat([first, *(part for picture in others for part in (between, picture))], dim=2)


def write_png(picture: Tensor, path: Path) -> None:
    """Write a PNG of exactly the picture's pixels; what stood there stays until it is whole."""
    from PIL import Image

    buffer = BytesIO()
    Image.fromarray(rearrange(picture, "c y x -> y x c").contiguous().numpy()).save(buffer, "PNG")
    write_bytes(path, buffer.getvalue())


def write_sheet(rows: Sequence[Panels], titles: Sequence[str], path: Path) -> None:
    """Write a PNG with a row an image under one line of titles."""
    buffer = BytesIO()
    sheet(rows, titles).savefig(buffer, dpi=DPI, format="png")
    write_bytes(path, buffer.getvalue())


def sheet(rows: Sequence[Panels], titles: Sequence[str]) -> Figure:
    """Draw the panels of each row side by side, every row as high as its image wants."""
    from matplotlib.figure import Figure

    heights = [_height(row.pictures[0]) for row in rows]
    size = (PANEL_INCHES * 1.03 * len(titles) + 0.25, sum(heights) * 1.03 + 0.25 + 0.04 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.015, h_pad=0.015, wspace=0, hspace=0)  # type: ignore[union-attr,call-arg]
    axes = figure.subplots(len(rows), len(titles), squeeze=False, height_ratios=heights)
    for number, row in enumerate(rows):
        axes[number][0].set_ylabel(shortened(row.name), fontsize=6)
        for axis, picture, title in zip(axes[number], row.pictures, titles, strict=True):
            axis.imshow(rearrange(picture, "c y x -> y x c").numpy(), interpolation="antialiased")
            axis.set_xticks([])
            axis.set_yticks([])
            for spine in axis.spines.values():
                spine.set_visible(False)
            if number == 0:
                axis.set_title(title, fontsize=8)
    return figure


def shortened(name: str, length: int = 22) -> str:
    """Return the end of a name that is too long to show."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _height(picture: Tensor) -> float:
    _, height, width = picture.shape
    return PANEL_INCHES * min(1.0, height / width) if height < width else PANEL_INCHES

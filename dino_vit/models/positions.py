"""Position embeddings: learned or sinusoidal, and their interpolation to any grid.

Three rules are in use, and they agree only at the trained grid, so every backbone names its own:

hf      bicubic to the exact size, without antialiasing (Hugging Face ViT and Dinov2; the default here)
dino    bicubic by a scale factor of (cells + 0.1) / trained cells (DINO)
dinov2  the same rule (DINOv2 without registers)
timm    bicubic to the exact size, with antialiasing (timm; DINOv2 with registers)
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import SymInt, Tensor

Grid = tuple[int, int]
PositionMode = Literal["hf", "dino", "dinov2", "timm"]

DINO_OFFSET = 0.1  # keeps a scale factor from landing one cell short of the grid it means


def interpolate_pos_embs(
    pos_embs: Tensor, grid: Grid, *, trained_grid: Grid, mode: PositionMode = "hf"
) -> Tensor:
    """Resample positions (1, 1 + h·w, d), CLS first, from the trained grid to another (h, w) grid."""
    if mode not in get_args(PositionMode):
        raise ValueError(f"position mode {mode!r} is none of {', '.join(get_args(PositionMode))}")
    if min(grid) < 1:
        raise ValueError(
            f"a grid of {grid[0]} × {grid[1]} patches has no patch; the image must hold at least one"
        )
    by_scale = mode in ("dino", "dinov2")
    of_any_size = any(isinstance(cells, SymInt) for cells in grid)  # in a graph that is being exported
    if of_any_size and by_scale:
        raise ValueError(
            f"positions in mode {mode!r} cannot be exported for any size, as their scale factors are fixed "
            "numbers; export at one size, or take position_mode='hf', which is the same at the trained size"
        )
    if not of_any_size and grid == trained_grid:  # resampling to the trained size is exact, too
        return pos_embs
    cls, patches = pos_embs[:, :1], pos_embs[:, 1:]
    field = rearrange(patches, "1 (h w) d -> 1 d h w", h=trained_grid[0], w=trained_grid[1]).float()
    if by_scale:
        scale = [(cells + DINO_OFFSET) / trained for cells, trained in zip(grid, trained_grid, strict=True)]
        field = F.interpolate(field, scale_factor=scale, mode="bicubic")
    else:
        field = F.interpolate(field, size=grid, mode="bicubic", antialias=mode == "timm")
    patches = rearrange(field, "1 d h w -> 1 (h w) d").to(pos_embs.dtype)
    return torch.cat((cls, patches), dim=1)


def sinusoidal_pos_embs(count: int, width: int) -> Tensor:
    """Return the fixed table (1, count, width): sines in even channels and cosines in odd ones.

    Channels 2i and 2i + 1 turn at 10000^(-2i / width) radians a position.
    """
    channel = torch.arange(width, dtype=torch.float64)
    frequency = 10000 ** (-2 * (channel // 2) / width)
    angle = torch.arange(count, dtype=torch.float64)[:, None] * frequency  # (count, width)
    table = torch.where(channel % 2 == 0, angle.sin(), angle.cos())
    return table.float()[None]

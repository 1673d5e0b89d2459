"""Positions: learned embeddings, interpolated to any grid, or rotations of queries and keys.

Libraries interpolate differently, with equal results at the trained grid alone, so a backbone has a mode:

hf      bicubic to the exact size, without antialiasing (Hugging Face ViT and Dinov2; the default here)
dino    bicubic by a scale factor of (cells + 0.1) / trained cells (DINO)
dinov2  the same (DINOv2 without registers)
timm    bicubic to the exact size, with antialiasing (timm; DINOv2 with registers)
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import SymInt, Tensor

Grid = tuple[int, int]
Rotation = tuple[Tensor, Tensor]  # cosines and sines (N, d) for each patch and channel of a head
PositionMode = Literal["hf", "dino", "dinov2", "timm"]

ROTARY_BASE = 100.0  # of the periods in DINOv3
DINO_OFFSET = 0.1  # keeps rounding of the scale factor from losing a cell


def interpolate_pos_embs(
    pos_embs: Tensor, grid: Grid, *, trained_grid: Grid, mode: PositionMode = "hf"
) -> Tensor:
    """Resample positions (1, 1 + h·w, d), CLS first, from the trained grid to another (h, w) grid."""
    dynamic = any(isinstance(cells, SymInt) for cells in grid)  # torch.export with a dynamic size
    if not dynamic and grid == trained_grid:
        return pos_embs
    cls, patches = pos_embs[:, :1], pos_embs[:, 1:]
    field = rearrange(patches, "1 (h w) d -> 1 d h w", h=trained_grid[0], w=trained_grid[1]).float()
    if mode in ("dino", "dinov2"):
        scale = [(cells + DINO_OFFSET) / trained for cells, trained in zip(grid, trained_grid, strict=True)]
        field = F.interpolate(field, scale_factor=scale, mode="bicubic")
    else:
        field = F.interpolate(field, size=grid, mode="bicubic", antialias=mode == "timm")
    patches = rearrange(field, "1 d h w -> 1 (h w) d").to(pos_embs.dtype)
    return torch.cat((cls, patches), dim=1)


def rotary_positions(grid: Grid, channels: int, *, scale: Tensor) -> Rotation:
    """Return the rotations of the patches of a grid for heads of some channels, as DINOv3 defines them.

    The centre of a patch has coordinates from -1 to 1 along each axis, times each `scale` (n, 1, 1): there
    are (n, N, d) rotations. The channels of the first half are turned with those of the second, half of these
    pairs by the row and half by the column, each with a period of its own.
    """
    numbers: dict[str, Any] = {"dtype": torch.float32, "device": scale.device}
    row, column = (2 * ((torch.arange(cells, **numbers) + 0.5) / cells) - 1 for cells in grid)
    count = channels // 4
    frequency = 1 / ROTARY_BASE ** (torch.arange(count, **numbers) / count)
    rows, columns = row[:, None].expand(grid).flatten(), column.expand(grid).flatten()
    angles = torch.cat([rows[:, None] * frequency, columns[:, None] * frequency], dim=1).tile(2)
    angles = 2 * math.pi * scale * angles
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the patches of queries or keys (B, h, T, d), which are their last tokens; leave the others."""
    cosines, sines = (part.to(x.dtype) for part in rotation)
    first = x.shape[2] - cosines.shape[0]  # len() would fix the size of an exported graph
    patches = x[:, :, first:]
    half, other = patches.chunk(2, dim=-1)
    rotated = patches * cosines + torch.cat([-other, half], dim=-1) * sines
    return torch.cat([x[:, :, :first], rotated], dim=2)

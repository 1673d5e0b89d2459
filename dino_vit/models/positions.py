"""Positions: learned or sinusoidal ones, interpolated to any grid, or rotations of queries and keys.

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
from torch import Tensor

Grid = tuple[int, int]
Rotation = tuple[Tensor, Tensor]  # cosines and sines (N, d) for each patch and channel of a head
PositionMode = Literal["hf", "dino", "dinov2", "timm"]

ROTARY_BASE = 100.0  # of the periods in DINOv3
KEPT_MATRICES = 8  # of a backbone
LARGEST_MATRIX = 2**22  # numbers: to make a larger one would take longer than what it saves
DINO_OFFSET = 0.1  # keeps rounding of the scale factor from losing a cell


def interpolate_pos_embs(
    pos_embs: Tensor,
    grid: Grid,
    trained_grid: Grid,
    mode: PositionMode = "hf",
    matrices: dict[Any, Tensor] | None = None,
) -> Tensor:
    """Resample positions (1, 1 + h·w, d), CLS first, from the trained grid to another (h, w) grid.

    With `matrices`, which keeps those of earlier calls, it is a product with a matrix: its backward pass is
    deterministic, and needs no slow bicubic kernel.
    """
    if grid == trained_grid:
        return pos_embs
    trained = math.prod(trained_grid)
    is_large = max(math.prod(grid), trained) * trained > LARGEST_MATRIX  # it, or what it is made of
    # Under torch.compile the matrix would be computed again in every call.
    if matrices is None or is_large or torch.compiler.is_compiling():
        cls, patches = pos_embs[:, :1], pos_embs[:, 1:]
        field = rearrange(patches, "1 (h w) d -> 1 d h w", h=trained_grid[0]).float()
        patches = rearrange(_resample(field, grid, mode), "1 d h w -> 1 (h w) d")
        return torch.cat((cls, patches.to(pos_embs.dtype)), dim=1)
    key = grid, trained_grid, mode, pos_embs.device
    if (matrix := matrices.get(key)) is None:
        matrix = _matrix(grid, trained_grid, mode, pos_embs.device)
        if len(matrices) >= KEPT_MATRICES:
            matrices.clear()
        if type(matrix) in (Tensor, type(pos_embs)):  # no fake tensor is kept for real positions
            matrices[key] = matrix
    with torch.autocast(pos_embs.device.type, enabled=False):
        return (matrix @ pos_embs[0].float()).to(pos_embs.dtype)[None]


def _matrix(grid: Grid, trained_grid: Grid, mode: PositionMode, device: torch.device) -> Tensor:
    """Return the matrix (1 + cells, 1 + trained cells) that resamples positions and keeps that of CLS."""
    cells = math.prod(trained_grid)
    with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
        identity = torch.eye(cells, device=device).view(1, cells, *trained_grid)
        matrix = F.pad(_resample(identity, grid, mode).flatten(2)[0].T, (1, 0, 1, 0))
        matrix[0, 0].fill_(1)
    return matrix


def _resample(field: Tensor, grid: Grid, mode: PositionMode) -> Tensor:
    """Resample a field (1, n, h, w)."""
    if mode in ("dino", "dinov2"):
        trained = field.shape[-2:]
        scale = [(cells + DINO_OFFSET) / before for cells, before in zip(grid, trained, strict=True)]
        return F.interpolate(field, scale_factor=scale, mode="bicubic")
    return F.interpolate(field, size=grid, mode="bicubic", antialias=mode == "timm")


def sinusoidal_positions(count: int, width: int) -> Tensor:
    """Return fixed positions (1, count, width): sin and cos of i / 10000^(2⌊j/2⌋/width), by turns."""
    channel = torch.arange(width, dtype=torch.float64)
    frequency = 10000 ** (-2 * (channel // 2) / width)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * frequency  # (count, width)
    return torch.where(channel % 2 == 0, angles.sin(), angles.cos()).float()[None]


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

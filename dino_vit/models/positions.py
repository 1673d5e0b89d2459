"""Position embeddings: learned or sinusoidal, and their interpolation to any grid.

Libraries interpolate differently, with equal results at the trained grid alone, so a backbone has a mode:

hf      bicubic to the exact size, without antialiasing (Hugging Face ViT and Dinov2; the default here)
dino    bicubic by a scale factor of (cells + 0.1) / trained cells (DINO)
dinov2  the same (DINOv2 without registers)
timm    bicubic to the exact size, with antialiasing (timm; DINOv2 with registers)
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import SymInt, Tensor

Grid = tuple[int, int]
PositionMode = Literal["hf", "dino", "dinov2", "timm"]

DINO_OFFSET = 0.1  # keeps rounding of the scale factor from losing a cell


def interpolate_pos_embs(
    pos_embs: Tensor, grid: Grid, *, trained_grid: Grid, mode: PositionMode = "hf"
) -> Tensor:
    """Resample positions (1, 1 + h·w, d), CLS first, from the trained grid to another (h, w) grid."""
    by_scale = mode in ("dino", "dinov2")
    dynamic = any(isinstance(cells, SymInt) for cells in grid)  # torch.export with a dynamic size
    if dynamic and by_scale:
        raise ValueError(
            f"position_mode={mode!r} cannot be exported with a dynamic size, because its scale factors are "
            "constants: export a fixed size, or use position_mode='hf', which is equal at the trained size"
        )
    if not dynamic and grid == trained_grid:
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
    """Return fixed sines in even channels and cosines in odd ones, of frequency 10000^(-2i / width)."""
    channel = torch.arange(width, dtype=torch.float64)
    frequency = 10000 ** (-2 * (channel // 2) / width)
    angle = torch.arange(count, dtype=torch.float64)[:, None] * frequency  # (count, width)
    table = torch.where(channel % 2 == 0, angle.sin(), angle.cos())
    return table.float()[None]

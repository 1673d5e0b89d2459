"""Position embeddings: learned or sinusoidal, and their interpolation to any grid.

Libraries interpolate differently, with equal results at the trained grid alone, so a backbone has a mode:

hf      bicubic to the exact size, without antialiasing (Hugging Face ViT and Dinov2; the default here)
dino    bicubic by a scale factor of (cells + 0.1) / trained cells (DINO)
dinov2  the same (DINOv2 without registers)
timm    bicubic to the exact size, with antialiasing (timm; DINOv2 with registers)
"""

from collections.abc import Sequence
from typing import Any, Literal

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
    how: dict[str, Any] = {"size": grid, "antialias": mode == "timm"}
    if by_scale:
        pairs = zip(grid, trained_grid, strict=True)
        how = {"scale_factor": [(cells + DINO_OFFSET) / trained for cells, trained in pairs]}
    if field.is_cuda:  # where the gradient of F.interpolate is added up in any order
        field = resample_by_products(field, **how)
    else:
        field = F.interpolate(field, mode="bicubic", **how)
    patches = rearrange(field, "1 d h w -> 1 (h w) d").to(pos_embs.dtype)
    return torch.cat((cls, patches), dim=1)


def resample_by_products(field: Tensor, *, antialias: bool = False, **pair: Sequence[float]) -> Tensor:
    """Resample (1, d, h, w) bicubically to a `size` or by a `scale_factor`, each a pair for rows and columns.

    As F.interpolate does, but by a product with a matrix of its weights for each axis.
    """
    ((name, values),) = pair.items()
    weights = []
    for cells, value in zip(field.shape[2:], values, strict=True):
        # In a row, as torch 2.15 on a CPU resamples a column alone wrongly with antialiasing.
        unit = rearrange(torch.eye(cells, dtype=field.dtype, device=field.device), "n x -> 1 n 1 x")
        along: dict[str, Any] = {name: (1, value)}
        weights.append(F.interpolate(unit, mode="bicubic", antialias=antialias, **along)[0, :, 0])
    with torch.autocast(field.device.type, enabled=False):  # in float32, as F.interpolate
        return torch.einsum("b d h w, h y, w x -> b d y x", field, *weights)


def sinusoidal_pos_embs(count: int, width: int) -> Tensor:
    """Return fixed sines in even channels and cosines in odd ones, of frequency 10000^(-2i / width)."""
    channel = torch.arange(width, dtype=torch.float64)
    frequency = 10000 ** (-2 * (channel // 2) / width)
    angle = torch.arange(count, dtype=torch.float64)[:, None] * frequency  # (count, width)
    table = torch.where(channel % 2 == 0, angle.sin(), angle.cos())
    return table.float()[None]

"""Gram anchoring (DINOv3): keep what patches have in common with each other as an earlier teacher had it.

b images, n patches, d channels
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.models.positions import Grid


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of the cosines between the patches (b, n, d) of an image."""
    with torch.autocast(student.device.type, enabled=False):
        ours, theirs = (F.normalize(patches.float(), dim=2) for patches in (student, teacher))
        return F.mse_loss(ours @ ours.mT, theirs @ theirs.mT)


def resize_patches(patches: Tensor, grid: Grid, wanted: Grid) -> Tensor:
    """Return patches (b, n, d) of a grid as those of another, by bicubic interpolation."""
    if grid == wanted:
        return patches
    maps = rearrange(patches.float(), "b (y x) d -> b d y x", y=grid[0])  # a CPU resizes no bfloat16
    resized = F.interpolate(maps, size=wanted, mode="bicubic", antialias=True)
    return rearrange(resized, "b d y x -> b (y x) d")

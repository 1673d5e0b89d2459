"""Losses on features: KoLeo, gradients of the view, and those of another backbone (distillation, Gram).

v views (global ones first), g global views, b images, n patches, d channels of the backbone
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.core import Size
from dino_vit.core.distributed import all_gather_equal, all_reduce_mean, rank, world_size
from dino_vit.models.baselines import ORIENTATIONS, normalise_block, orientation_histograms

EPSILON = 1e-8  # as in DINOv2
# Numbers that a patch predicts: the histograms of itself and of its eight neighbours.
AROUND = 3 * 3 * ORIENTATIONS
CLIP = 0.3


def koleo_loss(features: Tensor) -> Tensor:
    """Return minus the mean logarithm of the distance of features (n, d) to the nearest others (KoLeo).

    It pushes images away from their nearest neighbours. The features are L2-normalised first. Neighbours are
    searched among the rows of all processes, and all processes return the same value.
    DistributedDataParallel averages gradients, so those of the rows here are multiplied by the number of
    processes, which gives the gradient of a single process.
    """
    with torch.autocast(features.device.type, enabled=False):
        mine = F.normalize(features.float(), dim=1, eps=EPSILON)
        rows = mine
        if world_size() > 1:
            rows, start = all_gather_equal(mine), rank() * len(mine)
            mine = mine.detach() + world_size() * (mine - mine.detach())
            rows = torch.cat([rows[:start], mine, rows[start + len(mine) :]])
        with torch.no_grad():
            cosines = rows @ rows.T
            nearest = cosines.fill_diagonal_(-1).argmax(dim=1)
        distances = F.pairwise_distance(rows, rows[nearest], eps=EPSILON)
        return -(distances + EPSILON).log().mean()


def gradient_loss(predicted: Tensor, views: Tensor, grid: Size, kept: Tensor | None = None) -> Tensor:
    """Return 1 minus the mean cosine of predictions (b, n, 81) with the gradients around patches.

    `kept` (b, n) are the indices of the patches in the grid, by default all. The mean over all patches of all
    processes is taken off first: what is the same everywhere teaches nothing.
    """
    with torch.autocast(predicted.device.type, enabled=False):
        around = gradients_around(views, grid)
        around = around - all_reduce_mean(around.mean((0, 1)))
        if kept is not None:
            around = around.gather(1, kept[..., None].expand(-1, -1, AROUND))
        return 1 - F.cosine_similarity(predicted.float(), around, dim=2).mean()


def gradients_around(views: Tensor, grid: Size) -> Tensor:
    """Return histograms of the gradients of each patch and its neighbours, (b, n, 81); 0 beyond the view."""
    (height, width), (rows, columns) = views.shape[-2:], grid
    cells = orientation_histograms(views, (height // rows, width // columns))
    return normalise_block(F.unfold(cells, 3, padding=1).mT, 2, CLIP)


def imitation_loss(student: Tensor, teacher: Tensor, *, global_views: int) -> Tensor:
    """Return 1 minus the mean cosine of CLS features (v*b, d) with the backbone's (g*b, d).

    Each global view is compared with the same view, each local one with all global views of its image.
    """
    with torch.autocast(student.device.type, enabled=False):
        images = len(teacher) // global_views
        units = (F.normalize(features.float(), dim=1) for features in (student, teacher))
        ours, theirs = (rearrange(unit, "(v b) d -> v b d", b=images) for unit in units)
        global_cosines = (ours[:global_views] * theirs).sum(-1)
        local_cosines = (ours[global_views:] * theirs.mean(0)).sum(-1)
        return 1 - torch.cat([global_cosines, local_cosines]).mean()


def cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return 1 minus the mean cosine of patches (b, n, d) with the same patches of the backbone."""
    with torch.autocast(student.device.type, enabled=False):
        return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1).mean()


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of the cosines between the patches (b, n, d) of an image."""
    with torch.autocast(student.device.type, enabled=False):
        ours, theirs = (F.normalize(patches.float(), dim=2) for patches in (student, teacher))
        return F.mse_loss(ours @ ours.mT, theirs @ theirs.mT)


def resize_patches(patches: Tensor, grid: Size, new_grid: Size) -> Tensor:
    """Resize patches (b, n, d) of a grid to another grid by bicubic interpolation."""
    if grid == new_grid:
        return patches
    maps = rearrange(patches.float(), "b (y x) d -> b d y x", y=grid[0])  # a CPU resizes no bfloat16
    resized = F.interpolate(maps, size=new_grid, mode="bicubic", antialias=True)
    return rearrange(resized, "b d y x -> b (y x) d")

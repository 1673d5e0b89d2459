"""Imitation: the student learns the features of a frozen backbone that has no heads.

v views (global ones first), g global views, b images, n patches, d channels of that backbone
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.core import Size
from dino_vit.method.objective import Seen, Sizes, Term
from dino_vit.models.student_teacher import Need, Outputs

CLS, PATCHES = Need("cls"), Need("patches")  # of the frozen backbone
OUR_CLS, OUR_PATCHES = Need("cls", "head"), Need("patches", "patch_head")


class Imitation(Term):
    """1 minus the cosine of the projected CLS tokens with those of the backbone."""

    name = "imitation"
    needs, teacher_needs = (OUR_CLS,), (CLS,)

    def target(self, outputs: Outputs, seen: Seen) -> Tensor:
        return outputs[CLS]

    def loss(self, outputs: Outputs, target: Tensor, seen: Seen) -> Tensor:
        return imitation_loss(outputs[OUR_CLS], target, global_views=self.sizes.global_views)

    def figures(self, sums: Mapping[str, Tensor], micro_batches: int) -> dict[str, Tensor]:
        return {}  # as the first term it is the loss of the step


class PatchImitation(Term):
    """The same of the patches of the global views, on the student's grid."""

    name = "imitated_patches"
    title, caption = "Imitated patches", "1 minus the cosine with those of the frozen teacher."
    needs, teacher_needs = (OUR_PATCHES,), (PATCHES,)

    def __init__(self, weight: float, sizes: Sizes, grid: Size) -> None:
        super().__init__(weight, sizes)
        self.grid = grid  # of the patches of the backbone

    def target(self, outputs: Outputs, seen: Seen) -> Tensor:
        return resize_patches(outputs[PATCHES], self.grid, self.sizes.grid)

    def loss(self, outputs: Outputs, target: Tensor, seen: Seen) -> Tensor:
        return cosine_loss(outputs[OUR_PATCHES][: len(target)], target)


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
    """Return 1 minus the mean cosine of patches (g·b, n, d) with the same patches of the backbone."""
    with torch.autocast(student.device.type, enabled=False):
        return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1).mean()


def resize_patches(patches: Tensor, grid: Size, new_grid: Size) -> Tensor:
    """Resize patches (g·b, n, d) of a grid to another grid by bicubic interpolation."""
    if grid == new_grid:
        return patches
    maps = rearrange(patches.float(), "b (y x) d -> b d y x", y=grid[0])  # a CPU resizes no bfloat16
    resized = F.interpolate(maps, size=new_grid, mode="bicubic", antialias=True)
    return rearrange(resized, "b d y x -> b (y x) d")

"""Gram anchoring: the patches of an image stay as similar to each other as an earlier teacher sees them.

g global views, b images, n patches, d channels
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.method.objective import Seen, Sizes, Term
from dino_vit.method.terms.imitation import resize_patches
from dino_vit.models.backbone import Backbone
from dino_vit.models.student_teacher import Need, Outputs

PATCHES = Need("patches")


class Gram(Term):
    """The distance of the patch Gram matrices of the global views from those of an earlier teacher."""

    name = "gram"
    title = "Gram"
    caption = "Part of the loss: how far patches are from being as alike as in an earlier network."
    needs = (PATCHES,)

    def __init__(self, weight: float, sizes: Sizes, teacher: Backbone) -> None:
        super().__init__(weight, sizes)
        self.teacher = teacher.requires_grad_(False)

    def target(self, outputs: Outputs, seen: Seen) -> Tensor:
        patches = self.teacher.forward_features(seen.original)[:, self.teacher.first_patch :]
        return resize_patches(patches, self.teacher.grid_of(*seen.original.shape[-2:]), self.sizes.grid)

    def loss(self, outputs: Outputs, target: Tensor, seen: Seen) -> Tensor:
        return gram_loss(outputs[PATCHES][: len(target)], target)


def gram_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of the cosines between the patches (g·b, n, d) of an image."""
    with torch.autocast(student.device.type, enabled=False):
        ours, theirs = (F.normalize(patches.float(), dim=2) for patches in (student, teacher))
        return F.mse_loss(ours @ ours.mT, theirs @ theirs.mT)

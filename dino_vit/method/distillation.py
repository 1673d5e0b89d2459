"""The loss of a student that imitates the features of a frozen backbone.

v views (global ones first), g global views, b images, n patches, d channels of the backbone
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def imitation_loss(student: Tensor, teacher: Tensor, *, global_views: int) -> Tensor:
    """Return 1 minus the mean cosine of CLS features (v*b, d) with the backbone's (g*b, d).

    Each global view is compared with the same view, each local one with all global views of its image.
    """
    with torch.autocast(student.device.type, enabled=False):
        units = (F.normalize(one.float(), dim=1) for one in (student, teacher))
        ours, theirs = (rearrange(unit, "(v b) d -> v b d", b=len(teacher) // global_views) for unit in units)
        of_globals = (ours[:global_views] * theirs).sum(-1)
        of_locals = (ours[global_views:] * theirs.mean(0)).sum(-1)
        return 1 - torch.cat([of_globals, of_locals]).mean()


def cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return 1 minus the mean cosine of patches (b, n, d) with the same patches of the backbone."""
    with torch.autocast(student.device.type, enabled=False):
        return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1).mean()

"""The student and the teacher: two networks of the same architecture.

v views (global ones first), b images
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.models.head import DINOHead
from dino_vit.models.vit import VisionTransformer


class Output(NamedTuple):
    """The output of a network for its views, in their order."""

    cls: Tensor  # (v·b, width)
    features: Tensor  # (v·b, bottleneck), L2-normalised
    prototypes: Tensor  # (prototypes, bottleneck)

    def logits(self) -> Tensor:
        """Return the logits, (v·b, prototypes), in float32 under autocast too."""
        # Divided by a teacher temperature of 0.04, bfloat16's rounding of a logit near 1 would become 0.05.
        with torch.autocast(self.features.device.type, enabled=False):
            return F.linear(self.features, self.prototypes)


class Network(nn.Module):
    """A backbone and a projection head: one backbone pass per view size, one head pass for all."""

    def __init__(self, backbone: VisionTransformer, head: DINOHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, views: Sequence[Tensor]) -> Output:
        """Compute the output for views by size, each (views of that size · b, C, h, w)."""
        cls = torch.cat([self.backbone(view) for view in views])
        # The prototypes are returned too, so that DistributedDataParallel sees all parameters in use.
        return Output(cls, self.head.project(cls), self.head.last_layer.weight())


def build_networks(
    *, backbone: Mapping[str, Any], drop_path: float, head: Mapping[str, Any]
) -> tuple[Network, Network]:
    """Return a student and a teacher with the same weights; the teacher needs no gradient."""
    student, teacher = (
        Network(VisionTransformer(**backbone, drop_path=rate), DINOHead(in_dim=backbone["width"], **head))
        for rate in (drop_path, 0.0)
    )
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    return student, teacher


def first_rows(views: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return the first rows of the first size, that is of the global views."""
    return [views[0][:rows]]


def embedding_std(cls: Tensor) -> Tensor:
    """Return the spread of normalised CLS features: 1 if uniform on the sphere, 0 if all are equal."""
    unit = F.normalize(cls.float(), dim=-1)
    return unit.std(dim=0).mean() * unit.shape[1] ** 0.5

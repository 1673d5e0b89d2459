"""The student and its teacher: two equal networks, of which the second follows the first.

g global views, v all views (global ones first), b images, d features
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.models.head import DINOHead
from dino_vit.models.vit import VisionTransformer


class Output(NamedTuple):
    """What a network says of its views, in their order."""

    cls: Tensor  # (v·b, width)
    features: Tensor  # (v·b, bottleneck), of unit length
    prototypes: Tensor  # (prototypes, bottleneck)

    def logits(self) -> Tensor:
        """Return the cosines with the prototypes, (v·b, prototypes)."""
        return F.linear(self.features, self.prototypes)


class Network(nn.Module):
    """A backbone and its projection head: one pass of the backbone a view size, one of the head."""

    def __init__(self, backbone: VisionTransformer, head: DINOHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, views: Sequence[Tensor]) -> Output:
        """Take views by size, each (views of that size · b, C, h, w)."""
        cls = torch.cat([self.backbone(view) for view in views])
        # The prototypes leave with the features, so that a wrapper sees every parameter that was used.
        return Output(cls, self.head.project(cls), self.head.prototype_weight())


def build_networks(
    *, backbone: Mapping[str, Any], drop_path: float, head: Mapping[str, Any]
) -> tuple[Network, Network]:
    """Return a student and, equal to it in every parameter, its teacher, which takes no gradient."""
    student, teacher = (
        Network(VisionTransformer(**backbone, drop_path=rate), DINOHead(in_dim=backbone["width"], **head))
        for rate in (drop_path, 0.0)
    )
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    return student, teacher


def first_rows(views: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return the first rows of the first size: the global views, which stand before all others."""
    return [views[0][:rows]]


def embedding_std(cls: Tensor) -> Tensor:
    """Return how far CLS features of different images spread: 1 for all over the sphere, 0 for one point."""
    unit = F.normalize(cls.float(), dim=-1)
    return unit.std(dim=0).mean() * unit.shape[1] ** 0.5

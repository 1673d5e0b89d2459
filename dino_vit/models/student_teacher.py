"""The student and the teacher: two networks of the same architecture.

v views (global ones first), b images
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.models.head import DINOHead
from dino_vit.models.masks import Masks
from dino_vit.models.vit import VisionTransformer


class Projection(NamedTuple):
    """Features, and the prototypes whose products with them are the logits."""

    features: Tensor  # (rows, bottleneck), L2-normalised
    prototypes: Tensor  # (prototypes, bottleneck)


class Output(NamedTuple):
    """The output of a network for its views, in their order."""

    cls: Tensor  # (v·b, width)
    projection: Projection  # of cls
    patches: Projection | None = None  # of the masked patches
    tokens: Tensor | None = None  # (v·b, N, width): all patches of the views of the first size


class Network(nn.Module):
    """A backbone and a projection head: one backbone pass per view size, one head pass for all.

    Masked patches pass a head of their own, or the same one.
    """

    def __init__(
        self, backbone: VisionTransformer, head: DINOHead, patch_head: DINOHead | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.patch_head = patch_head

    def forward(
        self,
        views: Sequence[Tensor],
        masks: Masks | None = None,
        *,
        hide: bool = False,
        all_patches: bool = False,
    ) -> Output:
        """Compute the output for views by size, each (views of that size · b, C, h, w).

        The masks are of the first views of the first size, the global ones; with `hide` the mask token
        replaces their masked patches.
        """
        if masks is None and not all_patches:
            return self._output(torch.cat([self.backbone(view) for view in views]))
        hidden, tokens, patches = None, None, None
        if masks is not None and hide:
            hidden = F.pad(masks.hidden, (0, 0, 0, len(views[0]) - len(masks.hidden)))
        if all_patches:
            whole = self.backbone.forward_features(views[0], hidden)
            cls, tokens = whole[:, 0], whole[:, 1 + self.backbone.registers :]
            patches = None if masks is None else tokens.flatten(0, 1)[masks.places]
        else:
            assert masks is not None
            cls, patches = self.backbone.forward_masked(views[0], hidden, masks.places)
        output = self._output(torch.cat([cls, *(self.backbone(view) for view in views[1:])]), tokens)
        if masks is None or patches is None:
            return output
        head, prototypes = self.head, output.projection.prototypes
        if self.patch_head:
            head, prototypes = self.patch_head, self.patch_head.last_layer.weight()
        # Without the padding of the places, which have a fixed number for a compiled backbone.
        return output._replace(patches=Projection(head.project(patches[: masks.masked]), prototypes))

    @property
    def heads(self) -> list[DINOHead]:
        """The head of the CLS token, and that of masked patches if it is another."""
        return [self.head, *([self.patch_head] if self.patch_head else [])]

    def _output(self, cls: Tensor, tokens: Tensor | None = None) -> Output:
        # The prototypes are returned too, so that DistributedDataParallel sees all parameters in use.
        projection = Projection(self.head.project(cls), self.head.last_layer.weight())
        return Output(cls, projection, tokens=tokens)


def build_networks(
    *, backbone: Mapping[str, Any], drop_path: float, head: Mapping[str, Any], patch_head: bool = False
) -> tuple[Network, Network]:
    """Return a student and a teacher with the same weights; the teacher needs no gradient."""

    def build(rate: float) -> Network:
        vit = VisionTransformer(**backbone, drop_path=rate)
        heads = [DINOHead(in_dim=vit.width, **head) for _ in range(1 + patch_head)]
        return Network(vit, *heads)

    student, teacher = build(drop_path), build(0.0)
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

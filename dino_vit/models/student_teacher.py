"""The student and the teacher: two networks of the same architecture.

v views (global ones first), b images
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dino_vit.models.backbone import Backbone
from dino_vit.models.head import DINOHead, FeatureHead, convert_sync_batchnorm
from dino_vit.models.vit import VisionTransformer

Head = DINOHead | FeatureHead
T = TypeVar("T")


class Masks(NamedTuple):
    """The masked patches of some views, of which each has N patches."""

    mask: Tensor  # bool (views, N)
    mask_indices: Tensor  # int64 (masked,): indices into the flattened mask
    weights: Tensor  # float32 (masked,): 1 / number of masked patches of the same view

    @classmethod
    def of(cls, mask: Tensor) -> "Masks":
        """Return the masks of a boolean mask (views, N)."""
        weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return cls(mask, mask.flatten().nonzero().squeeze(1), weights[mask])

    def to(self, device: torch.device) -> "Masks":
        """Return the masks on a device, which the host does not wait for."""
        return Masks(*(part.to(device, non_blocking=True) for part in self))

    def pin_memory(self) -> "Masks":
        """Return the masks in pinned memory."""
        return Masks(*(part.pin_memory() for part in self))


class Projection(NamedTuple):
    """Features, and the prototypes whose products with them are the logits."""

    features: Tensor  # (rows, bottleneck), L2-normalised
    prototypes: Tensor  # (prototypes, bottleneck); none of a FeatureHead


class Output(NamedTuple):
    """The output of a network for its views, in their order."""

    cls: Tensor  # (v·b, width)
    projection: Projection  # of cls
    patches: Projection | None = None  # of the masked patches, or of all
    tokens: Tensor | None = None  # (v·b, N, width): all patches of the views of the first size, if asked for


class Network(nn.Module):
    """A backbone and a projection head: one backbone pass per view size, one head pass for all.

    Masked patches pass a head of their own, or the same one; with a `FeatureHead` all patches pass it.
    """

    def __init__(self, backbone: Backbone, head: Head, patch_head: Head | None = None) -> None:
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
        mask = None
        if masks is not None and hide:
            mask = F.pad(masks.mask, (0, 0, 0, len(views[0]) - len(masks.mask)))
        drawn = self.backbone.draw_scales(views), self.backbone.draw_visible(views[0])
        cls, tokens = self.features(views, mask, masks is not None or all_patches, *drawn)
        # The prototypes are returned too, so that DistributedDataParallel sees all parameters in use.
        projection = Projection(self.head.project(cls), self.head.prototypes)
        if tokens is None:
            return Output(cls, projection)
        patches = tokens if masks is None else tokens.flatten(0, 1)[masks.mask_indices]
        if self.patch_head is not None:
            of_patches = Projection(self.patch_head.project(patches), self.patch_head.prototypes)
        elif masks is not None:
            of_patches = Projection(self.head.project(patches), projection.prototypes)
        else:
            of_patches = None
        return Output(cls, projection, of_patches, tokens if all_patches else None)

    def features(
        self,
        views: Sequence[Tensor],
        mask: Tensor | None,
        all_patches: bool,
        scales: Sequence[Tensor] | None,
        visible: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the CLS tokens of all views, and all patches of the first size if asked for.

        This is what `run.compile` compiles: the shapes are the same in each step.
        """
        first, *others = self.backbone.forward_views(
            views, mask, tokens=all_patches, scales=scales, visible=visible
        )
        if not all_patches:
            return torch.cat([first, *others]), None
        return torch.cat([first[:, 0], *others]), first[:, self.backbone.first_patch :]

    def with_full_weights(self, work: Callable[[Backbone], T]) -> T:
        """Call a function with the backbone; FSDP gathers its weights meanwhile."""
        return work(self.backbone)

    @property
    def heads(self) -> list[Head]:
        """The head of the CLS token, and that of patches if it is another."""
        return [self.head, *([self.patch_head] if self.patch_head else [])]


def build_networks(
    *,
    backbone: Mapping[str, Any],
    drop_path: float,
    patch_drop: float = 0.0,
    head: Mapping[str, Any],
    patch_head: bool = False,
    feature_dim: int | None = None,
) -> tuple[Network, Network]:
    """Return a student and a teacher with the same weights; the teacher needs no gradient.

    With `name` their backbone is a model of timm; with `feature_dim` their heads project to features of that
    width, without prototypes.
    """

    def build(rate: float) -> Network:
        built: Backbone
        if "name" in backbone:
            from dino_vit.models.timm_backbone import TimmBackbone

            built = TimmBackbone(**backbone, drop_path=rate)
        else:
            built = VisionTransformer(**backbone, drop_path=rate)
        network = Network(built, *(build_head(built.width) for _ in range(1 + patch_head)))
        convert_sync_batchnorm(network)
        return network

    def build_head(width: int) -> Head:
        if feature_dim:
            return FeatureHead(in_dim=width, out_dim=feature_dim)
        return DINOHead(in_dim=width, **head)

    student, teacher = build(drop_path), build(0.0)
    if patch_drop:
        student.backbone.patch_drop = patch_drop
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False).eval()  # its targets are a function of the images
    for module in teacher.modules():  # a BatchNorm takes the statistics of the batch, as in 2021
        module.training = isinstance(module, _BatchNorm)
    return student, teacher

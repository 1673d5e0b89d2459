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
from dino_vit.models.multicrop import Drops, forward_multicrop, sample_drops
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


class NetworkOutput(NamedTuple):
    """What the student computes of its views, in their order; a teacher is a network too and gives the same.

    Logits are the products of features, which are L2-normalised, with prototypes; the loss computes them.
    """

    cls: Tensor  # (v·b, width)
    features: Tensor  # (v·b, bottleneck): the projections of cls
    prototypes: Tensor  # (prototypes, bottleneck); none of a FeatureHead
    patch_features: Tensor | None = None  # (patches, bottleneck): of the masked patches, or of all
    patch_prototypes: Tensor | None = None
    tokens: Tensor | None = None  # (v·b, N, width): all patches of the views of the first size, if asked for
    gradients: Tensor | None = None  # (v·b·kept, n): predicted around patches of the views of the first size
    kept_patches: Tensor | None = None  # (v·b, kept): indices of these patches; None for all


class Network(nn.Module):
    """A backbone and a projection head: one backbone pass for all view sizes, one head pass for all.

    Masked patches pass a head of their own, or the same one; with a `FeatureHead` all patches pass it.
    In training `patch_drop` is the share of the patches of global views that are left out. They and
    stochastic depth are drawn from `generator`, if the training loop sets one, or PyTorch's own.
    The student may have a `gradient_head`, with which the patches of global views predict, after half of the
    blocks, the gradients of the image around them; training alone uses it.
    """

    def __init__(
        self, backbone: Backbone, head: Head, patch_head: Head | None = None, *, patch_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.patch_head = patch_head
        self.gradient_head: nn.Module | None = None
        self.patch_drop = patch_drop
        self.generator: torch.Generator | None = None

    def forward(
        self,
        views: Sequence[Tensor],
        masks: Masks | None = None,
        *,
        use_mask_token: bool = False,
        all_patches: bool = False,
    ) -> NetworkOutput:
        """Compute the output for views by size, each (views of that size · b, C, h, w).

        The masks are of the first views of the first size, the global ones; with `use_mask_token` the mask
        token replaces their masked patches.
        """
        mask = None
        if masks is not None and use_mask_token:
            mask = F.pad(masks.mask, (0, 0, 0, len(views[0]) - len(masks.mask)))
        drops = sample_drops(self.backbone, views, self.patch_drop, self.generator)
        cls, tokens, middle = self.run_backbone(views, mask, masks is not None or all_patches, drops)
        # The prototypes are returned too, so that DistributedDataParallel sees all parameters in use.
        out = NetworkOutput(cls, self.head.project(cls), self.head.prototypes)
        if self.gradient_head is not None and middle is not None:
            kept, first = drops.kept_tokens, self.backbone.first_patch
            kept_patches = None if kept is None else kept[:, first:] - first
            out = out._replace(gradients=self.gradient_head(middle.flatten(0, 1)), kept_patches=kept_patches)
        if tokens is None:
            return out
        patches = tokens if masks is None else tokens.flatten(0, 1)[masks.mask_indices]
        if self.patch_head is not None:
            prototypes = self.patch_head.prototypes
            out = out._replace(patch_features=self.patch_head.project(patches), patch_prototypes=prototypes)
        elif masks is not None:
            out = out._replace(patch_features=self.head.project(patches), patch_prototypes=out.prototypes)
        return out._replace(tokens=tokens) if all_patches else out

    def run_backbone(
        self, views: Sequence[Tensor], mask: Tensor | None, all_patches: bool, drops: Drops
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the CLS tokens of all views, and patches of the first size, if asked for.

        These are all after the last block, and those that are kept after half of the blocks. This is what
        `compute.compile` compiles: the shapes are the same in each step.
        """
        halfway = self.gradient_head is not None
        parts = forward_multicrop(self.backbone, views, mask, tokens=all_patches, middle=halfway, drops=drops)
        patches = slice(self.backbone.first_patch, None)
        middle = parts.pop()[:, patches] if halfway else None
        if not all_patches:
            return torch.cat(parts), None, middle
        return torch.cat([parts[0][:, 0], *parts[1:]]), parts[0][:, patches], middle

    def run_unsharded(self, work: Callable[[Backbone], T]) -> T:
        """Return work(backbone); FSDP, where it shards the network, gathers the weights for the call."""
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
    gradients: int = 0,
) -> tuple[Network, Network]:
    """Return a student and a teacher with the same weights; the teacher needs no gradient.

    With `name` their backbone is a model of timm; with `feature_dim` their heads project to features of that
    width, without prototypes. The student has a head that predicts so many numbers of `gradients`.
    """

    def build(dropping: Mapping[str, float], patches: float = 0.0) -> Network:
        built: Backbone
        if "name" in backbone:
            from dino_vit.models.timm_backbone import TimmBackbone

            built = TimmBackbone(**backbone, drop_path=dropping["drop_path"])
        else:
            built = VisionTransformer(**{**backbone, **dropping})
        network = Network(
            built, *(build_head(built.width) for _ in range(1 + patch_head)), patch_drop=patches
        )
        convert_sync_batchnorm(network)
        return network

    def build_head(width: int) -> Head:
        if feature_dim:
            return FeatureHead(in_dim=width, out_dim=feature_dim)
        return DINOHead(in_dim=width, **head)

    student = build({"drop_path": drop_path}, patch_drop)
    teacher = build({"drop_path": 0.0, "dropout": 0.0, "attention_dropout": 0.0})
    teacher.load_state_dict(student.state_dict())
    if gradients:
        width = student.backbone.width
        student.gradient_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, gradients))
    teacher.requires_grad_(False).eval()  # its targets are a function of the images
    for module in teacher.modules():  # a BatchNorm takes the statistics of the batch, as in 2021
        module.training = isinstance(module, _BatchNorm)
    return student, teacher

"""The student and the teacher: two networks of the same architecture.

v views (global ones first), b images
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.models.backbone import Backbone
from dino_vit.models.batch_norm import synchronise
from dino_vit.models.head import DINOHead, FeatureHead
from dino_vit.models.masks import Masks
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer

Head = DINOHead | FeatureHead
T = TypeVar("T")


class Projection(NamedTuple):
    """Features, and the prototypes whose products with them are the logits."""

    features: Tensor  # (rows, bottleneck), L2-normalised
    prototypes: Tensor  # (prototypes, bottleneck); none of a FeatureHead


class Output(NamedTuple):
    """The output of a network for its views, in their order."""

    cls: Tensor  # (v·b, width)
    projection: Projection  # of cls
    patches: Projection | None = None  # of the masked patches, or of all
    tokens: Tensor | None = None  # (v·b, N, width): all patches of the views of the first size


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
        hidden = None
        if masks is not None and hide:
            hidden = F.pad(masks.hidden, (0, 0, 0, len(views[0]) - len(masks.hidden)))
        places = None if masks is None else masks.places
        cls, patches, tokens = self.features(views, hidden, places, all_patches)
        # The prototypes are returned too, so that DistributedDataParallel sees all parameters in use.
        projection = Projection(self.head.project(cls), self.head.prototypes)
        output = Output(cls, projection, tokens=tokens)
        if isinstance(self.patch_head, FeatureHead) and tokens is not None:
            return output._replace(
                patches=Projection(self.patch_head.project(tokens), self.patch_head.prototypes)
            )
        if masks is None or patches is None:
            return output
        head, prototypes = self.head, projection.prototypes
        if self.patch_head:
            head, prototypes = self.patch_head, self.patch_head.prototypes
        # Without the padding of the places, which have a fixed number for the compiled `features`.
        return output._replace(patches=Projection(head.project(patches[: masks.masked]), prototypes))

    def features(
        self, views: Sequence[Tensor], hidden: Tensor | None, places: Tensor | None, all_patches: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the CLS tokens of all views, the patches at some places, and all patches of the first size.

        This is what `run.compile` compiles: the shapes are the same in each step.
        """
        patches = tokens = None
        if all_patches:
            whole = self.backbone.forward_features(views[0], hidden)
            cls, tokens = whole[:, 0], whole[:, self.backbone.first_patch :]
            patches = None if places is None else tokens.flatten(0, 1)[places]
        elif places is None:
            cls = self.backbone(views[0])
        else:
            assert isinstance(self.backbone, VisionTransformer)
            cls, patches = self.backbone.forward_masked(views[0], hidden, places)
        return torch.cat([cls, *(self.backbone(view) for view in views[1:])]), patches, tokens

    def use(self, work: Callable[[Backbone], T]) -> T:
        """Call a function with the backbone; where processes share the weights, they are whole meanwhile."""
        return work(self.backbone)

    @property
    def heads(self) -> list[Head]:
        """The head of the CLS token, and that of patches if it is another."""
        return [self.head, *([self.patch_head] if self.patch_head else [])]


def build_networks(
    *,
    backbone: Mapping[str, Any],
    drop_path: float,
    head: Mapping[str, Any],
    patch_head: bool = False,
    imitated: int | None = None,
) -> tuple[Network, Network]:
    """Return a student and a teacher with the same weights; the teacher needs no gradient.

    If they imitate features, of the width `imitated`, their heads have no prototypes.
    """

    def build(rate: float) -> Network:
        kind = TimmBackbone if "name" in backbone else VisionTransformer
        built = kind(**backbone, drop_path=rate)
        synchronise(built)
        return Network(built, *(build_head(built.width) for _ in range(1 + patch_head)))

    def build_head(width: int) -> Head:
        if imitated:
            return FeatureHead(in_dim=width, out_dim=imitated)
        return DINOHead(in_dim=width, **head)

    student, teacher = build(drop_path), build(0.0)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    return student, teacher


def embedding_std(cls: Tensor) -> Tensor:
    """Return the spread of normalised CLS features: 1 if uniform on the sphere, 0 if all are equal."""
    unit = F.normalize(cls.float(), dim=-1)
    return unit.std(dim=0).mean() * unit.shape[1] ** 0.5

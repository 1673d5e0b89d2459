"""Multi-crop: views of several sizes pass a backbone together, and training leaves some of it out.

A vision transformer computes all sizes by one operator, but for attention; other backbones take them one
after another.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dino_vit.core.distributed import to_device
from dino_vit.models.backbone import Backbone
from dino_vit.models.layers import call_with_cast_weights
from dino_vit.models.sequences import draw_drop_path, sequences_of_blocks, spread_drops
from dino_vit.models.vit import VisionTransformer


class Drops(NamedTuple):
    """What a forward pass in training leaves out."""

    branches: Tensor | None = None  # (depth, 2, ΣB, 1, 1): what stochastic depth multiplies branches by
    visible: Tensor | None = None  # (B, 1 + R + kept): the tokens that stay, of images of the first size


NOTHING = Drops()


def draw_drops(backbone: Backbone, views: Sequence[Tensor], patch_drop: float = 0.0) -> Drops:
    """Draw what is left out, by PyTorch's generator, which the training loop has seeded for this pass.

    `patch_drop` is the share of the patches of the first size. Models of timm draw for themselves.
    """
    if not isinstance(backbone, VisionTransformer) or not backbone.training:
        return NOTHING
    images, branches, visible = views[0], None, None
    if any(backbone.drop_path_rates):
        count = sum(view.shape[0] for view in views)
        branches = draw_drop_path(backbone.drop_path_rates, count, images.device)
    if patch_drop:
        patches = math.prod(backbone.grid_of(*images.shape[-2:]))
        kept = max(1, round(patches * (1 - patch_drop)))
        chosen = torch.rand(images.shape[0], patches).argsort(1)[:, :kept].sort(1).values
        others = torch.arange(backbone.first_patch).expand(images.shape[0], -1)
        visible = to_device(torch.cat([others, backbone.first_patch + chosen], dim=1), images.device)
    return Drops(branches, visible)


def forward_multicrop(
    backbone: Backbone,
    views: Sequence[Tensor],
    mask: Tensor | None = None,
    *,
    tokens: bool = False,
    drops: Drops = NOTHING,
) -> list[Tensor]:
    """Return the CLS features (B, D) of images of several sizes; with `tokens` all tokens of the first.

    The mask token replaces the patches of the first size that are masked (B, N).
    """
    if not isinstance(backbone, VisionTransformer):
        first = backbone.forward_features(views[0], mask) if tokens else backbone.forward_cls(views[0])
        return [first, *map(backbone.forward_cls, views[1:])]
    parts = [backbone.embed_patches(view, None if i else mask) for i, view in enumerate(views)]
    if drops.visible is not None:
        parts[0] = parts[0].gather(1, drops.visible[..., None].expand(-1, -1, backbone.width))
    only_cls = [not (tokens and i == 0) for i in range(len(views))]
    shapes = [(part.shape[0], part.shape[1]) for part in parts]
    of_blocks = sequences_of_blocks(shapes, [backbone.rotations(view) for view in views], only_cls)
    x = of_blocks[0].join(parts)
    layers = zip(backbone.blocks, of_blocks, spread_drops(of_blocks, drops.branches), strict=True)
    for block, sequences, drop in layers:
        x = backbone.run(partial(call_with_cast_weights, block), x, sequences, drop)
    parts = of_blocks[-1].after().split(backbone.norm(x), -1)
    return [part[:, 0] if only else part for part, only in zip(parts, only_cls, strict=True)]

"""Multi-crop: views of several sizes pass a backbone together, and training leaves some of it out.

All sizes pass the blocks of a vision transformer as one matrix of tokens, which attention alone takes apart;
other backbones take one size after another.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dino_vit.core.device import to_device
from dino_vit.models.backbone import Backbone
from dino_vit.models.sequences import sample_drop_path, sequences_by_block, spread_drops
from dino_vit.models.vit import VisionTransformer


class Drops(NamedTuple):
    """What a forward pass in training leaves out."""

    drop_path: Tensor | None = None  # (depth, 2, ΣB, 1, 1): factors of residual branches (stochastic depth)
    kept_tokens: Tensor | None = None  # (B, 1 + R + kept): indices of those that stay, of the first size


NOTHING = Drops()


def sample_drops(
    backbone: Backbone,
    views: Sequence[Tensor],
    patch_drop: float = 0.0,
    generator: torch.Generator | None = None,
) -> Drops:
    """Sample what is left out of a forward pass in training.

    `patch_drop` is the share of the patches of the first size. Models of timm sample for themselves.
    """
    if not isinstance(backbone, VisionTransformer) or not backbone.training:
        return NOTHING
    images, drop_path, kept_tokens = views[0], None, None
    if any(backbone.drop_path_rates):
        count = sum(view.shape[0] for view in views)
        drop_path = sample_drop_path(backbone.drop_path_rates, count, images.device, generator)
    if patch_drop:
        kept_tokens = sample_kept_patches(backbone, images, patch_drop, generator)
    return Drops(drop_path, kept_tokens)


def sample_kept_patches(
    backbone: VisionTransformer, images: Tensor, patch_drop: float, generator: torch.Generator | None = None
) -> Tensor:
    """Sample the patches of each image that stay; return the indices of its tokens, (B, 1 + R + kept)."""
    patches = math.prod(backbone.grid_of(*images.shape[-2:]))
    kept = max(1, round(patches * (1 - patch_drop)))
    order = torch.rand(images.shape[0], patches, generator=generator).argsort(1)
    chosen = backbone.first_patch + order[:, :kept].sort(1).values
    prefix = torch.arange(backbone.first_patch).expand(images.shape[0], -1)
    return to_device(torch.cat([prefix, chosen], dim=1), images.device)


def forward_multicrop(
    backbone: Backbone,
    views: Sequence[Tensor],
    mask: Tensor | None = None,
    *,
    tokens: bool = False,
    middle: bool = False,
    drops: Drops = NOTHING,
) -> list[Tensor]:
    """Return the CLS features (B, D) of images of several sizes; with `tokens` all tokens of the first.

    The mask token replaces the patches of the first size that are masked (B, N). With `middle` the last entry
    is the tokens of the first size after half of the blocks, without those that `drops` leaves out.
    """
    if not isinstance(backbone, VisionTransformer):
        first = backbone.forward_features(views[0], mask) if tokens else backbone.forward_cls(views[0])
        return [first, *map(backbone.forward_cls, views[1:])]
    parts = [backbone.embed_patches(view, None if i else mask) for i, view in enumerate(views)]
    if drops.kept_tokens is not None:
        assert not tokens, "all tokens are asked for"
        assert not backbone.rotary, "rotations are those of all patches"
        parts[0] = parts[0].gather(1, drops.kept_tokens[..., None].expand(-1, -1, backbone.width))
    only_cls = [not (tokens and i == 0) for i in range(len(views))]
    shapes = [(part.shape[0], part.shape[1]) for part in parts]
    by_block = sequences_by_block(shapes, [backbone.rotations(view) for view in views], only_cls)
    x = by_block[0].join(parts)
    layers = zip(backbone.blocks, by_block, spread_drops(by_block, drops.drop_path), strict=True)
    halfway = []
    for index, (block, sequences, drop) in enumerate(layers):
        if middle and index == backbone.depth // 2:
            halfway = sequences.split(x, -1)[:1]
        x = backbone.checkpointed(block, x, sequences, drop)
    parts = by_block[-1].output().split(backbone.norm(x), -1)
    outputs = [part[:, 0] if only else part for part, only in zip(parts, only_cls, strict=True)]
    return outputs + halfway

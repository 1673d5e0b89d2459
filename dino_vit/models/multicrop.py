"""Multi-crop: views of several sizes pass a backbone together, and training leaves some of it out.

All sizes pass the blocks of a vision transformer as one matrix of tokens, which attention alone takes apart;
other backbones take one size after another.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dino_vit.models.backbone import Backbone
from dino_vit.models.sequences import sample_drop_path, sequences_by_block, spread_drops
from dino_vit.models.vit import VisionTransformer


class Drops(NamedTuple):
    """What a forward pass in training leaves out."""

    drop_path: Tensor | None = None  # (depth, 2, ΣB, 1, 1): factors of residual branches (stochastic depth)
    kept: Tensor | None = None  # (B, kept): indices of the patches that stay, of the first size


NOTHING = Drops()


def sample_drops(
    backbone: Backbone,
    views: Sequence[Tensor],
    kept: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Drops:
    """Sample what is left out of a forward pass in training. Models of timm sample for themselves."""
    if not isinstance(backbone, VisionTransformer) or not backbone.training:
        return NOTHING
    drop_path = None
    if any(backbone.drop_path_rates):
        count = sum(view.shape[0] for view in views)
        drop_path = sample_drop_path(backbone.drop_path_rates, count, views[0].device, generator)
    return Drops(drop_path, kept)


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
    if drops.kept is not None:
        assert not tokens, "all tokens are asked for"
        assert not backbone.rotary, "rotations are those of all patches"
        prefix, patches = parts[0][:, : backbone.first_patch], parts[0][:, backbone.first_patch :]
        kept = patches.gather(1, drops.kept[..., None].expand(-1, -1, backbone.width))
        parts[0] = torch.cat([prefix, kept], dim=1)
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

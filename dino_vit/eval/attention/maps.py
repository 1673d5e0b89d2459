"""Where a backbone looks: what its CLS token attends to, how tokens mix over all blocks, what patches hold.

b images, h heads, y x rows and columns of patches, n tokens, d channels
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from dino_vit.eval.features.extraction import evaluating
from dino_vit.models.block import Attention, Block
from dino_vit.models.vit import VisionTransformer

# Bytes of attention rows held at a time: those of all tokens of a large image would not fit in memory.
_ROW_BYTES = 1 << 25


def cls_attention(model: VisionTransformer, images: Tensor, block: int = -1) -> Tensor:
    """Return the attention of the CLS token to each patch in one block, (b, h, y, x)."""
    with evaluating(model):
        (weights,) = model.get_attention(images, [block], queries=slice(0, 1))
    return _on_grid(model, images, weights[:, :, 0])


def rollout(model: VisionTransformer, images: Tensor) -> Tensor:
    """Return how much of each patch reaches the CLS token through all blocks, (b, y, x).

    The CLS row of the product of (A + 1)/2 over the blocks, with A the mean attention of the heads (Abnar and
    Zuidema, 2020). Pushed from the last block to the first it stays one row; no attention matrix is held.
    """
    with evaluating(model):
        tokens, entering = model.embed(images), []
        for block in model.blocks:
            assert isinstance(block, Block)
            entering.append((block.attn, block.norm1(tokens)))
            if len(entering) < model.depth:
                tokens = block(tokens)
        row = torch.zeros(tokens.shape[:2], device=tokens.device)
        row[:, 0] = 1
        for attention, x in reversed(entering):
            row = (row + _push(attention, x, row)) / 2
    return _on_grid(model, images, row)


def mass_mask(maps: Tensor, share: float) -> Tensor:
    """Mark the fewest patches of each map (..., y, x) that hold at least a share of its mass."""
    flat = maps.flatten(-2).double()
    heaviest, places = flat.sort(dim=-1, descending=True, stable=True)
    before = heaviest.cumsum(-1) - heaviest
    marked = before < share * flat.sum(-1, keepdim=True)
    return torch.zeros_like(marked).scatter(-1, places, marked).reshape(maps.shape)


def patch_tokens(model: VisionTransformer, images: Tensor) -> Tensor:
    """Return the normalised patch tokens of the last block, (b, y, x, d)."""
    with evaluating(model):
        tokens = model.forward_features(images)[:, 1 + model.registers :]
    return rearrange(tokens, "b (y x) d -> b y x d", y=model.grid_of(*images.shape[-2:])[0])


def principal_colours(tokens: Sequence[Tensor]) -> list[Tensor]:
    """Turn the patch tokens (y, x, d) of some images into colours (y, x, 3) from 0 to 1.

    Red, green and blue are the first three principal components over all patches of all images, so that a
    colour means the same in each. A component points where its largest entry is positive, and runs from the
    first to the last percent of its values.
    """
    joined = torch.cat([image.flatten(0, 1) for image in tokens]).double()
    joined = joined - joined.mean(0)
    _, vectors = torch.linalg.eigh(joined.T @ joined)
    axes = vectors.flip(1)[:, :3]
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    values = joined @ axes
    low, high = torch.quantile(
        values[:: 1 + len(values) // 1_000_000], torch.tensor([0.01, 0.99]).double(), dim=0
    )
    colours = ((values - low) / (high - low).clamp_min(1e-12)).clamp(0, 1).float()
    parts = torch.split(colours, [image.shape[0] * image.shape[1] for image in tokens])
    return [
        rearrange(p, "(y x) c -> y x c", y=image.shape[0]) for p, image in zip(parts, tokens, strict=True)
    ]


def _on_grid(model: VisionTransformer, images: Tensor, of_tokens: Tensor) -> Tensor:
    """Lay what each token got out as the patches lie, without the CLS token and the registers."""
    y, _ = model.grid_of(*images.shape[-2:])
    return rearrange(of_tokens[..., 1 + model.registers :], "... (y x) -> ... y x", y=y)


def _push(attention: Attention, x: Tensor, row: Tensor) -> Tensor:
    """Return row · A, where A is the mean attention of the heads among the tokens x, a few rows at a time."""
    q, k, _ = attention.split(x)
    batch, heads, count, _ = q.shape
    size = max(1, _ROW_BYTES // (4 * batch * heads * count))
    pushed = torch.zeros_like(row)
    for some, weights in zip(torch.split(q, size, dim=2), torch.split(row, size, dim=1), strict=True):
        pushed += torch.einsum("b n, b h n m -> b m", weights, attention.softmax(some, k)) / heads
    return pushed

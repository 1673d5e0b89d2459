"""The transformer block: attention, with the fastest kernel of the device, and an MLP.

How the tokens of images lie in one tensor: of one size as (B, T, D), of several as rows (ΣB·T, D).

b batch, h heads, n tokens, d channels of a head; B images, T tokens of an image, D width
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.core.distributed import to_device
from dino_vit.models.layers import MLP, LayerNorm, LayerScale, add_residual, dropout
from dino_vit.models.positions import Rotation, rotate

EXPLICIT_BYTES = 2**30  # larger score matrices are left to the fused kernel, which never stores them


class Sequences:
    """The token sequences that a block gets, size by size; attention alone takes them apart.

    For sizes whose `only_cls` is true, the block gives the CLS token alone.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],  # (B, T) of each size
        rotations: Sequence[Rotation | None] = (),  # of the queries and keys of each size
        only_cls: Sequence[bool] = (),
    ) -> None:
        self.shapes = shapes
        self.rotations = rotations or [None] * len(shapes)
        self.only_cls = only_cls or [False] * len(shapes)

    def split(self, x: Tensor, *shape: int) -> list[Tensor]:
        """Return the tokens of each size, (B, T, *shape)."""
        if len(self.shapes) == 1:
            return [x.view(*x.shape[:2], *shape)]
        parts = torch.split(x, [images * tokens for images, tokens in self.shapes])
        return [part.view(*size, *shape) for part, size in zip(parts, self.shapes, strict=True)]

    @staticmethod
    def join(parts: Sequence[Tensor]) -> Tensor:
        """Put the tokens of each size, (B, T, D), into one tensor."""
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten(0, 1) for part in parts])

    def output_tokens(self, x: Tensor) -> Tensor:
        """Return those of its input tokens that the block gives an output for."""
        if not any(self.only_cls):
            return x
        parts = zip(self.split(x, -1), self.only_cls, strict=True)
        return self.join([part[:, :1] if only else part for part, only in parts])

    def output(self) -> "Sequences":
        """Return the sequences that the block gives."""
        sizes = zip(self.shapes, self.only_cls, strict=True)
        return Sequences([(images, 1 if only else tokens) for (images, tokens), only in sizes])

    def spread(self, scales: Tensor) -> Tensor:
        """Repeat numbers of each image (..., ΣB, 1, 1) for each of its tokens that the block gives."""
        if len(self.shapes) == 1:
            return scales
        output = self.output().shapes
        parts = zip(torch.split(scales, [images for images, _ in output], dim=-3), output, strict=True)
        return torch.cat([part.expand(*part.shape[:-2], n, 1).flatten(-3, -2) for part, (_, n) in parts], -2)


class Attention(nn.Module):
    """Multi-head self-attention with one projection to queries, keys and values."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        qkv_bias: bool,
        key_bias: bool,
        qk_scale: float | None,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.heads, self.without_key_bias = heads, qkv_bias and not key_bias
        self.scale = (width // heads) ** -0.5 if qk_scale is None else qk_scale
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        parts = sequences.split(self._project(x), 3, self.heads, -1)
        sizes = zip(map(_heads, parts), sequences.rotations, sequences.only_cls, strict=True)
        attended = [self._attend(qkv, rotation, only_cls) for qkv, rotation, only_cls in sizes]
        x = self.proj(sequences.join(attended))
        return dropout(x, self.dropout, self.training)

    def _attend(self, qkv: tuple[Tensor, ...], rotation: Rotation | None, only_cls: bool) -> Tensor:
        q, k, v = qkv
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if only_cls:
            q = q[:, :, :1]
        x = attend(q, k, v, scale=self.scale, dropout=self.attention_dropout if self.training else 0.0)
        return x.transpose(1, 2).flatten(2)

    def softmax(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the attention weights of queries (b, h, n, d) on keys (b, h, N, d), in float32."""
        with torch.autocast(q.device.type, enabled=False):
            scores = q.float() @ k.float().transpose(-2, -1)
            return (scores * self.scale).softmax(dim=-1)

    def split(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens (b, n, D) to queries, keys and values, (b, h, n, d) each."""
        q, k, v = _heads(self._project(x).view(*x.shape[:2], 3, self.heads, -1))
        return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)

    def _project(self, x: Tensor) -> Tensor:
        if not self.without_key_bias:
            projected: Tensor = self.qkv(x)
            return projected
        query_bias, key_bias, value_bias = self.qkv.bias.chunk(3)  # that of the keys is stored, but not used
        bias = torch.cat([query_bias, torch.zeros_like(key_bias), value_bias])
        return F.linear(x, self.qkv.weight, bias)


def _heads(qkv: Tensor) -> tuple[Tensor, ...]:
    # Without einops, whose calls cost the host more than these. Unbinding (b, n, 3, h, d) before the
    # transposition makes the backward pass one copy instead of two.
    return tuple(part.transpose(1, 2) for part in qkv.unbind(2))


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """Return softmax(q·kᵀ·scale)·v, with the kernel that was fastest (`benchmarks/TRIED.md`).

    The fused kernel of a CPU is slow in bfloat16, so there the softmax is written out: a backbone step of
    ViT-S/16 takes 0.95 s instead of 1.11 s.
    """
    explicit = q.is_cpu and q.dtype == torch.bfloat16 and not dropout
    if not explicit or math.prod(q.shape[:3]) * k.shape[2] * q.element_size() > EXPLICIT_BYTES:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    shape = q.shape
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    # baddbmm scales the product itself, which saves a pass over the scores.
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    return (scores.softmax(dim=-1) @ v).view(shape)


class Block(nn.Module):
    """Attention, then an MLP, each with a LayerNorm before it and a residual connection."""

    compiled = False  # `compile_networks` sets it

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        mlp_ratio: float,
        mlp: str,
        layer_scale: float | None,
        norm_eps: float,
        dropout: float,
        **attention: Any,  # keywords of `Attention`
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, eps=norm_eps)
        self.attn = Attention(width, heads, dropout=dropout, **attention)
        self.ls1 = None if layer_scale is None else LayerScale(width, layer_scale)
        self.norm2 = LayerNorm(width, eps=norm_eps)
        self.mlp = MLP(width, round(width * mlp_ratio), gated=mlp == "swiglu", dropout=dropout)
        self.ls2 = None if layer_scale is None else LayerScale(width, layer_scale)

    def forward(self, x: Tensor, sequences: Sequences | None = None, drop: Tensor | None = None) -> Tensor:
        """Return the tokens after this block, those that `sequences` ask for.

        Without `sequences`, x is (b, n, D). `drop` (2, b, 1, 1), or (2, rows, 1), multiplies the branches.
        """
        sequences = sequences or Sequences([(x.shape[0], x.shape[1])])
        attention_drop, mlp_drop = (None, None) if drop is None else drop.unbind()
        attended = self.attn(self.norm1(x), sequences)
        x = add_residual(sequences.output_tokens(x), attended, self.ls1, attention_drop)
        return add_residual(x, self.mlp(self.norm2(x)), self.ls2, mlp_drop)


def sequences_by_block(
    shapes: Sequence[tuple[int, int]],
    rotations: Sequence[Sequence[Rotation | None]],  # of each size, for each block
    only_cls: Sequence[bool],
) -> list[Sequences]:
    """Return the sequences that each block gets; only the last one computes less than all tokens."""
    by_block = [Sequences(shapes, turned) for turned in zip(*rotations, strict=True)]
    return [*by_block[:-1], Sequences(shapes, by_block[-1].rotations, only_cls)]


def spread_drops(by_block: Sequence[Sequences], drops: Tensor | None) -> list[Tensor | None]:
    """Return what multiplies the branches of each block, from (depth, 2, ΣB, 1, 1)."""
    if drops is None:
        return [None] * len(by_block)
    return [*by_block[0].spread(drops[:-1]), *by_block[-1].spread(drops[-1:])]


def sample_drop_path(
    rates: Sequence[float], images: int, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Sample the factors of stochastic depth for both residual branches of blocks: (depth, 2, images, 1, 1).

    They are 0 or 1 / (1 - rate). They are sampled on the CPU, so that every device gets the same numbers, and
    in one call, so that a GPU gets one copy instead of a kernel for each branch.
    """
    rate = torch.tensor(rates)[:, None, None]
    kept = torch.rand(len(rates), 2, images, generator=generator) >= rate
    return to_device(kept / (1 - rate), device)[..., None, None]  # the expectation stays

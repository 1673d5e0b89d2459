"""The transformer block: attention, with the fastest kernel of the device, and an MLP.

b batch, h heads, n tokens, d channels of a head
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.models.linear import Cast, Linear, Weights, cast_together, linear
from dino_vit.models.positions import Rotation, rotate

ALL = slice(None)  # tokens
EXPLICIT_BYTES = 2**30  # larger score matrices are left to the fused kernel, which never stores them


class Packed:
    """How the tokens of images of several sizes are packed into one matrix (rows, D), size by size.

    Only attention takes them apart; all else is computed by one operator for all sizes. Images of one size
    stay as they are, (B, N, D).
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self.shapes = shapes  # (B, N) of each size
        self.rows = [batch * tokens for batch, tokens in shapes]

    def split(self, x: Tensor, *shape: int) -> list[Tensor]:
        """Return the tokens of each size, (B, N, *shape)."""
        if len(self.shapes) == 1:
            return [x.view(*x.shape[:2], *shape)]
        parts = torch.split(x, self.rows)
        return [part.view(*size, *shape) for part, size in zip(parts, self.shapes, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Pack the tokens of each size, (B, N, D)."""
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten(0, 1) for part in parts])

    def join_scales(self, scales: Sequence[Tensor]) -> Tensor:
        """Pack the numbers of the images of each size, (..., B, 1, 1): one for each token of an image."""
        if len(scales) == 1:
            return scales[0]
        sizes = zip(scales, self.shapes, strict=True)
        rows = [of_size.expand(-1, -1, -1, tokens, 1).flatten(2, 3) for of_size, (_, tokens) in sizes]
        return torch.cat(rows, dim=2)


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
        attention_dropout: float,
        dropout: float,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} is not divisible by heads={heads}")
        self.heads, self.key_bias = heads, key_bias or not qkv_bias
        self.scale = (width // heads) ** -0.5 if qk_scale is None else qk_scale
        self.attention_dropout = attention_dropout
        self.qkv = Linear(width, 3 * width, bias=qkv_bias)
        self.proj = Linear(width, width)
        self.proj_drop = _dropout(dropout)

    def forward(
        self,
        x: Tensor,
        queries: slice = ALL,
        rotations: Sequence[Rotation | None] = (None,),
        packed: Packed | None = None,
        cast: Sequence[Cast] = ((), ()),
    ) -> Tensor:
        packed = packed or Packed([(x.shape[0], x.shape[1])])
        parts = packed.split(self._project(x, *cast[0]), 3, self.heads, -1)
        attended = [self._attend(*size, queries) for size in zip(parts, rotations, strict=True)]
        return self.proj_drop(self.proj(packed.join(attended), *cast[1]))

    def _attend(self, qkv: Tensor, rotation: Rotation | None, queries: slice) -> Tensor:
        q, k, v = self._heads(qkv, rotation)
        dropout = self.attention_dropout if self.training else 0.0
        x = attend(q if queries is ALL else q[:, :, queries], k, v, scale=self.scale, dropout=dropout)
        return x.transpose(1, 2).flatten(2)

    def softmax(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the attention weights of queries (B, h, n, d) on keys (B, h, N, d), in float32."""
        with torch.autocast(q.device.type, enabled=False):
            scores = q.float() @ k.float().transpose(-2, -1)
            return (scores * self.scale).softmax(dim=-1)

    def split(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens (B, N, D) to queries, keys and values, (B, h, N, d) each."""
        return self._heads(self._project(x).unflatten(2, (3, self.heads, -1)), rotation)

    def _heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        # Without einops, whose calls cost the host more than these. Unbinding (B, N, 3, h, d) before the
        # transposition makes the backward pass one copy instead of two.
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)

    def _project(self, x: Tensor, weights: Weights | None = None) -> Tensor:
        if self.key_bias:
            return self.qkv(x) if weights is None else self.qkv(x, weights)
        weight, bias = weights or (self.qkv.weight, self.qkv.bias)
        assert bias is not None, "without a bias there is no key bias to leave out"
        of_queries, of_keys, of_values = bias.chunk(3)  # the second part has no effect
        return linear(x, weight, torch.cat([of_queries, torch.zeros_like(of_keys), of_values]))


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """Return softmax(q·kᵀ·scale)·v, with the kernel that `benchmarks/attention.py` found fastest.

    The fused kernel of a CPU is slow in bfloat16, so there the softmax is written out: a backbone step of
    ViT-S/16 takes 0.95 s instead of 1.11 s.
    """
    batch, heads, tokens, _ = q.shape
    explicit = q.is_cpu and q.dtype == torch.bfloat16 and dropout == 0.0
    if not explicit or batch * heads * tokens * tokens * q.element_size() > EXPLICIT_BYTES:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    q, k, v = (rearrange(part, "b h n d -> (b h) n d") for part in (q, k, v))
    # baddbmm scales the product itself, which saves a pass over the scores.
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    return rearrange(scores.softmax(dim=-1) @ v, "(b h) n d -> b h n d", h=heads)


class MLP(nn.Module):
    """Linear, GELU, linear; if gated, SwiGLU instead of GELU."""

    def __init__(self, width: int, hidden: int, *, gated: bool, dropout: float) -> None:
        super().__init__()
        self.gated = gated
        self.fc1 = Linear(width, 2 * hidden if gated else hidden)
        self.fc2 = Linear(hidden, width)
        self.drop = _dropout(dropout)

    def forward(self, x: Tensor, cast: Sequence[Cast] = ((), ())) -> Tensor:
        x = self.fc1(x, *cast[0])
        if self.gated:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        else:
            x = F.gelu(x)
        return self.drop(self.fc2(self.drop(x), *cast[1]))


def _dropout(rate: float) -> nn.Module:
    # nn.Dropout calls an operator for a rate of 0 too.
    return nn.Dropout(rate) if rate else nn.Identity()


class LayerScale(nn.Module):
    """Scale each channel by a learned factor."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` of float32 tokens, also with the bfloat16 weights that FSDP gathers."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(dtype), self.bias.to(dtype), self.eps)


class Block(nn.Module):
    """Attention, then an MLP, each with a LayerNorm before it and a residual connection.

    The arguments are those of `VisionTransformer`, and those of `Attention`.
    """

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
        **attention: Any,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, eps=norm_eps)
        self.attn = Attention(width, heads, dropout=dropout, **attention)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)
        self.norm2 = LayerNorm(width, eps=norm_eps)
        self.mlp = MLP(width, round(width * mlp_ratio), gated=mlp == "swiglu", dropout=dropout)
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(width, layer_scale)

    def forward(
        self,
        x: Tensor,
        queries: slice = ALL,
        rotations: Sequence[Rotation | None] = (None,),
        scales: Tensor | None = None,
        packed: Packed | None = None,
    ) -> Tensor:
        """Return the tokens after this block, (B, N, D) or packed, or only the queries.

        There is a rotation for each size that is packed; `scales` multiply the branches (stochastic depth).
        """
        qkv, proj, *of_mlp = cast_together(self.attn.qkv, self.attn.proj, self.mlp.fc1, self.mlp.fc2)
        attended = self.ls1(self.attn(self.norm1(x), queries, rotations, packed, (qkv, proj)))
        x = x if queries is ALL else x[:, queries]
        x = x + attended if scales is None else torch.addcmul(x, attended, scales[0])
        y = self.ls2(self.mlp(self.norm2(x), of_mlp))
        return x + y if scales is None else torch.addcmul(x, y, scales[1])

"""The transformer block: attention, with the fastest kernel of the device, and an MLP.

b batch, h heads, n tokens, d channels of a head
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.models.layers import MLP, LayerNorm, LayerScale, add_residual, dropout
from dino_vit.models.positions import rotate
from dino_vit.models.sequences import Sequences

EXPLICIT_BYTES = 2**30  # larger score matrices are left to the fused kernel, which never stores them


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
        rate, attended = self.attention_dropout if self.training else 0.0, []
        for (q, k, v), only_cls in zip(self.project(x, sequences), sequences.only_cls, strict=True):
            queries = q[:, :, :1] if only_cls else q
            attended.append(attend(queries, k, v, scale=self.scale, dropout=rate).transpose(1, 2).flatten(2))
        return dropout(self.proj(sequences.join(attended)), self.dropout, self.training)

    def project(self, x: Tensor, sequences: Sequences) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Project tokens to queries, keys and values of each size, (b, h, n, d) each, and rotate them."""
        if self.without_key_bias:  # that of the keys is stored, but not used
            query_bias, key_bias, value_bias = self.qkv.bias.chunk(3)
            bias = torch.cat([query_bias, torch.zeros_like(key_bias), value_bias])
            projected = F.linear(x, self.qkv.weight, bias)
        else:
            projected = self.qkv(x)
        projections = []
        parts = sequences.split(projected, 3, self.heads, -1)
        for part, rotation in zip(parts, sequences.rotations, strict=True):
            # Without einops, whose calls cost the host more than these. Unbinding (b, n, 3, h, d) before the
            # transposition makes the backward pass one copy instead of two.
            q, k, v = (each.transpose(1, 2) for each in part.unbind(2))
            if rotation is not None:
                q, k = rotate(q, rotation), rotate(k, rotation)
            projections.append((q, k, v))
        return projections

    def softmax(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the attention weights of queries (b, h, n, d) on keys (b, h, N, d), in float32."""
        with torch.autocast(q.device.type, enabled=False):
            scores = q.float() @ k.float().transpose(-2, -1)
            return (scores * self.scale).softmax(dim=-1)


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

"""The transformer block: attention, with the fastest kernel of the device, and an MLP.

b batch, h heads, n tokens, d channels of a head
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
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

    def select(self, x: Tensor, queries: Sequence[slice]) -> Tensor:
        """Return some tokens of the images of each size."""
        if all(chosen is ALL for chosen in queries):
            return x
        return self.join([part[:, chosen] for part, chosen in zip(self.split(x, -1), queries, strict=True)])

    def scales(self, scales: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what the branches of each block are multiplied by, packed from (depth, 2, B, 1, 1)."""
        if len(scales) == 1:
            return scales[0].unbind()
        sizes = zip(scales, self.shapes, strict=True)
        rows = [of_size.expand(-1, -1, -1, tokens, 1).flatten(2, 3) for of_size, (_, tokens) in sizes]
        return torch.cat(rows, dim=2).unbind()


class Attention(nn.Module):
    """Multi-head self-attention with one projection to queries, keys and values."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool, key_bias: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} is not divisible by heads={heads}")
        self.heads, self.key_bias = heads, key_bias or not qkv_bias
        self.scale = (width // heads) ** -0.5
        self.qkv = Linear(width, 3 * width, bias=qkv_bias)
        self.proj = Linear(width, width)

    def forward(
        self,
        x: Tensor,
        queries: Sequence[slice] = (ALL,),
        rotations: Sequence[Rotation | None] = (None,),
        packed: Packed | None = None,
        cast: Sequence[Cast] = ((), ()),
    ) -> Tensor:
        packed = packed or Packed([(x.shape[0], x.shape[1])])
        parts = packed.split(self._project(x, *cast[0]), 3, self.heads, -1)
        attended = [self._attend(*size) for size in zip(parts, rotations, queries, strict=True)]
        projected: Tensor = self.proj(packed.join(attended), *cast[1])
        return projected

    def _attend(self, qkv: Tensor, rotation: Rotation | None, queries: slice) -> Tensor:
        q, k, v = self._heads(qkv, rotation)
        x = attend(q if queries is ALL else q[:, :, queries], k, v, scale=self.scale)
        return x.transpose(1, 2).flatten(2)

    def softmax(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the attention weights of queries (B, h, n, d) on keys (B, h, N, d), in float32."""
        with torch.autocast(q.device.type, enabled=False):
            scores = q.float() @ k.float().transpose(-2, -1)
            return (scores * self.scale).softmax(dim=-1)

    def split(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens (B, N, D) to queries, keys and values, (B, h, N, d) each."""
        return self._heads(self._project(x).view(*x.shape[:2], 3, self.heads, -1), rotation)

    def _heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        # Without einops, whose calls cost the host more than these. Unbinding (B, N, 3, h, d) before the
        # transposition makes the backward pass one copy instead of two.
        q, k, v = qkv.unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)

    def _project(self, x: Tensor, weights: Weights | None = None) -> Tensor:
        if self.key_bias:
            projected: Tensor = self.qkv(x, weights) if weights else self.qkv(x)
            return projected
        weight, bias = weights or (self.qkv.weight, self.qkv.bias)
        assert bias is not None, "without a bias there is no key bias to leave out"
        of_queries, of_keys, of_values = bias.chunk(3)  # the second part has no effect
        return linear(x, weight, torch.cat([of_queries, torch.zeros_like(of_keys), of_values]))


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Return softmax(q·kᵀ·scale)·v, with the kernel that `benchmarks/attention.py` found fastest.

    The fused kernel of a CPU is slow in bfloat16, so there the softmax is written out: a backbone step of
    ViT-S/16 takes 0.95 s instead of 1.11 s.
    """
    explicit = q.is_cpu and q.dtype == torch.bfloat16
    if not explicit or math.prod(q.shape[:3]) * q.shape[2] * q.element_size() > EXPLICIT_BYTES:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    shape = q.shape
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    # baddbmm scales the product itself, which saves a pass over the scores.
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    return (scores.softmax(dim=-1) @ v).view(shape)


class MLP(nn.Module):
    """Linear, GELU, linear; if gated, SwiGLU instead of GELU."""

    def __init__(self, width: int, hidden: int, *, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.fc1 = Linear(width, 2 * hidden if gated else hidden)
        self.fc2 = Linear(hidden, width)

    def forward(self, x: Tensor, cast: Sequence[Cast] = ((), ())) -> Tensor:
        x = self.fc1(x, *cast[0])
        if self.gated:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        else:
            x = F.gelu(x)
        projected: Tensor = self.fc2(x, *cast[1])
        return projected


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
        qkv_bias: bool,
        key_bias: bool,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, eps=norm_eps)
        self.attn = Attention(width, heads, qkv_bias=qkv_bias, key_bias=key_bias)
        self.ls1 = None if layer_scale is None else LayerScale(width, layer_scale)
        self.norm2 = LayerNorm(width, eps=norm_eps)
        self.mlp = MLP(width, round(width * mlp_ratio), gated=mlp == "swiglu")
        self.ls2 = None if layer_scale is None else LayerScale(width, layer_scale)

    def forward(
        self,
        x: Tensor,
        queries: Sequence[slice] = (ALL,),
        rotations: Sequence[Rotation | None] = (None,),
        scales: Tensor | None = None,
        packed: Packed | None = None,
    ) -> Tensor:
        """Return the tokens after this block, (B, N, D) or packed, or only the queries.

        There are queries and a rotation for each size that is packed; `scales` multiply the branches of the
        queries (stochastic depth).
        """
        packed = packed or Packed([(x.shape[0], x.shape[1])])
        attention, mlp = self.attn, self.mlp
        cast: Sequence[Cast] = ((), (), (), ())
        if torch.is_autocast_enabled(x.device.type):
            cast = cast_together(attention.qkv, attention.proj, mlp.fc1, mlp.fc2)
        of_attention, of_mlp = (None, None) if scales is None else scales.unbind()
        attended = attention(self.norm1(x), queries, rotations, packed, cast[:2])
        x = _residual(packed.select(x, queries), attended, self.ls1, of_attention)
        return _residual(x, mlp(self.norm2(x), cast[2:]), self.ls2, of_mlp)


def _residual(x: Tensor, branch: Tensor, layer_scale: LayerScale | None, scale: Tensor | None) -> Tensor:
    if layer_scale is not None:
        branch = layer_scale(branch)
    return x + branch if scale is None else torch.addcmul(x, branch, scale)

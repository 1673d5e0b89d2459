"""The transformer block: attention, with the fastest kernel of the device, and an MLP.

b batch, h heads, n tokens, d channels of a head
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.core.distributed import to_device
from dino_vit.models.linear import LayerNorm, Linear, linear
from dino_vit.models.positions import Rotation, rotate
from dino_vit.models.sequences import Sequences

EXPLICIT_BYTES = 2**30  # larger score matrices are left to the fused kernel, which never stores them


class Attention(nn.Module):
    """Multi-head self-attention with one projection to queries, keys and values."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool, key_bias: bool) -> None:
        super().__init__()
        self.heads, self.key_bias = heads, key_bias or not qkv_bias
        self.scale = (width // heads) ** -0.5
        self.qkv = Linear(width, 3 * width, bias=qkv_bias)
        self.proj = Linear(width, width)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        parts = sequences.split(self._project(x), 3, self.heads, -1)
        sizes = zip(parts, sequences.rotations, sequences.only_cls, strict=True)
        projected: Tensor = self.proj(sequences.join([self._attend(*size) for size in sizes]))
        return projected

    def _attend(self, qkv: Tensor, rotation: Rotation | None, only_cls: bool) -> Tensor:
        q, k, v = self._heads(qkv, rotation)
        x = attend(q[:, :, :1] if only_cls else q, k, v, scale=self.scale)
        return x.transpose(1, 2).flatten(2)

    def softmax(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the attention weights of queries (b, h, n, d) on keys (b, h, N, d), in float32."""
        with torch.autocast(q.device.type, enabled=False):
            scores = q.float() @ k.float().transpose(-2, -1)
            return (scores * self.scale).softmax(dim=-1)

    def split(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens (b, n, D) to queries, keys and values, (b, h, n, d) each."""
        return self._heads(self._project(x).view(*x.shape[:2], 3, self.heads, -1), rotation)

    def _heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        # Without einops, whose calls cost the host more than these. Unbinding (b, n, 3, h, d) before the
        # transposition makes the backward pass one copy instead of two.
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)

    def _project(self, x: Tensor) -> Tensor:
        if self.key_bias:
            projected: Tensor = self.qkv(x)
            return projected
        query_bias, key_bias, value_bias = self.qkv.bias.chunk(3)  # that of the keys has no effect
        bias = torch.cat([query_bias, torch.zeros_like(key_bias), value_bias])
        return linear(x, self.qkv.weight, bias)


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

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.gated:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        else:
            x = F.gelu(x)
        projected: Tensor = self.fc2(x)
        return projected


class LayerScale(nn.Module):
    """Scale each channel by a learned factor."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


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

    def forward(self, x: Tensor, sequences: Sequences | None = None, drop: Tensor | None = None) -> Tensor:
        """Return the tokens after this block, those that `sequences` ask for.

        Without `sequences`, x is (b, n, D). `drop` (2, b, 1, 1), or (2, rows, 1), multiplies the branches.
        """
        sequences = sequences or Sequences([(x.shape[0], x.shape[1])])
        attention_drop, mlp_drop = (None, None) if drop is None else drop.unbind()
        attended = self.attn(self.norm1(x), sequences)
        x = _residual(sequences.queries(x), attended, self.ls1, attention_drop)
        return _residual(x, self.mlp(self.norm2(x)), self.ls2, mlp_drop)


def _residual(x: Tensor, branch: Tensor, layer_scale: LayerScale | None, drop: Tensor | None) -> Tensor:
    if layer_scale is not None:
        branch = layer_scale(branch)
    return x + branch if drop is None else torch.addcmul(x, branch, drop)


def draw_drop_path(rates: Sequence[float], images: int, device: torch.device) -> Tensor:
    """Draw what stochastic depth multiplies the two branches of each block by: (depth, 2, images, 1, 1).

    All at once and on the host, by PyTorch's generator: on a GPU each draw would be a kernel of its own.
    """
    rate = torch.tensor(rates)[:, None, None]
    kept = torch.rand(len(rates), 2, images) >= rate
    return to_device(kept / (1 - rate), device)[..., None, None]  # the expectation stays

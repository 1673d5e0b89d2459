"""Layers of a block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` of float32 tokens, also with the bfloat16 weights that FSDP gathers."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(dtype), self.bias.to(dtype), self.eps)


class MLP(nn.Module):
    """Linear, GELU, linear; if gated, SwiGLU instead of GELU."""

    def __init__(self, width: int, hidden: int, *, gated: bool, dropout: float) -> None:
        super().__init__()
        self.gated, self.dropout = gated, dropout
        self.fc1 = nn.Linear(width, 2 * hidden if gated else hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.gated:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        else:
            x = F.gelu(x)
        x = self.fc2(dropout(x, self.dropout, self.training))
        return dropout(x, self.dropout, self.training)


class LayerScale(nn.Module):
    """Scale each channel by a learned factor."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def add_residual(x: Tensor, branch: Tensor, layer_scale: LayerScale | None, drop: Tensor | None) -> Tensor:
    """Add a branch, scaled by channel and by image, to the tokens."""
    if layer_scale is not None:
        branch = layer_scale(branch)
    return x + branch if drop is None else torch.addcmul(x, branch, drop)


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Drop entries in training, if there is a rate."""
    return F.dropout(x, rate) if rate and training else x


def init_linear(layer: nn.Linear, std: float = 0.02) -> None:
    """Initialise a linear layer as ViT and DINO do."""
    nn.init.trunc_normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)

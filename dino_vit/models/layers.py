"""Layers of a block, whose weights are cast together."""

from typing import Any

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


def call_with_cast_weights(module: nn.Module, *arguments: Any) -> Any:
    """Call a module with the weights of its linear layers as autocast casts them, by one kernel for all.

    The cast tensors take the place of the parameters during the call, so this is not thread-safe: training
    alone calls modules in this way.
    """
    device = next(module.parameters()).device.type
    if torch.compiler.is_compiling() or not torch.is_autocast_enabled(device):
        return module(*arguments)  # a compiled module casts them itself
    weights = [
        (layer._parameters, name, parameter)
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
        for name in ("weight", "bias")  # not those that a weight is computed from
        if (parameter := layer._parameters.get(name)) is not None and parameter.dtype == torch.float32
        if not hasattr(parameter, "full_tensor")  # FSDP casts those that it shards
    ]
    if not weights:
        return module(*arguments)
    cast = _CastTogether.apply(*(parameter for *_, parameter in weights))
    try:  # `torch.func.functional_call` would take three times as long
        for (parameters, name, _), tensor in zip(weights, cast, strict=True):
            parameters[name] = tensor
        return module(*arguments)
    finally:
        for parameters, name, parameter in weights:
            parameters[name] = parameter


class _CastTogether(torch.autograd.Function):
    """Cast float32 tensors to the dtype of autocast, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an optimiser decays weights whose gradient is zero, but not None
        return _cast(tensors, torch.get_autocast_dtype(tensors[0].device.type))

    @staticmethod
    def backward(_: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = iter(_cast(tuple(grad for grad in grads if grad is not None), torch.float32))
        return tuple(None if grad is None else next(cast) for grad in grads)


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    cast = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
    torch._foreach_copy_(cast, tensors)
    return cast


def init_linear(layer: nn.Linear, std: float = 0.02) -> None:
    """Initialise a linear layer as ViT and DINO do."""
    nn.init.trunc_normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)

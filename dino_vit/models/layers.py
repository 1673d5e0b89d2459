"""Layers of a block, whose weights are cast together."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from dino_vit.core.fused import fused, fuses

# Numbers in a pass's tokens. Each call of a compiled function costs the host some 0.1 ms: with 17 million
# (ViT-S/16, 64 images) a step on an H200 waited for the host, 71 ms, and took 49 with PyTorch's operators;
# with 34 million (ViT-B/16) the GPU was the slower one. A teacher's pass has fewer than its student's.
FUSED_FROM = 24_000_000


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


def add_norm(
    x: Tensor, branch: Tensor | None, layer_scale: LayerScale | None, drop: Tensor | None, norm: LayerNorm
) -> tuple[Tensor, Tensor]:
    """Add a branch to the tokens; return them and their LayerNorm.

    Use the returned tokens also where nothing was added: then one kernel sums their gradients.
    """
    if not fuses(x, FUSED_FROM):
        x = x if branch is None else add_residual(x, branch, layer_scale, drop)
        return x, norm(x)
    device, gamma = x.device.type, None if layer_scale is None else layer_scale.gamma
    dtype = torch.promote_types(x.dtype, norm.weight.dtype)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
    return _AddNorm.apply(x, branch, gamma, drop, norm.weight, norm.bias, norm.eps, dtype)


def add_residual(x: Tensor, branch: Tensor, layer_scale: LayerScale | None, drop: Tensor | None) -> Tensor:
    """Add a branch, scaled by channel and by image, to the tokens."""
    if fuses(x, FUSED_FROM):
        gamma = None if layer_scale is None else layer_scale.gamma
        return _Add.apply(x, branch, gamma, drop)
    if layer_scale is not None:
        branch = layer_scale(branch)
    return x + branch if drop is None else torch.addcmul(x, branch, drop)


class _Add(torch.autograd.Function):
    """`add_residual` of a GPU: one kernel in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, gamma: Tensor | None, drop: Tensor | None) -> Tensor:
        ctx.dtypes = x.dtype, branch.dtype
        ctx.save_for_backward(None if gamma is None else branch, gamma, drop)
        return _add(x, branch, gamma, drop)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_dtype, dtype = ctx.dtypes
        branch, gamma, drop = ctx.saved_tensors
        grad_gamma = None if gamma is None else _gamma_backward(grad, branch, drop, gamma)
        return grad.to(x_dtype), _add_backward(grad, gamma, drop, dtype), grad_gamma, None


class _AddNorm(torch.autograd.Function):
    """`add_norm` of a GPU: one kernel in each direction, whose numbers are those of `LayerNorm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
        gamma, drop, weight, bias, eps, dtype = others
        ctx.dtypes = x.dtype, None if branch is None else branch.dtype
        if branch is None:
            out, (normed, mean, scale) = x.view_as(x), _norm(x, weight, bias, eps, dtype)
        else:
            out, normed, mean, scale = _add_and_norm(x, branch, gamma, drop, weight, bias, eps, dtype)
        ctx.save_for_backward(out, weight, mean, scale, None if gamma is None else branch, gamma, drop)
        return out, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, mean, scale, branch, gamma, drop), (x_dtype, dtype) = ctx.saved_tensors, ctx.dtypes
        given = grad_normed, grad, x, weight, mean, scale
        if dtype is None:
            grad, grad_weight, grad_bias = _norm_backward(*given)
            return grad.to(x_dtype), None, None, None, grad_weight, grad_bias, None, None
        if gamma is None:
            grad, grad_branch, *of_norm = _add_and_norm_backward(*given, drop, dtype)
            return grad.to(x_dtype), grad_branch, None, None, *of_norm, None, None
        grad, *of_norm = _norm_backward(*given)  # Inductor does not fuse all of it either
        grad_branch = _add_backward(grad, gamma, drop, dtype)
        grad_gamma = _gamma_backward(grad, branch, drop, gamma)
        return grad.to(x_dtype), grad_branch, grad_gamma, None, *of_norm, None, None


def _accurate(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.flatten(0, -2).sum(0).to(dtype)


def _scaled(branch: Tensor, gamma: Tensor | None, drop: Tensor | None) -> Tensor:
    branch = _accurate(branch) if gamma is None else _accurate(branch) * gamma
    return branch if drop is None else branch * drop


@fused
def _add(x: Tensor, branch: Tensor, gamma: Tensor | None, drop: Tensor | None) -> Tensor:
    dtype = x.dtype
    for other in (branch, gamma, drop):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return (_accurate(x) + _scaled(branch, gamma, drop)).to(dtype)


@fused
def _add_backward(grad: Tensor, gamma: Tensor | None, drop: Tensor | None, dtype: torch.dtype) -> Tensor:
    return _scaled(grad, gamma, drop).to(dtype)


@fused
def _gamma_backward(grad: Tensor, branch: Tensor, drop: Tensor | None, gamma: Tensor) -> Tensor:
    return _sum_rows(_scaled(grad, None, drop) * branch, gamma.dtype)  # Inductor would compute it apart


@fused
def _norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    accurate = _accurate(x)
    mean = accurate.mean(-1, keepdim=True)
    centred = accurate - mean
    scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (centred * scale * weight + bias).to(dtype), mean, scale


@fused
def _norm_backward(
    grad_normed: Tensor, grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_normed, normed = _accurate(grad_normed), (x - mean) * scale
    through = grad_normed * weight
    centred = through - through.mean(-1, keepdim=True) - normed * (through * normed).mean(-1, keepdim=True)
    grad_weight = _sum_rows(grad_normed * normed, weight.dtype)
    return grad + centred * scale, grad_weight, _sum_rows(grad_normed, weight.dtype)


@fused
def _add_and_norm(
    x: Tensor, branch: Tensor, gamma: Tensor | None, drop: Tensor | None, *norm: Any
) -> tuple[Tensor, ...]:
    out = _add(x, branch, gamma, drop)
    return out, *_norm(out, *norm)


@fused
def _add_and_norm_backward(
    grad_normed: Tensor,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    drop: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, grad_weight, grad_bias = _norm_backward(grad_normed, grad, x, weight, mean, scale)
    return grad, _add_backward(grad, None, drop, dtype), grad_weight, grad_bias


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
        return module(*arguments)  # torch.compile fuses the casts itself
    if not (weights := _linear_weights(module)):
        return module(*arguments)
    cast = dict(zip(weights, _CastTogether.apply(*weights.values()), strict=True))
    return functional_call(module, cast, arguments, tie_weights=False)


def _linear_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the float32 weights and biases of linear layers; FSDP casts those that it shards."""
    return {
        f"{prefix}.{name}": parameter
        for prefix, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        for name, parameter in layer.named_parameters(recurse=False)
        if name in ("weight", "bias")  # not those that a weight is computed from
        and parameter.dtype == torch.float32
        and not hasattr(parameter, "full_tensor")
    }


class _CastTogether(torch.autograd.Function):
    """Cast float32 tensors to the dtype of autocast, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _cast(tensors, torch.get_autocast_dtype(tensors[0].device.type))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = iter(_cast((grad for grad in grads if grad is not None), torch.float32))
        return tuple(None if grad is None else next(cast) for grad in grads)


def _cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    given = tuple(tensors)
    cast = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in given)
    if cast:
        torch._foreach_copy_(cast, given)
    return cast


def init_linear(layer: nn.Linear, std: float = 0.02) -> None:
    """Initialise a linear layer as ViT and DINO do."""
    nn.init.trunc_normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)

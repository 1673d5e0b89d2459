"""Layers of a block; the weights of several are cast together, and oneDNN is called where it is faster.

In float32 on a CPU, PyTorch multiplies matrices with MKL, which uses only AVX2 on AMD processors. oneDNN,
which PyTorch includes and uses for other dtypes, has AVX-512 kernels that take half as long
(`benchmarks/linear.py`).
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


class Linear(nn.Linear):
    """`torch.nn.Linear` with the faster kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


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
        self.fc1 = Linear(width, 2 * hidden if gated else hidden)
        self.fc2 = Linear(hidden, width)

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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·weightᵀ + bias."""
    return OneDnnLinear.apply(x, weight, bias) if _use_onednn(x, weight) else F.linear(x, weight, bias)


def init_linear(layer: nn.Linear, std: float = 0.02) -> None:
    """Initialise a linear layer as ViT and DINO do."""
    nn.init.trunc_normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    # The compiler and the tracer do not know the operator.
    if not x.is_cpu or torch.compiler.is_compiling() or not mkl_is_slow():
        return False
    if torch._C._get_tracing_state() is not None or torch.is_autocast_enabled("cpu"):
        return False
    return x.dtype == weight.dtype == torch.float32 and x.ndim > 1 and x.numel() > 0


class OneDnnLinear(torch.autograd.Function):
    """x·weightᵀ + bias with oneDNN, forward and backward; differentiable any number of times."""

    generate_vmap_rule = True  # torch.func works as with nn.Linear

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # (rows, out)
        # The gradients are linear layers too: calling this class again gives them gradients of their own.
        return (
            OneDnnLinear.apply(grad, weight.t(), None) if needs_x else None,
            OneDnnLinear.apply(rows.t(), x.flatten(0, -2).t(), None) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


@cache
def mkl_is_slow() -> bool:
    """Return whether this is an AMD processor with AVX-512."""
    has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    cpuinfo, avx512 = Path("/proc/cpuinfo"), torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_onednn and avx512 and cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()

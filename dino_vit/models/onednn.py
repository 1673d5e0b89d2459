"""A linear layer that calls oneDNN directly where PyTorch takes twice as long (`benchmarks/linear.py`).

In float32 on a CPU, PyTorch multiplies matrices with MKL, which uses only AVX2 on AMD processors. oneDNN,
which PyTorch includes and uses for other dtypes, has AVX-512 kernels for them.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`torch.nn.Linear` with the faster kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·weightᵀ + bias."""
    return OneDnnLinear.apply(x, weight, bias) if _use_onednn(x, weight) else F.linear(x, weight, bias)


def init_linear(layer: nn.Linear) -> None:
    """Initialise a linear layer as ViT and DINO do."""
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    if not x.is_cpu:
        return False
    # The compiler and the tracer do not know the operator.
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if traced or torch.is_autocast_enabled("cpu"):
        return False
    return x.dtype == weight.dtype == torch.float32 and x.ndim > 1 and x.numel() > 0 and mkl_is_slow()


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

"""A linear layer that goes straight to oneDNN where PyTorch's own way takes twice the time.

In float32 on a CPU, PyTorch multiplies matrices by MKL, which keeps to AVX2 on AMD's processors. oneDNN,
which PyTorch ships too and takes for other dtypes, uses AVX-512 there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`torch.nn.Linear`, its parameters and its results, by the faster kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x·weightᵀ + bias."""
    return OneDnnLinear.apply(x, weight, bias) if _detour_pays(x, weight) else F.linear(x, weight, bias)


def _detour_pays(x: Tensor, weight: Tensor) -> bool:
    """Tell whether plain float32 on such a CPU is asked for, and nobody is tracing the operators."""
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if traced or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    return x.dtype == weight.dtype == torch.float32 and x.ndim > 1 and x.numel() > 0 and mkl_is_slow()


class OneDnnLinear(torch.autograd.Function):
    """Multiply by oneDNN forward and backward; differentiable any number of times."""

    generate_vmap_rule = True

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
        return (
            OneDnnLinear.apply(grad, weight.t(), None) if needs_x else None,
            OneDnnLinear.apply(rows.t(), x.flatten(0, -2).t(), None) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


@cache
def mkl_is_slow() -> bool:
    """Tell whether this is an AMD processor with AVX-512, where `benchmarks/linear.py` shows it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()

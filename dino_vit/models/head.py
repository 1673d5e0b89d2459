"""The projection head: an MLP, L2 normalisation, and a weight-normalised linear layer (the prototypes).

Parameters are named as in the 2021 DINO code, so that its checkpoints load by name. BatchNorm, in the head or
in a backbone, has the statistics of all processes, on CPUs too, unlike nn.SyncBatchNorm.
"""

from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dino_vit.config.constructors import build
from dino_vit.config.settings import STRICT, Dimension, PrototypeCount
from dino_vit.core.distributed import all_gather_equal, all_reduce_sum, world_size
from dino_vit.models.layers import init_linear


class Prototypes(nn.Module):
    """A linear layer without bias and with weight normalisation: direction `weight_v`, length `weight_g`."""

    def __init__(self, *, dim: int, prototypes: int, learn_gain: bool) -> None:
        super().__init__()
        bound = dim**-0.5  # as nn.Linear
        self.weight_g = nn.Parameter(torch.ones(prototypes, 1), requires_grad=learn_gain)
        self.weight_v = nn.Parameter(torch.empty(prototypes, dim).uniform_(-bound, bound))

    def weight(self) -> Tensor:
        """Return the effective weight (prototypes, dim)."""
        return torch._weight_norm(self.weight_v, self.weight_g, 0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight())


@dataclass(kw_only=True, config=STRICT)
class HeadConfig:
    """The keywords of a `DINOHead`."""

    in_dim: Dimension
    prototypes: PrototypeCount = 65536
    hidden_dim: Dimension = 2048
    bottleneck_dim: Dimension = 256
    batch_norm: bool = False
    norm_last_layer: bool = True


class DINOHead(nn.Module):
    """Project backbone features to unit vectors and multiply them with the prototypes."""

    __signature__ = signature(HeadConfig)

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        config = build(HeadConfig, keywords)
        hidden, bottleneck = config.hidden_dim, config.bottleneck_dim
        mlp: list[nn.Module] = []
        for width in (config.in_dim, hidden):
            norm = [nn.BatchNorm1d(hidden)] if config.batch_norm else []
            mlp += [nn.Linear(width, hidden), *norm, nn.GELU()]
        self.mlp = nn.Sequential(*mlp, nn.Linear(hidden, bottleneck))
        gain = not config.norm_last_layer
        self.last_layer = Prototypes(dim=bottleneck, prototypes=config.prototypes, learn_gain=gain)
        for module in self.mlp.modules():
            if isinstance(module, nn.Linear):
                init_linear(module)

    def project(self, x: Tensor) -> Tensor:
        """Return the L2-normalised bottleneck features (rows, bottleneck), at least in float32."""
        return _unit(self.mlp(x))

    @property
    def prototypes(self) -> Tensor:
        return self.last_layer.weight()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (rows, prototypes)."""
        return self.last_layer(self.project(x))


class FeatureHead(nn.Module):
    """A linear layer into the space of another network's features; it has no prototypes."""

    def __init__(self, *, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, out_dim)
        init_linear(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return L2-normalised features (..., out_dim), at least in float32."""
        return _unit(self.linear(x))


def _unit(x: Tensor) -> Tensor:
    # In float16 the square of a small entry underflows; in bfloat16 a unit vector is off by 0.4 %.
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, eps=1e-12)


class _Normalise(torch.autograd.Function):
    """BatchNorm with the statistics of all processes; for its gradient it keeps the input as it came.

    nn.SyncBatchNorm would make the host wait for the device once in each forward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
        values, over, shape = x.float(), [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        count = values.numel() // values.shape[1]
        own_mean = values.sum(over) / max(1, count)  # a pass may have no masked patch
        own_squares = (values - own_mean.view(shape)).square().sum(over)
        # Gathered by process, as sums of squares would lose the digits of a variance below a large mean.
        parts = all_gather_equal(torch.stack([own_mean, own_squares, torch.full_like(own_mean, count)])[None])
        means, squares, counts = parts.unbind(1)  # (processes, channels) each
        rows = counts.sum(0).clamp(min=1)
        mean = (counts * means).sum(0) / rows
        variance = (squares + counts * (means - mean).square()).sum(0) / rows
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, rows)
        ctx.mark_non_differentiable(mean, variance, rows)
        out = (values - mean.view(shape)) * (scale * weight).view(shape) + bias.view(shape)
        return out.to(x.dtype), mean, variance, rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, rows = ctx.saved_tensors
        grad, over, shape = grads[0].float(), [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        centred = x.float() - mean.view(shape)
        sums = torch.stack([grad.sum(over), (grad * centred).sum(over)])
        mean_grad, scale_grad = all_reduce_sum(sums) / rows
        moved = grad - mean_grad.view(shape) - centred * (scale_grad * scale.square()).view(shape)
        input_grad = (moved * (scale * weight).view(shape)).to(x.dtype)
        return input_grad, sums[1] * scale, sums[0], None


class AcrossProcesses(_BatchNorm):
    """What a BatchNorm of any number of dimensions adds to its class: the values of all processes count."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or (world_size() == 1 and x.numel() > x.shape[1]):  # PyTorch refuses one row
            return super().forward(x)
        normalised, mean, variance, rows = _Normalise.apply(x, self.weight, self.bias, self.eps)
        share = (self.momentum or 0.0) * (rows > 1)
        unbiased = variance * rows / (rows - 1).clamp(min=1)
        # `data`, as PyTorch keeps the buffers for the gradient of another pass of the same step.
        self.get_buffer("running_mean").data.lerp_(mean, share)
        self.get_buffer("running_var").data.lerp_(unbiased, share)
        self.get_buffer("num_batches_tracked").add_(1)
        # timm's BatchNormAct2d holds the activation that follows.
        for part in ("drop", "act"):
            if following := getattr(self, part, None):
                normalised = following(normalised)
        return normalised


@cache
def _across_processes(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    """Return the class that takes the statistics of a kind of BatchNorm over all processes."""
    return type(kind.__name__, (AcrossProcesses, kind), {})


def convert_sync_batchnorm(network: nn.Module) -> None:
    """Let every BatchNorm of a network take its statistics over all processes."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, AcrossProcesses):
            module.__class__ = _across_processes(type(module))  # type: ignore[arg-type]

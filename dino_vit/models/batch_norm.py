"""BatchNorm with the statistics of all processes, on CPUs too, unlike nn.SyncBatchNorm."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dino_vit.core.distributed import all_reduce_sum, world_size


class AcrossProcesses(_BatchNorm):
    """What a BatchNorm of any number of dimensions adds to its class: the values of all processes count."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            return super().forward(x)
        values = x.float()
        over = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        count = values.new_full((1,), values.numel() / values.shape[1])
        sums = all_reduce_sum(torch.cat([values.sum(over), count]))
        rows = sums[-1].clamp(min=1)  # a pass may have no masked patch
        mean = sums[:-1] / rows
        centred = values - mean.view(shape)
        variance = all_reduce_sum(centred.square().sum(over)) / rows
        share = (self.momentum or 0.0) * (rows > 1)
        unbiased = variance.detach() * rows / (rows - 1).clamp(min=1)
        self.get_buffer("running_mean").lerp_(mean.detach(), share)
        self.get_buffer("running_var").lerp_(unbiased, share)
        self.get_buffer("num_batches_tracked").add_(1)
        scale = (variance + self.eps).rsqrt() * self.weight
        normalised = (centred * scale.view(shape) + self.bias.view(shape)).to(x.dtype)
        # timm's BatchNormAct2d holds the activation that follows.
        for part in ("drop", "act"):
            if following := getattr(self, part, None):
                normalised = following(normalised)
        return normalised


class BatchNorm(AcrossProcesses, nn.BatchNorm1d):
    """The BatchNorm of the projection head."""


def convert_sync_batchnorm(network: nn.Module) -> None:
    """Let every BatchNorm of a network take its statistics over all processes."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, AcrossProcesses):
            kind = type(module)
            module.__class__ = type(kind.__name__, (AcrossProcesses, kind), {})

"""The projection head: an MLP onto unit vectors, and their cosines with the prototypes.

Parameters are named as in the 2021 reference, so that its checkpoints load by name.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Prototypes(nn.Module):
    """Linear layer without bias whose rows have a direction `weight_v` and a length `weight_g`."""

    def __init__(self, *, dim: int, prototypes: int, learn_gain: bool) -> None:
        super().__init__()
        bound = dim**-0.5  # nn.Linear's own initialisation
        self.weight_g = nn.Parameter(torch.ones(prototypes, 1), requires_grad=learn_gain)
        self.weight_v = nn.Parameter(torch.empty(prototypes, dim).uniform_(-bound, bound))

    def weight(self) -> Tensor:
        """Return the effective weight (prototypes, dim)."""
        weight: Tensor = torch._weight_norm(self.weight_v, self.weight_g, 0)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight())


class DINOHead(nn.Module):
    """Project backbone features onto unit vectors and compare those with the prototypes."""

    def __init__(
        self,
        *,
        in_dim: int,
        prototypes: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        layers: int = 3,
        batch_norm: bool = False,
        norm_last_layer: bool = True,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"The head has {layers} layers: it needs at least 1, the recipe has 3.")
        widths = [in_dim, *[hidden_dim] * (layers - 1)]
        mlp: list[nn.Module] = []
        for width, next_width in pairwise(widths):
            mlp.append(nn.Linear(width, next_width))
            if batch_norm:
                mlp.append(nn.BatchNorm1d(next_width))
            mlp.append(nn.GELU())
        bottleneck = nn.Linear(widths[-1], bottleneck_dim)
        self.mlp = nn.Sequential(*mlp, bottleneck) if mlp else bottleneck
        self.last_layer = Prototypes(
            dim=bottleneck_dim, prototypes=prototypes, learn_gain=not norm_last_layer
        )
        self.mlp.apply(_init_linear)

    def project(self, x: Tensor) -> Tensor:
        """Return the L2-normalised bottleneck features (rows, bottleneck), at least in float32."""
        x = self.mlp(x)
        # In float16 the square of a small entry is zero, in bfloat16 a unit vector is 0.4 % off.
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, eps=1e-12)

    def prototype_weight(self) -> Tensor:
        """Return the effective weight of the prototypes (prototypes, bottleneck)."""
        return self.last_layer.weight()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (rows, prototypes)."""
        logits: Tensor = self.last_layer(self.project(x))
        return logits


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)

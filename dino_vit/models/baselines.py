"""Baselines in the place of a network: features of an image that nothing has learned.

`pixels` are the normalised pixels of a small image. `gradients` are histograms of oriented gradients, after
Dalal and Triggs (2005): 9 orientations from 0 to 180 degrees, of cells of 8 × 8 pixels; each block of 2 × 2
cells is normalised, clipped and normalised again, so that lighting and contrast hardly matter.

b images, c channels, n orientations, y x rows and columns of cells or blocks, v u those within a block
"""

import math
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from dino_vit.config.constructors import build
from dino_vit.config.sections import BaselineName
from dino_vit.config.settings import STRICT, Dimension, Side
from dino_vit.core import Size, height_width
from dino_vit.models.backbone import Backbone

ORIENTATIONS, CELL, CLIP = 9, 8, 0.2
EPS = 1e-4  # of the norm of a block, so that an even block stays near 0


def orientation_histograms(images: Tensor, cell: Size) -> Tensor:
    """Return the mean gradients by orientation of cells, (b, n, y, x), of images (b, c, H, W), in float32.

    A pixel counts by the channel in which its gradient is largest; what is outside of whole cells does not.
    """
    padded = F.pad(images.float(), (1, 1, 1, 1), mode="replicate")
    dx = padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]
    dy = padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]
    length, channel = (dx.square() + dy.square()).sqrt().max(dim=1, keepdim=True)
    angle = torch.atan2(dy.gather(1, channel), dx.gather(1, channel))
    # An angle between the centres of two orientations counts for both; opposite directions are one.
    position = angle * (ORIENTATIONS / math.pi) - 0.5  # in orientations
    lower, above = position.floor().long() % ORIENTATIONS, position - position.floor()
    votes = length.new_zeros(len(images), ORIENTATIONS, *images.shape[-2:])
    votes.scatter_(1, lower, length * (1 - above))
    votes.scatter_(1, (lower + 1) % ORIENTATIONS, length * above)
    return F.avg_pool2d(votes, cell)


def gradient_histograms(images: Tensor) -> Tensor:
    """Return histograms of the gradients (b, n · 4 · (y - 1) · (x - 1)) of images (b, c, H, W)."""
    cells = orientation_histograms(images, (CELL, CELL))
    blocks = rearrange(cells.unfold(2, 2, 1).unfold(3, 2, 1), "b n y x v u -> b (v u n) y x")
    return normalise_block(blocks, 1, CLIP).flatten(1)


def normalise_block(histograms: Tensor, dim: int, clip: float) -> Tensor:
    """Normalise histograms, clip what stands out, and normalise again."""
    return F.normalize(F.normalize(histograms, dim=dim, eps=EPS).clamp(max=clip), dim=dim, eps=EPS)


FEATURES: dict[BaselineName, Callable[[Tensor], Tensor]] = {
    "pixels": lambda images: images.flatten(1),
    "gradients": gradient_histograms,
}
# More pixels cost memory and classify no better.
SIDES: dict[BaselineName, int] = {"pixels": 32, "gradients": 48}


@dataclass(kw_only=True, config=STRICT)
class BaselineConfig:
    """The keywords of a `Baseline`, which its files of classifiers record."""

    name: BaselineName
    image_size: Side | None = None  # by the name
    channels: Dimension = 3


class Baseline(Backbone):
    """Features that nothing has learned, in the place of a network; it has no parameters."""

    config: BaselineConfig
    has_patches, depth, heads, registers, grad_checkpointing = False, 1, 0, 0, False
    on_device: Tensor
    __signature__ = signature(BaselineConfig)

    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        config = build(BaselineConfig, keywords)
        self.config, self.compute, self.channels = config, FEATURES[config.name], config.channels
        self.image_size = self.patch_size = height_width(config.image_size or SIDES[config.name])
        if config.name == "gradients" and min(self.image_size) < 2 * CELL:
            raise ValueError(f"gradients need images of {2 * CELL} pixels or more, not {self.image_size}")
        self.width = self.compute(torch.empty(1, self.channels, *self.image_size, device="meta")).shape[1]
        self.head = nn.Identity()
        self.register_buffer("on_device", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.on_device.device

    def forward_cls(self, images: Tensor) -> Tensor:
        return self.compute(images)

    def forward_features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        return rearrange(self.forward_cls(images), "b d -> b 1 d")

    def get_intermediate_layers(self, images: Tensor, blocks: int | Sequence[int] = 1) -> list[Tensor]:
        if blocks not in (1, [0], [-1]):
            raise ValueError(f"blocks={blocks}: {self.config.name} are of one block")
        return [self.forward_features(images)]

    def grid_of(self, height: int, width: int) -> Size:
        if (height, width) != self.image_size:
            sides = " × ".join(map(str, self.image_size))
            raise ValueError(f"these {self.config.name} are of images of {sides} pixels")
        return 0, 0

    def layers(self) -> dict[str, int]:
        return {}

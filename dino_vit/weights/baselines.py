"""Baselines in the place of a network: features of an image that nothing has learned.

`pixels` are the normalised pixels of a small image, `edges` the histograms of `models/edges.py`.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from einops import rearrange
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from dino_vit.config.constructors import build
from dino_vit.config.sections import BaselineName
from dino_vit.config.settings import STRICT, Dimension, Side
from dino_vit.core import Size, height_width
from dino_vit.models.backbone import Backbone
from dino_vit.models.edges import CELL, edge_histograms

FEATURES: dict[BaselineName, Callable[[Tensor], Tensor]] = {
    "pixels": lambda images: images.flatten(1),
    "edges": edge_histograms,
}
# More pixels cost memory and classify no better.
SIDES: dict[BaselineName, int] = {"pixels": 32, "edges": 48}


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
        if config.name == "edges" and min(self.image_size) < 2 * CELL:
            raise ValueError(f"edges need images of {2 * CELL} pixels or more, not {self.image_size}")
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

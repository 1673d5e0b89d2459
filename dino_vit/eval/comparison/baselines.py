"""Baselines for any backbone: raw pixels in the place of features, and the same network untrained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dino_vit.core import Size
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.data.image_set import ImageSet
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.reading import raw_pixel_transform
from dino_vit.models.backbone import Backbone, Provenance

RAW_PIXELS, UNTRAINED = "raw pixels", "untrained"


class RawPixels(Backbone):
    """A baseline in the place of a backbone: the normalised pixels of small images are their features."""

    has_patches, depth, heads, registers, grad_checkpointing = False, 1, 0, 0, False
    anchor: Tensor

    def __init__(self, size: Size, channels: int) -> None:
        super().__init__()
        self.image_size = self.patch_size = size
        self.channels, self.width = channels, channels * size[0] * size[1]
        self.head = nn.Identity()
        self.register_buffer("anchor", torch.empty(0), persistent=False)  # which device it is on
        self.provenance = Provenance(source=RAW_PIXELS)

    @property
    def architecture(self) -> dict[str, Any]:
        return {RAW_PIXELS: self.image_size, "channels": self.channels}

    @property
    def device(self) -> torch.device:
        return self.anchor.device

    def forward_cls(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def forward_features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.forward_cls(images)[:, None]

    def get_intermediate_layers(self, images: Tensor, blocks: int | Sequence[int] = 1) -> list[Tensor]:
        return [self.forward_features(images)]

    def grid_of(self, height: int, width: int) -> Size:
        return 1, 1

    def layers(self) -> dict[str, int]:
        return {}


def raw_pixels_of(source: ImageSet, frozen: FrozenBackbone) -> FrozenBackbone:
    """Return the raw pixels of images in the place of the features of a backbone."""
    transform = raw_pixel_transform(source, range(len(source)), frozen.transform.pixels)
    model = RawPixels(transform.size, transform.pixels.channels).eval().to(frozen.device)
    return replace(frozen, model=model, transform=transform, autocast=None)


def untrained_like(trained: FrozenBackbone, seed: int) -> FrozenBackbone:
    """Return a backbone that sees the same images as another, its parameters drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, RngPurpose.NETWORK))
        model = type(trained.model)(**trained.model.architecture)
    nothing: dict[str, Any] = {"source": UNTRAINED, "sha256": "", "network": None, "step": None}
    model.provenance = replace(trained.model.provenance, **nothing, config={})
    return replace(trained, model=model.eval().to(trained.device))

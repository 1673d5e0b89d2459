"""Which tokens of a backbone, after the final LayerNorm, are the features of an image."""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from dino_vit.config.sections import Tokens
from dino_vit.core import Size
from dino_vit.models.backbone import Backbone


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """The tokens of the last `blocks` blocks, joined along the channels, the last block's at the end.

    `cls`: the CLS tokens; `mean`: the means of the patches; `cls+mean`: the CLS tokens, then the mean of the
    last block alone, as DINOv2's probes read them; `patches`: the patches (N, D); `all`: the CLS token, the
    registers and the patches (1 + R + N, D).
    """

    tokens: Tokens = "cls"
    blocks: int = 1

    def shape(self, model: Backbone, size: Size) -> tuple[int, ...]:
        """Return the shape of one image's features."""
        width = (self.blocks + self.with_mean) * model.width
        if self.tokens not in ("patches", "all"):
            return (width,)
        rows, columns = model.grid_of(*size)
        return rows * columns + (model.first_patch if self.tokens == "all" else 0), width

    @property
    def with_mean(self) -> bool:
        """Whether the mean patch of the last block is added at the end."""
        return self.tokens == "cls+mean"

    @property
    def title(self) -> str:
        """Return these tokens in words."""
        cls = "CLS" if self.blocks == 1 else f"CLS of {self.blocks} blocks"
        return cls + " + mean patch" * self.with_mean

    @property
    def settings(self) -> str:
        """Return these tokens as `knn` and `embed` take them, the default as "CLS"."""
        return "CLS" if self == CLS else f"tokens={self.tokens} blocks={self.blocks}"

    def columns_in(self, other: "FeatureSpec", width: int) -> slice:
        """Return the columns of these tokens among the features of a spec that has more of them."""
        end = other.blocks + self.with_mean
        return slice((other.blocks - self.blocks) * width, end * width)

    def of(self, model: Backbone, images: Tensor) -> Tensor:
        """Return the features of normalised images (B, C, H, W)."""
        if self.tokens == "cls" and self.blocks == 1:
            return model.forward_cls(images)  # the last block computes no other token
        if self.tokens != "cls" and not model.has_patches:
            raise ValueError(f"tokens={self.tokens} needs patches, which this backbone lacks; use tokens=cls")
        layers = model.get_intermediate_layers(images, self.blocks)
        if self.tokens == "all":
            parts = layers
        elif self.tokens == "patches":
            parts = [layer[:, model.first_patch :] for layer in layers]
        else:
            means = [layer[:, model.first_patch :].mean(dim=1) for layer in layers]
            cls = [layer[:, 0] for layer in layers]
            parts = {"cls": cls, "mean": means, "cls+mean": [*cls, means[-1]]}[self.tokens]
        return torch.cat(parts, dim=-1)


CLS = FeatureSpec()


def simple_specs(model: Backbone) -> list[FeatureSpec]:
    """Return what classifiers read: CLS tokens of one block and of four, without and with the mean patch."""
    tokens: tuple[Tokens, ...] = ("cls", "cls+mean") if model.has_patches else ("cls",)
    blocks = sorted({1, min(4, model.depth)})
    return [FeatureSpec(tokens=kind, blocks=count) for kind, count in product(tokens, blocks)]

"""What the library needs of a backbone, and which of its tokens are the features of an image."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.config.sections import Tokens
from dino_vit.core import Size
from dino_vit.models.edges import edge_histograms, edges_width
from dino_vit.models.layers import init_linear

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Provenance:
    """Where the weights of a backbone come from, and how their training images were normalised."""

    format: str = ""
    source: str = ""
    sha256: str = ""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    bits: Literal[8, 16] | None = None
    range: tuple[float, float] | None = None  # the pixel values that were mapped to 0 and 1
    size: Size | None = None  # of images in evaluations, where it is not that of the positions
    preparation: dict[str, Any] = field(default_factory=dict)  # other arguments of `EvalTransform`
    network: str | None = None
    step: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


class Backbone(nn.Module):
    """A network from images (B, C, H, W) to CLS features (B, D), or to class logits."""

    config: "DataclassInstance"  # the arguments that build it
    provenance = Provenance()  # none
    grad_checkpointing: bool  # activation checkpointing: less memory, more time
    image_size: Size
    patch_size: Size
    channels: int
    width: int
    depth: int  # number of blocks whose tokens `get_intermediate_layers` returns
    heads: int  # of attention; 0 if its weights cannot be shown
    registers: int
    has_patches: bool = True
    head: nn.Module

    def forward(self, images: Tensor) -> Tensor:
        """Return CLS features (B, D), or class logits."""
        logits: Tensor = self.head(self.forward_cls(images))
        return logits

    @abstractmethod
    def forward_cls(self, images: Tensor) -> Tensor:
        """Return CLS features (B, D)."""

    @abstractmethod
    def forward_features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return all tokens (B, 1 + R + N, D), CLS first; `mask` (B, N) are the masked patches."""

    @abstractmethod
    def get_intermediate_layers(self, images: Tensor, blocks: int | Sequence[int] = 1) -> list[Tensor]:
        """Return the tokens of the last n blocks, or of the given blocks."""

    @abstractmethod
    def grid_of(self, height: int, width: int) -> Size:
        """Return the grid of patches (h, w) of an image of this size, or raise ValueError."""

    @abstractmethod
    def layers(self) -> dict[str, int]:
        """Return the layer of each parameter, counted from the input; the head comes last."""

    @property
    def architecture(self) -> dict[str, Any]:
        """The arguments that build it, as files of weights record them."""
        return asdict(self.config)

    @property
    def first_patch(self) -> int:
        """The number of tokens before the patches."""
        return 1 + self.registers

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def add_classifier(self, classes: int) -> None:
        """Replace the head by a new classifier."""
        self.head = nn.Linear(self.width, classes)
        init_linear(self.head)
        self.config = replace(self.config, num_classes=classes)


CELLS = 3  # rows and columns of cells
EDGES_SIDE, PIXELS_SIDE = 48, 12  # of an image that is shrunk to look at its edges or pixels


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Parts that are joined, as in `cls+cells`: of the first those of the last `blocks` blocks.

    `cls`: the CLS token; `mean`: the mean of the patches; `cells`: that of each of 3 × 3 cells; `patches`:
    the patches (N, D); `all`: the CLS token, the registers and the patches (1 + R + N, D). All but the first
    part are of the last block alone, as DINOv2's probes read the mean. Of the image itself: `edges`, their
    histograms, and `pixels`, those of a tiny copy.
    """

    tokens: str = "cls"
    blocks: int = 1

    @property
    def parts(self) -> list[str]:
        """The names of the parts."""
        return self.tokens.split("+")

    def shape(self, model: Backbone, size: Size) -> tuple[int, ...]:
        """Return the shape of one image's features."""
        if self.tokens not in ("patches", "all"):
            return (sum(self.widths(model)),)
        rows, columns = model.grid_of(*size)
        first = model.first_patch if self.tokens == "all" else 0
        return rows * columns + first, self.blocks * model.width

    def widths(self, model: Backbone) -> list[int]:
        """Return the number of features of each part."""
        widths = {"cls": model.width, "mean": model.width, "cells": CELLS**2 * model.width}
        widths |= {"edges": edges_width(EDGES_SIDE), "pixels": PIXELS_SIDE**2 * model.channels}
        first, *others = (widths[part] for part in self.parts)
        return [self.blocks * first, *others]

    @property
    def with_mean(self) -> bool:
        """Whether the mean patch of the last block is added at the end."""
        return self.tokens == "cls+mean"

    @property
    def title(self) -> str:
        """Return these tokens in words."""
        cls = "CLS" if self.blocks == 1 else f"CLS of {self.blocks} blocks"
        return cls + " + mean patch" * self.with_mean

    def columns_in(self, other: "FeatureSpec", width: int) -> slice:
        """Return the columns of these tokens among the features of a spec that has more of them."""
        end = other.blocks + self.with_mean
        return slice((other.blocks - self.blocks) * width, end * width)

    def extract(self, model: Backbone, images: Tensor) -> Tensor:
        """Return the features of normalised images (B, C, H, W)."""
        if self.tokens == "cls" and self.blocks == 1:
            return model.forward_cls(images)  # the last block computes no other token
        if not model.has_patches and {"mean", "cells", "patches", "all"} & {*self.parts}:
            raise ValueError(f"tokens={self.tokens} needs patches, which this backbone lacks; use tokens=cls")
        layers, start = model.get_intermediate_layers(images, self.blocks), model.first_patch
        of_part: dict[str, Callable[[Tensor], Tensor]] = {
            "cls": lambda layer: layer[:, 0],
            "mean": lambda layer: layer[:, start:].mean(dim=1),
            "cells": lambda layer: mean_by_cell(layer[:, start:], model.grid_of(*images.shape[-2:])),
            "patches": lambda layer: layer[:, start:],
            "all": lambda layer: layer,
            "edges": lambda _: edge_histograms(shrink(images, EDGES_SIDE)),
            "pixels": lambda _: shrink(images, PIXELS_SIDE).flatten(1),
        }
        first, *others = self.parts
        parts = [*map(of_part[first], layers), *(of_part[part](layers[-1]) for part in others)]
        return torch.cat(parts, dim=-1)


def shrink(images: Tensor, side: int) -> Tensor:
    """Return images (B, C, H, W) at (B, C, side, side)."""
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True)


def mean_by_cell(patches: Tensor, grid: Size) -> Tensor:
    """Return the mean patch of each of 3 × 3 cells, (B, 9 · D), of patches (B, N, D).

    Where 3 does not divide the sides of the grid, cells overlap by a row or a column of patches.
    """
    maps = rearrange(patches, "b (h w) d -> b d h w", h=grid[0])
    return rearrange(F.adaptive_avg_pool2d(maps, CELLS), "b d y x -> b (y x d)")


CLS = FeatureSpec()


def simple_specs(model: Backbone) -> list[FeatureSpec]:
    """Return what classifiers read: CLS tokens of one block and of four, without and with the mean patch."""
    tokens: tuple[Tokens, ...] = ("cls", "cls+mean") if model.has_patches else ("cls",)
    blocks = sorted({1, min(4, model.depth)})
    return [FeatureSpec(tokens=kind, blocks=count) for kind, count in product(tokens, blocks)]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode and switch gradients off, then restore the mode of each."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: what a module caches must serve training too
            yield
    finally:
        for module, training in modes.items():
            module.training = training

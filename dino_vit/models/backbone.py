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


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """The tokens of the last `blocks` blocks, joined along the channels, the last block's at the end.

    `cls`: the CLS tokens; `mean`: the means of the patches; `cells`: the means of the patches of 3 × 3 cells;
    `cls+mean`, `cls+cells`: the CLS tokens, then the mean or the cells of the last block alone, as DINOv2's
    probes read the mean; `patches`: the patches (N, D); `all`: the CLS token, the registers and the patches
    (1 + R + N, D).
    """

    tokens: Tokens = "cls"
    blocks: int = 1

    def shape(self, model: Backbone, size: Size) -> tuple[int, ...]:
        """Return the shape of one image's features."""
        if self.tokens not in ("patches", "all"):
            return (sum(self.widths(model)),)
        rows, columns = model.grid_of(*size)
        first = model.first_patch if self.tokens == "all" else 0
        return rows * columns + first, self.blocks * model.width

    def widths(self, model: Backbone) -> list[int]:
        """Return the numbers of features of the CLS tokens, and of the patches of an image."""
        kind, _, added = self.tokens.partition("+")
        places = {"cls": 1, "mean": 1, "cells": CELLS**2}
        return [self.blocks * places[kind] * model.width, *([places[added] * model.width] if added else [])]

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
        if self.tokens != "cls" and not model.has_patches:
            raise ValueError(f"tokens={self.tokens} needs patches, which this backbone lacks; use tokens=cls")
        layers = model.get_intermediate_layers(images, self.blocks)
        kind, _, added = self.tokens.partition("+")
        of_kind: dict[str, Callable[[Tensor], Tensor]] = {
            "cls": lambda layer: layer[:, 0],
            "mean": lambda layer: layer[:, model.first_patch :].mean(dim=1),
            "cells": lambda layer: mean_by_cell(
                layer[:, model.first_patch :], model.grid_of(*images.shape[-2:])
            ),
            "patches": lambda layer: layer[:, model.first_patch :],
            "all": lambda layer: layer,
        }
        parts = [*map(of_kind[kind], layers), *([of_kind[added](layers[-1])] if added else [])]
        return torch.cat(parts, dim=-1)


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

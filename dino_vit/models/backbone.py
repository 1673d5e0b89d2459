"""What the library needs of a backbone: CLS features of images, and patches where it has them."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dino_vit.core import Size
from dino_vit.models.linear import Linear, init_linear

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
    depth: int  # blocks whose tokens `get_intermediate_layers` returns
    heads: int  # whose attention can be shown
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
        self.head = Linear(self.width, classes)
        init_linear(self.head)
        self.config = replace(self.config, num_classes=classes)


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

"""Images with masks: the class of every pixel."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.source import Source

IGNORED = 255  # pixels of a mask that belong to no class


@runtime_checkable
class MaskedSource(Source, Protocol):
    """A set of images of which each has a mask; `classes` are those of the pixels."""

    def mask(self, index: int) -> Tensor:
        """Return the class of every pixel, uint8 (H, W); `IGNORED` where there is none."""


def open_masks(spec: str) -> MaskedSource:
    """Open a set of images with masks."""
    source = open_source(spec)
    if not isinstance(source, MaskedSource):
        raise ValueError(f"{spec} has no masks; generated scenes have: synthetic:scenes")
    return source

"""Which patches of a batch of views are masked."""

from typing import NamedTuple

import torch
from torch import Tensor


class Masks(NamedTuple):
    """The masked patches of some views, of which each has N patches."""

    mask: Tensor  # bool (views, N)
    mask_indices: Tensor  # int64 (masked,): indices into the flattened mask
    weights: Tensor  # float32 (masked,): 1 / number of masked patches of the same view

    @classmethod
    def of(cls, mask: Tensor) -> "Masks":
        """Return the masks of a boolean mask (views, N)."""
        weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return cls(mask, mask.flatten().nonzero().squeeze(1), weights[mask])

    def to(self, device: torch.device) -> "Masks":
        """Return the masks on a device, which the host does not wait for."""
        return Masks(*(part.to(device, non_blocking=True) for part in self))

    def pin_memory(self) -> "Masks":
        """Return the masks in pinned memory."""
        return Masks(*(part.pin_memory() for part in self))

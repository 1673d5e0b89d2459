"""Which patches of a batch of views are masked."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Masks(NamedTuple):
    """The masked patches of some views, of which each has N patches."""

    hidden: Tensor  # bool (views, N)
    places: Tensor  # int64 (masked,): indices into the flattened `hidden`
    weights: Tensor  # float32 (masked,): 1 / number of masked patches of the same view

    @classmethod
    def of(cls, hidden: Tensor) -> "Masks":
        """Return the masks of hidden patches (views, N)."""
        weights = hidden / hidden.sum(dim=1, keepdim=True).clamp(min=1)
        return cls(hidden, hidden.flatten().nonzero().squeeze(1), weights[hidden])

    @property
    def masked(self) -> int:
        """Return the number of masked patches, without padding."""
        return len(self.weights)

    def padded(self, length: int) -> "Masks":
        """Return the masks with as many places as in any other batch; those added are of the first patch."""
        return self._replace(places=F.pad(self.places, (0, length - self.masked)))

    def to(self, device: torch.device) -> "Masks":
        """Return the masks on a device, which the host does not wait for."""
        return Masks(*(part.to(device, non_blocking=True) for part in self))

    def pin_memory(self) -> "Masks":
        """Return the masks in pinned memory."""
        return Masks(*(part.pin_memory() for part in self))

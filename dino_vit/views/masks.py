"""Which patches of the global views the student does not see: masked rectangles, as in BEiT, or any patches.

Those of a step are a function of the seed, the step, and the position of each image in the global batch.
So they do not depend on the number of processes or micro-batches.
"""

from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform

TRIES = 10  # rectangles in a row that add nothing, before a view is left as it is
SMALLEST = 4  # patches of a rectangle
NARROWEST = 0.3  # height : width, or the other way round


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


@dataclass(frozen=True, kw_only=True)
class PatchDrop:
    """How the patches that a student sees are drawn: as many of each view, all equally likely."""

    seed: int
    patches: int  # of a view
    kept: int
    views: int  # global views of an image
    batch: int  # images of a step, over all processes and micro-batches

    def draw(self, epoch: int, step: int, first: int, images: int) -> Tensor:
        """Draw the indices (views · images, kept) for so many images, from a position in the batch on."""
        indices = np.arange(self.views)[:, None] * self.batch + np.arange(first, first + images)
        keys = self.seed, RngPurpose.KEPT_PATCHES, epoch, step, indices.reshape(-1, 1)
        order = random_bits(*keys, np.arange(self.patches)).argpartition(self.kept - 1, axis=1)
        return torch.from_numpy(np.sort(order[:, : self.kept], axis=1))


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How masks are drawn: for a share of all views, from `ratio[0]` to `ratio[1]` of their patches."""

    seed: int
    grid: tuple[int, int]
    views: int  # global views of an image
    batch: int  # images of a step, over all processes and micro-batches
    probability: float
    ratio: tuple[float, float]

    def draw(self, epoch: int, step: int, first: int, images: int) -> Masks:
        """Draw the masks of so many images, from a position in the global batch on."""
        mask = self.draw_grids(epoch, step, np.arange(first, first + images))
        return Masks.of(torch.from_numpy(mask).flatten(0, 1).flatten(1))

    def draw_grids(self, epoch: int, step: int, images: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Draw the masks (views, images, h, w) of the images at these positions of the global batch."""
        keys = self.seed, RngPurpose.MASKS, epoch, step
        total = self.views * self.batch
        masked = max(round(self.probability * self.views * self.batch), 1)  # at least one view
        ranks = np.empty(total, dtype=np.int64)
        ranks[np.argsort(random_bits(*keys, np.arange(total)))] = np.arange(total)
        indices = (np.arange(self.views)[:, None] * self.batch + images).ravel()
        counts = np.zeros(len(indices), dtype=np.int64)
        chosen = ranks[indices] < masked
        # One ratio from each of `masked` equal parts of the range, so that all steps have about the same.
        low, high = self.ratio
        stratum = ranks[indices[chosen]] + random_uniform(*keys, total + indices[chosen])
        ratio = low + (high - low) * stratum / masked
        counts[chosen] = (ratio * self.grid[0] * self.grid[1]).astype(np.int64)
        return self._rectangles(counts, keys, indices).reshape(self.views, len(images), *self.grid)

    def _rectangles(
        self, counts: NDArray[np.int64], keys: tuple[Any, ...], indices: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Mask rectangles of each view until it has its count, or ten in a row have added nothing."""
        height, width = self.grid
        rows, columns = np.arange(height)[:, None], np.arange(width)
        mask = np.zeros((len(indices), height, width), dtype=np.bool_)
        left, failures = counts.copy(), np.zeros_like(counts)
        trial = 0
        while len(active := np.flatnonzero((left > 0) & (failures < TRIES))):
            numbers = random_uniform(*keys, indices[active, None], trial, np.arange(4))
            area, aspect, top, start = numbers.T
            area = SMALLEST + area * (left[active] - SMALLEST)
            aspect = np.exp((2 * aspect - 1) * -log(NARROWEST))
            h, w = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
            top, start = np.floor(top * (height - h + 1)), np.floor(start * (width - w + 1))
            h, w, top, start = (values[:, None, None] for values in (h, w, top, start))
            inside = (rows >= top) & (rows < top + h) & (columns >= start) & (columns < start + w)
            inside &= ~mask[active] & (h < height) & (w < width)
            new = inside.sum((1, 2))
            fits = (new > 0) & (new <= left[active])
            mask[active[fits]] |= inside[fits]
            left[active[fits]] -= new[fits]
            failures[active] = np.where(fits, 0, failures[active] + 1)
            trial += 1
        # Where no rectangle fits, as on a few patches, single ones are masked, so that no view has none.
        bare = np.flatnonzero((counts > 0) & ~mask.any((1, 2)))
        ranks = (
            random_bits(*keys, indices[bare, None], trial, np.arange(height * width)).argsort(1).argsort(1)
        )
        mask[bare] = (ranks < counts[bare, None]).reshape(-1, height, width)
        return mask

"""Which patches of the global views the student does not see: rectangles of patches, as in BEiT.

The masks of a step are a function of the seed, the step, and the place of each image in the global batch. So
they do not depend on the number of processes or passes.
"""

from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform
from dino_vit.models.masks import Masks

TRIES = 10  # rectangles in a row that add nothing, before a view is left as it is
SMALLEST = 4  # patches of a rectangle
NARROWEST = 0.3  # height : width, or the other way round


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How masks are drawn: for a share of all views, from `ratio[0]` to `ratio[1]` of their patches."""

    seed: int
    grid: tuple[int, int]
    views: int  # global views of an image
    batch: int  # images of a step, over all processes and passes
    probability: float
    ratio: tuple[float, float]

    def __post_init__(self) -> None:
        if not self.masked:
            raise ValueError(
                f"masks.probability={self.probability} masks none of the {self.views * self.batch} views "
                "of a step; raise it, or take larger batches"
            )

    @property
    def masked(self) -> int:
        """Return how many views of a batch are masked."""
        return round(self.probability * self.views * self.batch)

    def draw(self, epoch: int, step: int, first: int, images: int) -> Masks:
        """Draw the masks of so many images, from a place in the global batch on."""
        hidden = self.hidden(epoch, step, np.arange(first, first + images))
        return Masks.of(torch.from_numpy(hidden).flatten(0, 1).flatten(1))

    def hidden(self, epoch: int, step: int, images: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Draw the hidden patches (views, images, h, w) of the images at these places of the batch."""
        keys = self.seed, RngPurpose.MASKS, epoch, step
        total, masked = self.views * self.batch, self.masked
        ranks = np.empty(total, dtype=np.int64)
        ranks[np.argsort(random_bits(*keys, np.arange(total)))] = np.arange(total)
        own = (np.arange(self.views)[:, None] * self.batch + images).ravel()
        counts = np.zeros(len(own), dtype=np.int64)
        chosen = ranks[own] < masked
        # One ratio from each of `masked` equal parts of the range, so that all steps have about the same.
        low, high = self.ratio
        stratum = ranks[own[chosen]] + random_uniform(*keys, total + own[chosen])
        share = low + (high - low) * stratum / masked
        counts[chosen] = (share * self.grid[0] * self.grid[1]).astype(np.int64)
        return self._rectangles(counts, keys, own).reshape(self.views, len(images), *self.grid)

    def _rectangles(
        self, counts: NDArray[np.int64], keys: tuple[Any, ...], own: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Mask rectangles of each view until it has its count, or ten in a row have added nothing."""
        height, width = self.grid
        rows, columns = np.arange(height)[:, None], np.arange(width)
        hidden = np.zeros((len(own), height, width), dtype=np.bool_)
        left, failures = counts.copy(), np.zeros_like(counts)
        trial = 0
        while len(active := np.flatnonzero((left > 0) & (failures < TRIES))):
            numbers = random_uniform(*keys, own[active, None], trial, np.arange(4))
            area, aspect, top, start = numbers.T
            area = SMALLEST + area * (left[active] - SMALLEST)
            aspect = np.exp((2 * aspect - 1) * -log(NARROWEST))
            h, w = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
            top, start = np.floor(top * (height - h + 1)), np.floor(start * (width - w + 1))
            h, w, top, start = (one[:, None, None] for one in (h, w, top, start))
            inside = (rows >= top) & (rows < top + h) & (columns >= start) & (columns < start + w)
            inside &= ~hidden[active] & (h < height) & (w < width)
            new = inside.sum((1, 2))
            fits = (new > 0) & (new <= left[active])
            hidden[active[fits]] |= inside[fits]
            left[active[fits]] -= new[fits]
            failures[active] = np.where(fits, 0, failures[active] + 1)
            trial += 1
        # Where no rectangle fits, as on a few patches, single ones are masked, so that no view has none.
        bare = np.flatnonzero((counts > 0) & ~hidden.any((1, 2)))
        ranks = random_bits(*keys, own[bare, None], trial, np.arange(height * width)).argsort(1).argsort(1)
        hidden[bare] = (ranks < counts[bare, None]).reshape(-1, height, width)
        return hidden

    def most(self, images: int) -> int:
        """Return how many patches of so many images of a batch may be masked together at most."""
        parts = np.arange(max(0, self.masked - self.views * images), self.masked) + 1
        low, high = self.ratio
        share = low + (high - low) * parts / self.masked
        return int((share * self.grid[0] * self.grid[1]).astype(np.int64).sum())

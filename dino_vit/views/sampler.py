"""Which images make up which step: a function of (seed, epoch) and of the place of the step in the epoch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform


class BatchSpec(NamedTuple):
    """One process's part of a step, or of one of its forward passes."""

    epoch: int
    step: int  # within the epoch
    samples: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Split each epoch's order into global batches, those into passes, and those into a part a process.

    The images of a step do not depend on the number of processes or of passes (`accumulate`). A rest that
    fills no batch is left out. With `weights`, an epoch draws as many images as there are, each time any of
    them by its weight: some come often, others not at all.
    """

    length: int
    batch_size: int  # of a step: over all processes and passes
    seed: int
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    weights: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        parts = self.world_size * self.accumulate
        if self.batch_size < 1 or self.batch_size % parts:
            raise ValueError(
                f"A global batch of {self.batch_size} images cannot be split evenly over {self.world_size} "
                f"processes in {self.accumulate} passes; make it a multiple of {parts}."
            )
        if self.length < self.batch_size:
            raise ValueError(
                f"{self.length} images do not fill one global batch of {self.batch_size}; "
                f"make the batch smaller or add images."
            )
        if self.weights is not None and len(self.weights) != self.length:
            raise ValueError(f"{len(self.weights)} weights are not one for each of {self.length} images.")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, but is {self.rank}.")

    @property
    def steps_per_epoch(self) -> int:
        return self.length // self.batch_size

    @property
    def share(self) -> int:
        """Return the images of one process in one pass."""
        return self.batch_size // (self.world_size * self.accumulate)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of all images in an epoch, or what it draws by weight."""
        if self.weights is not None:
            uniform = random_uniform(self.seed, RngPurpose.ORDER, epoch, np.arange(self.length))
            return _draw_by_weight(self.weights, uniform)
        bits = random_bits(self.seed, RngPurpose.ORDER, epoch, np.arange(self.length))
        return np.argsort(bits)  # no two are equal: one-to-one functions made them, so any sort will do

    def others(self, sample: int, count: int) -> Iterator[int]:
        """Draw images that may stand in for one, as a function of that one alone, once one is wanted."""
        keys = self.seed, RngPurpose.REPLACEMENT, sample, np.arange(count)
        if self.weights is not None:
            yield from _draw_by_weight(self.weights, random_uniform(*keys)).tolist()
        else:
            yield from (random_bits(*keys) % np.uint64(self.length)).tolist()

    def batch_specs(self, position: int = 0) -> Iterator[BatchSpec]:
        """Yield this process's part of each pass of each step from a position (in steps) on, without end."""
        epoch, first = divmod(position, self.steps_per_epoch)
        share = self.share
        while True:
            order = self.order(epoch)
            for step in range(first, self.steps_per_epoch):
                for micro in range(self.accumulate):
                    start = step * self.batch_size + (micro * self.world_size + self.rank) * share
                    yield BatchSpec(epoch, step, order[start : start + share])
            epoch, first = epoch + 1, 0


def _draw_by_weight(weights: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Turn numbers from [0, 1) into places, each as probable as its share of the weights."""
    upper = np.cumsum(weights)  # one after the other, so with the same rounding everywhere
    # From the right, a weight of 0 is stepped over; u · sum is below the sum, even when rounded.
    return np.searchsorted(upper, uniform * upper[-1], side="right")

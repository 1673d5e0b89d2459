"""Which images make up which step: a function of the seed, the epoch and the step within it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform


class BatchSpec(NamedTuple):
    """The images of one process in one forward pass of a step."""

    epoch: int
    step: int  # within the epoch
    samples: NDArray[np.int64]
    first: int = 0  # the place of the first one in the batch of the step, over all processes and passes


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Split the order of an epoch into global batches, those into passes, and those among processes.

    The images of a step do not depend on the number of processes or passes (`accumulate`). A last incomplete
    batch is dropped. With `weights`, an epoch samples `length` images with replacement, by their weights.
    """

    length: int
    batch_size: int  # images of a step, over all processes and passes
    seed: int
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    weights: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        assert 0 < self.batch_size <= self.length, (self.batch_size, self.length)
        assert self.batch_size % (self.world_size * self.accumulate) == 0, self
        assert self.weights is None or len(self.weights) == self.length, self

    @property
    def steps_per_epoch(self) -> int:
        return self.length // self.batch_size

    @property
    def share(self) -> int:
        """Return the number of images of one process in one pass."""
        return self.batch_size // (self.world_size * self.accumulate)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of an epoch: a permutation, or a weighted sample."""
        if self.weights is not None:
            uniform = random_uniform(self.seed, RngPurpose.ORDER, epoch, np.arange(self.length))
            return _draw_by_weight(self.weights, uniform)
        bits = random_bits(self.seed, RngPurpose.ORDER, epoch, np.arange(self.length))
        return np.argsort(bits)  # SplitMix64 is one-to-one, so there are no ties that a sort could break

    def others(self, sample: int, count: int) -> Iterator[int]:
        """Draw replacements for an unreadable image, as a function of its index alone."""
        keys = self.seed, RngPurpose.REPLACEMENT, sample, np.arange(count)
        if self.weights is not None:
            yield from _draw_by_weight(self.weights, random_uniform(*keys)).tolist()
        else:
            yield from (random_bits(*keys) % np.uint64(self.length)).tolist()

    def batch_specs(self, position: int = 0) -> Iterator[BatchSpec]:
        """Yield this process's share of each pass, from a position (in steps) on, without end."""
        epoch, first = divmod(position, self.steps_per_epoch)
        while True:
            order = self.order(epoch)
            for step in range(first, self.steps_per_epoch):
                for micro in range(self.accumulate):
                    first = (micro * self.world_size + self.rank) * self.share
                    start = step * self.batch_size + first
                    yield BatchSpec(epoch, step, order[start : start + self.share], first)
            epoch, first = epoch + 1, 0


def _draw_by_weight(weights: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Turn uniform numbers from [0, 1) into indices whose probabilities are proportional to the weights."""
    upper = np.cumsum(weights)  # sequential, so rounded alike everywhere; a pairwise sum would not be
    # side="right" skips weights of 0; u · sum stays below the sum, even after rounding.
    return np.searchsorted(upper, uniform * upper[-1], side="right")

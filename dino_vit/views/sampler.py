"""Which images make up which step: a function of the seed, the epoch and the step within it.

A file may say how often each image is drawn.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform
from dino_vit.data.labels import values_by_name
from dino_vit.data.sources.source import Source
from dino_vit.data.targets import as_number

WEIGHT_COLUMNS = ("weight", "weights", "sample_weight", "probability")


class BatchSpec(NamedTuple):
    """The images of one process in one micro-batch of a step."""

    epoch: int
    step: int  # within the epoch
    samples: NDArray[np.int64]
    first: int = 0  # position of the first one in the global batch


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Split the order of an epoch into global batches, those into micro-batches, and those among processes.

    The images of a step do not depend on the number of processes or micro-batches (`accumulate`). A last
    incomplete batch is dropped, or with `keep_last` filled with images of the epoch's start until processes
    share it evenly. With `weights`, an epoch samples `length` images with replacement, by their weights. With
    `shards`, the shard of each image, it walks through them in a random order, `window` at a time.
    """

    length: int
    batch_size: int  # images of a step, over all processes and micro-batches
    seed: int
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    keep_last: bool = False
    weights: NDArray[np.float64] | None = None
    shards: NDArray[np.int32] | None = None
    window: int = 16

    def __post_init__(self) -> None:
        assert 0 < self.batch_size <= self.length, (self.batch_size, self.length)
        assert self.batch_size % (self.world_size * self.accumulate) == 0, self
        assert self.weights is None or len(self.weights) == self.length, self
        assert self.shards is None or len(self.shards) == self.length, self

    @property
    def steps_per_epoch(self) -> int:
        return (self.length + self.keep_last * (self.batch_size - 1)) // self.batch_size

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of an epoch: a permutation, or a weighted sample."""
        indices = np.arange(self.length)
        if self.weights is not None:
            uniform = random_uniform(self.seed, RngPurpose.ORDER, epoch, indices)
            drawn = _draw_by_weight(self.weights, uniform)
            return drawn if self.shards is None else drawn[self._walk(self.shards[drawn], epoch)]
        if self.shards is not None:
            return self._walk(self.shards, epoch)
        bits = random_bits(self.seed, RngPurpose.ORDER, epoch, indices)
        return np.argsort(bits)  # SplitMix64 is one-to-one, so there are no ties that a sort could break

    @property
    def span(self) -> int:
        """Return over how many places of the order the images of a shard are spread."""
        if self.shards is None:
            return self.length
        sizes = np.bincount(self.shards)
        # The size of the shard that a random image lies in: with one huge shard, all images mix.
        return min(self.window * int(np.dot(sizes, sizes)) // self.length, self.length)

    def _walk(self, shards: NDArray[np.int32], epoch: int) -> NDArray[np.int64]:
        """Order items of the given shards: each lies at random within `span` places from its shard's first.

        The end of the epoch continues at its start, so that as many shards mix there as anywhere.
        """
        sizes = np.bincount(shards)
        shuffled = np.argsort(random_bits(self.seed, RngPurpose.SHARDS, epoch, np.arange(len(sizes))))
        first = np.empty(len(sizes))
        first[shuffled] = np.cumsum(sizes[shuffled]) - sizes[shuffled]
        uniform = random_uniform(self.seed, RngPurpose.WINDOW, epoch, np.arange(len(shards)))
        return np.argsort((first[shards] + self.span * uniform) % len(shards), kind="stable")

    def others(self, sample: int, count: int) -> Iterator[int]:
        """Draw replacements for an unreadable image, as a function of its index alone."""
        keys = self.seed, RngPurpose.REPLACEMENT, sample, np.arange(count)
        if self.weights is not None:
            yield from _draw_by_weight(self.weights, random_uniform(*keys)).tolist()
        else:
            yield from (random_bits(*keys) % np.uint64(self.length)).tolist()

    def batch_specs(self, position: int = 0) -> Iterator[BatchSpec]:
        """Yield this process's part of each micro-batch, from a position (in steps) on, without end."""
        epoch, first = divmod(position, self.steps_per_epoch)
        while True:
            order, parts = self.order(epoch), self.world_size * self.accumulate
            order = np.concatenate([order, order[: -self.length % parts]])
            for step in range(first, self.steps_per_epoch):
                batch = order[step * self.batch_size : (step + 1) * self.batch_size]
                size = len(batch) // parts
                for micro in range(self.accumulate):
                    first = (micro * self.world_size + self.rank) * size
                    yield BatchSpec(epoch, step, batch[first : first + size], first)
            epoch, first = epoch + 1, 0


class ShardUses:
    """When the order of a run needs each shard: known ahead, as the order is a function of the epoch."""

    def __init__(self, sampler: Sampler, shards: NDArray[np.int32]) -> None:
        self.sampler, self.shards = sampler, shards
        self.count = int(self.shards.max()) + 1
        self._positions = lru_cache(2)(self._sorted_positions)

    def next(self, position: int) -> NDArray[np.int64]:
        """Return for each shard how many images come before its next one, from a position (in steps) on.

        Shards that neither this epoch nor the next one needs get the largest number.
        """
        epoch, step = divmod(position, self.sampler.steps_per_epoch)
        used, done = self._used, step * self.sampler.batch_size
        first = np.arange(self.count) * used
        result = np.full(self.count, np.iinfo(np.int64).max)
        for ahead, start in ((1, 0), (0, done)):
            positions = self._positions(epoch + ahead)
            following = positions[np.minimum(np.searchsorted(positions, first + start), len(positions) - 1)]
            needed = (following >= first + start) & (following < first + used)
            result[needed] = (following - first)[needed] + ahead * used - done
        return result

    @property
    def _used(self) -> int:
        """The images of an epoch, without those of a last incomplete batch."""
        return self.sampler.steps_per_epoch * self.sampler.batch_size

    def _sorted_positions(self, epoch: int) -> NDArray[np.int64]:
        """Return the positions in an epoch, sorted by the shard that they need."""
        shards = self.shards[self.sampler.order(epoch)[: self._used]]
        return np.sort(shards.astype(np.int64) * self._used + np.arange(self._used))


def _draw_by_weight(weights: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Turn uniform numbers from [0, 1) into indices whose probabilities are proportional to the weights."""
    upper = np.cumsum(weights)  # sequential, so rounded alike everywhere; a pairwise sum would not be
    # side="right" skips weights of 0; u · sum stays below the sum, even after rounding.
    return np.searchsorted(upper, uniform * upper[-1], side="right")


def read_sampling_weights(source: Source, path: str | Path) -> NDArray[np.float64]:
    """Return the weight of each item from a CSV (name, weight) or JSON file, which must have them all."""
    values = values_by_name(source, str(path), WEIGHT_COLUMNS)
    weights = np.array([as_number(str(value)) for value in values], dtype=np.float64)  # NaN if it is none
    wrong = np.flatnonzero(~(weights >= 0)).tolist()
    if wrong:
        name, value = source.name(wrong[0]), values[wrong[0]]
        raise ValueError(
            f"{path} has no weight for {len(wrong)} of {len(values)} images, such as '{name:.200}' "
            f"({value!r:.200}); it must be a finite number, 0 or more"
        )
    total = sum(weights.tolist())
    if not 0 < total < math.inf:
        raise ValueError(f"{path}: the weights add up to {total}, so no image can be drawn.")
    return weights


def describe_sampling(weights: NDArray[np.float64]) -> str:
    """Describe how uneven weights are, by the effective number of images (Σ w)² / Σ w²."""
    probabilities = weights / weights.sum()
    never = np.count_nonzero(weights == 0)
    alike = f"{1 / (probabilities**2).sum():,.0f} of {len(weights):,} images"
    text = f"sampling weights: as varied as {alike} drawn equally often"
    return f"{text}; {never:,} are never drawn" if never else text


def sampling_fingerprint(weights: NDArray[np.float64] | None) -> str | None:
    """Return a digest of the weights."""
    if weights is None:
        return None
    return hashlib.sha256(weights.astype("<f8").tobytes()).hexdigest()[:16]

"""Which images make up which step: a function of the seed, the epoch and the step within it.

A file may say how often each image is drawn.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform
from dino_vit.data.labels import values_by_name
from dino_vit.data.sources.source import ShardLayout, Source
from dino_vit.data.targets import as_number
from dino_vit.views.order import (
    GlobalOrder,
    MixedOrder,
    Order,
    Uses,
    WeightedWindowOrder,
    WindowOrder,
    draw_by_weight,
)

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
    `layout`, what lies in which shard, it walks through the shards in a random order, `window` at a time.
    """

    length: int
    batch_size: int  # images of a step, over all processes and micro-batches
    seed: int
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    keep_last: bool = False
    weights: NDArray[np.float64] | None = None
    layout: ShardLayout | None = None
    window: int = 16
    mixed: MixedOrder | None = None  # of several sources, instead of these

    def __post_init__(self) -> None:
        assert 0 < self.batch_size <= self.length, (self.batch_size, self.length)
        assert self.batch_size % (self.world_size * self.accumulate) == 0, self
        assert self.weights is None or len(self.weights) == self.length, self
        assert self.layout is None or len(self.layout) == self.length, self

    @property
    def steps_per_epoch(self) -> int:
        return (self.length + self.keep_last * (self.batch_size - 1)) // self.batch_size

    def build_order(self) -> Order:
        """Return the order, which draws any part of an epoch."""
        if self.mixed is not None:
            return self.mixed
        if self.layout is None:
            return GlobalOrder(self.length, self.seed, self.weights)
        if self.weights is None:
            return WindowOrder(self.layout, self.seed, self.window)
        return WeightedWindowOrder(self.layout, self.seed, self.window, self.weights)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of an epoch: a permutation, or a weighted sample."""
        return self.build_order().take(epoch, 0, self.length)

    def others(self, sample: int, count: int) -> Iterator[int]:
        """Draw replacements for an unreadable image, as a function of its index alone."""
        keys = self.seed, RngPurpose.REPLACEMENT, sample, np.arange(count)
        if self.weights is not None:
            yield from draw_by_weight(self.weights, random_uniform(*keys)).tolist()
            return
        start, stop = self.mixed.range_around(sample) if self.mixed else (0, self.length)
        yield from (start + (random_bits(*keys) % np.uint64(stop - start)).astype(np.int64)).tolist()

    def batch_specs(self, position: int = 0) -> Iterator[BatchSpec]:
        """Yield this process's part of each micro-batch, from a position (in steps) on, without end."""
        order, parts = self.build_order(), self.world_size * self.accumulate
        for epoch, step in self._steps(position):
            start = step * self.batch_size
            stop = min(start + self.batch_size, self.length)
            # Processes share a last batch evenly by images of the epoch's start.
            others = order.take(epoch, 0, (start - stop) % parts)
            batch = np.concatenate([order.take(epoch, start, stop), others])
            size = len(batch) // parts
            for micro in range(self.accumulate):
                first = (micro * self.world_size + self.rank) * size
                yield BatchSpec(epoch, step, batch[first : first + size], first)

    def _steps(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield epoch and step within it, from a position on."""
        return (divmod(number, self.steps_per_epoch) for number in count(position))


class ShardUses:
    """When a run needs each shard: known ahead, as the order is a function of the epoch."""

    def __init__(self, sampler: Sampler, shards: int, order: Uses | None = None) -> None:
        self.sampler, self.shards, self.order = sampler, shards, order or sampler.build_order()

    def next(self, position: int) -> NDArray[np.int64]:
        """Return for each shard after about how many images it is needed, from a position (in steps) on.

        Shards that neither this epoch nor the next one needs get the largest number.
        """
        epoch, step = divmod(position, self.sampler.steps_per_epoch)
        used = self.sampler.steps_per_epoch * self.sampler.batch_size  # without a last incomplete batch
        done = step * self.sampler.batch_size
        result = np.full(self.shards, np.iinfo(np.int64).max)
        for ahead, start in ((1, 0), (0, done)):
            uses = self.order.next_uses(epoch + ahead, start)
            np.copyto(result, uses + ahead * used - done, where=(uses >= 0) & (uses < used))
        return result


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

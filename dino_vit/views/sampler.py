"""Which images make up which step: a function of the seed, the epoch and the step within it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform

BLOCK = 2**18  # images, at least, that a window order draws at a time


class GlobalOrder:
    """A permutation of all images. Like the other order it draws any part of an epoch by itself."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed
        self._order = lru_cache(1)(self._draw)

    def take(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the images at the positions from `start` to `stop` of an epoch."""
        return self._order(epoch)[start:stop]

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        # SplitMix64 is one-to-one, so there are no ties that a sort could break.
        return np.argsort(random_bits(self.seed, RngPurpose.ORDER, epoch, np.arange(self.length)))


class _Shuffled(NamedTuple):
    """The shards of an epoch one after another, and where each begins."""

    shards: NDArray[np.int32]
    begins: NDArray[np.int64]


class WindowOrder:
    """Shards come in a random order, and each image lies at random within `span` places from its shard's.

    The end of the epoch continues at its start, so that as many shards mix there as anywhere. The place of an
    image is a function of the image, so those at some places are found among the images of the few shards
    that reach there: a process holds some bytes for each shard, and none for each image.
    """

    def __init__(self, starts: NDArray[np.int64], seed: int, window: int) -> None:
        """`starts`: where the images of each shard begin, and the number of all."""
        self.starts, self.seed, self.length = starts, seed, int(starts[-1])
        sizes = np.diff(starts)
        # The size of the shard that a random image lies in: with one huge shard, all images mix.
        squares = int(np.dot(sizes, sizes))
        self.span = min(window * squares // self.length, self.length)
        self._shard_size = squares // self.length
        self._reach = self.span + 1  # the places that a shard spreads over, and one for rounding
        self._block_size = max(2 * self.span, BLOCK)
        self._shuffled, self._block = lru_cache(2)(self._shuffle), lru_cache(2)(self._draw)

    def take(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        number = start // self._block_size
        while self._block(epoch, number)[0] > start:
            number -= 1
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            before, images = self._block(epoch, number)
            parts.append(images[start - before : stop - before])
            start, number = max(start, before + len(images)), number + 1
        return np.concatenate(parts)

    def next_uses(self, epoch: int, start: int) -> NDArray[np.int64]:
        """Return about at which position from `start` on an epoch first needs each shard; −1: at none."""
        shards, begins = self._shuffled(epoch)
        first = np.empty_like(begins)  # by the numbers of shards
        first[shards] = begins
        ends = first + self.span + self._shard_size  # positions are about the places, not quite
        uses = np.maximum(first, start)
        uses[ends - self.length > start] = start  # that continue at the start of the epoch
        uses[(ends <= start) | (np.diff(self.starts) == 0)] = -1
        return uses

    def _shuffle(self, epoch: int) -> _Shuffled:
        sizes = np.diff(self.starts)
        shards = np.argsort(random_bits(self.seed, RngPurpose.SHARDS, epoch, np.arange(len(sizes))))
        begins = np.cumsum(sizes[shards]) - sizes[shards]
        return _Shuffled(shards.astype(np.int32), begins)

    def _draw(self, epoch: int, number: int) -> tuple[int, NDArray[np.int64]]:
        """Return how many images lie before a block of places, and the images in it in their order."""
        low, high = number * self._block_size, (number + 1) * self._block_size
        images, places = self._reaching(epoch, low - self._reach, high, low)
        inside = (places >= low) & (places < high)
        images, places = images[inside], places[inside]
        return self._count_before(epoch, low), images[np.lexsort((images, places))]

    def _count_before(self, epoch: int, place: int) -> int:
        begins, later = self._shuffled(epoch).begins, place - self._reach + 1
        number = int(np.searchsorted(begins, later))  # of shards that lie before it as a whole
        passed = int(begins[number]) if number < len(begins) else self.length
        return passed + int(np.count_nonzero(self._reaching(epoch, later, place, 0)[1] < place))

    def _reaching(
        self, epoch: int, low: int, high: int, after: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the images of some shards, and their places.

        The shards are those that begin from `low` to `high`, or continue at the start beyond `after`.
        """
        shuffled = self._shuffled(epoch)
        start, stop, last = np.searchsorted(shuffled.begins, [low, high, self.length + after - self._reach])
        shards, begins = (np.concatenate([each[start:stop], each[max(stop, last) :]]) for each in shuffled)
        sizes = self.starts[shards + 1] - self.starts[shards]
        before = np.cumsum(sizes) - sizes
        images = np.arange(sizes.sum()) + np.repeat(self.starts[shards] - before, sizes)
        first = np.repeat(begins, sizes)
        uniform = random_uniform(self.seed, RngPurpose.WINDOW, epoch, images)
        return images, (first + self.span * uniform) % self.length


Order = GlobalOrder | WindowOrder


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
    share it evenly. With `shard_starts`, where the images of each shard begin, it walks through the shards in
    a random order, `window` at a time.
    """

    length: int
    global_batch: int  # images of a step, over all processes and micro-batches
    seed: int
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    keep_last: bool = False
    shard_starts: NDArray[np.int64] | None = None
    window: int = 16

    @property
    def steps_per_epoch(self) -> int:
        return (self.length + self.keep_last * (self.global_batch - 1)) // self.global_batch

    def build_order(self) -> Order:
        """Return the order of the images."""
        if self.shard_starts is None:
            return GlobalOrder(self.length, self.seed)
        return WindowOrder(self.shard_starts, self.seed, self.window)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of an epoch."""
        return self.build_order().take(epoch, 0, self.length)

    def replacements(self, sample: int, count: int) -> Iterator[int]:
        """Draw replacements for an unreadable image, as a function of its index alone."""
        keys = self.seed, RngPurpose.REPLACEMENT, sample, np.arange(count)
        yield from (random_bits(*keys) % np.uint64(self.length)).astype(np.int64).tolist()

    def batch_specs(self, start_step: int = 0) -> Iterator[BatchSpec]:
        """Yield this process's part of each micro-batch, from a step on, without end."""
        order, parts = self.build_order(), self.world_size * self.accumulate
        for number in count(start_step):
            epoch, step = divmod(number, self.steps_per_epoch)
            start = step * self.global_batch
            stop = min(start + self.global_batch, self.length)
            # Processes share a last batch evenly by images of the epoch's start, repeated if they are few.
            missing = (start - stop) % parts
            padding = np.resize(order.take(epoch, 0, min(missing, self.length)), missing)
            batch = np.concatenate([order.take(epoch, start, stop), padding])
            size = len(batch) // parts
            for micro in range(self.accumulate):
                first = (micro * self.world_size + self.rank) * size
                yield BatchSpec(epoch, step, batch[first : first + size], first)


class ShardUses:
    """When a window order needs each shard of a source: known ahead, as it is a function of the epoch."""

    def __init__(self, sampler: Sampler, order: WindowOrder, shards: int, first: int) -> None:
        """`first` is the number of the source's first shard among those of all sources."""
        self.sampler, self.order, self.mine = sampler, order, slice(first, first + shards)

    def next(self, position: int) -> NDArray[np.int64]:
        """Return for each shard after about how many images it is needed, from a position (in steps) on.

        Shards that neither this epoch nor the next one needs get the largest number.
        """
        epoch, step = divmod(position, self.sampler.steps_per_epoch)
        used = self.sampler.steps_per_epoch * self.sampler.global_batch  # without a last incomplete batch
        done = step * self.sampler.global_batch
        result = np.full(len(self.order.starts) - 1, np.iinfo(np.int64).max)
        for ahead, start in ((1, 0), (0, done)):
            uses = self.order.next_uses(epoch + ahead, start)
            np.copyto(result, uses + ahead * used - done, where=(uses >= 0) & (uses < used))
        return result[self.mine]

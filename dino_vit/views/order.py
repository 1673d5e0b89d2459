"""The order of an epoch: a function of the seed and the epoch, of which any part is drawn by itself."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform
from dino_vit.data.sources.source import ShardLayout

BLOCK = 2**18  # images, at least, that a window order draws at a time


class Uses(Protocol):
    """When each epoch needs the shards."""

    def next_uses(self, epoch: int, start: int) -> NDArray[np.int64]:
        """Return about at which position from `start` on an epoch first needs each shard; −1: at none."""


class Order(Uses, Protocol):
    """The images of each epoch."""

    def take(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the images at the positions from `start` to `stop` of an epoch."""


class GlobalOrder:
    """A permutation of all images, or a weighted sample with replacement."""

    def __init__(self, length: int, seed: int, weights: NDArray[np.float64] | None = None) -> None:
        self.length, self.seed, self.weights = length, seed, weights
        self._order = lru_cache(1)(self._draw)

    def __reduce__(self) -> tuple[Any, ...]:
        return GlobalOrder, (self.length, self.seed, self.weights)

    def take(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        return self._order(epoch)[start:stop]

    def next_uses(self, epoch: int, start: int) -> NDArray[np.int64]:
        return np.array([start])  # of any shard

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        indices = np.arange(self.length)
        if self.weights is not None:
            return draw_by_weight(self.weights, random_uniform(self.seed, RngPurpose.ORDER, epoch, indices))
        # SplitMix64 is one-to-one, so there are no ties that a sort could break.
        return np.argsort(random_bits(self.seed, RngPurpose.ORDER, epoch, indices))


def draw_by_weight(weights: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Turn uniform numbers from [0, 1) into indices whose probabilities are proportional to the weights."""
    upper = np.cumsum(weights)  # sequential, so rounded alike everywhere; a pairwise sum would not be
    # side="right" skips weights of 0; u · sum stays below the sum, even after rounding.
    return np.searchsorted(upper, uniform * upper[-1], side="right")


class _Shuffled(NamedTuple):
    """The shards of an epoch one after another, and where each begins: in that order, and by its number."""

    shards: NDArray[np.int64]
    begins: NDArray[np.int64]
    first: NDArray[np.float64]


class WindowOrder:
    """Shards come in a random order, and each image lies at random within `span` places from its shard's.

    The end of the epoch continues at its start, so that as many shards mix there as anywhere. The place of an
    image is a function of the image, so those at some places are found among the images of the few shards
    that reach there: a process holds some bytes for each shard, and none for each image.
    """

    def __init__(self, layout: ShardLayout, seed: int, window: int, span: int | None = None) -> None:
        self.layout, self.seed, self.length = layout, seed, len(layout)
        sizes = layout.sizes
        # The size of the shard that a random image lies in: with one huge shard, all images mix.
        squares = int(np.dot(sizes, sizes))
        self.span = min(window * squares // self.length, self.length) if span is None else span
        self._shard_size = squares // self.length
        self._shuffled, self._block = lru_cache(2)(self._shuffle), lru_cache(2)(self._draw)

    def __reduce__(self) -> tuple[Any, ...]:
        return WindowOrder, (self.layout, self.seed, 0, self.span)

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
        first = self._shuffled(epoch).first.astype(np.int64)
        ends = first + self.span + self._shard_size  # positions are about the places, not quite
        uses = np.maximum(first, start)
        uses[ends - self.length > start] = start  # that continue at the start of the epoch
        uses[(ends <= start) | (self.layout.sizes == 0)] = -1
        return uses

    @property
    def _block_size(self) -> int:
        return max(2 * self.span, BLOCK)

    @property
    def _reach(self) -> int:
        """The places that a shard spreads over, and one for rounding."""
        return self.span + 1

    def _shuffle(self, epoch: int) -> _Shuffled:
        sizes = self.layout.sizes
        shards = np.argsort(random_bits(self.seed, RngPurpose.SHARDS, epoch, np.arange(len(sizes))))
        begins = np.cumsum(sizes[shards]) - sizes[shards]
        first = np.empty(len(sizes))
        first[shards] = begins
        return _Shuffled(shards, begins, first)

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
        shards = np.concatenate([shuffled.shards[start:stop], shuffled.shards[max(stop, last) :]])
        images = self.layout.members(shards)
        first = np.repeat(shuffled.first[shards], self.layout.sizes[shards])
        uniform = random_uniform(self.seed, RngPurpose.WINDOW, epoch, images)
        return images, (first + self.span * uniform) % self.length


class WeightedWindowOrder:
    """What the weights draw, walked through shard by shard."""

    def __init__(self, layout: ShardLayout, seed: int, window: int, weights: NDArray[np.float64]) -> None:
        self.layout, self.seed, self.window = layout, seed, window
        self.drawn = GlobalOrder(len(layout), seed, weights)
        self.span = WindowOrder(layout, seed, window).span
        self._order = lru_cache(2)(self._walk)

    def take(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        positions = self._order(epoch).take(epoch, start, stop)
        return self.drawn.take(epoch, 0, len(self.layout))[positions]

    def next_uses(self, epoch: int, start: int) -> NDArray[np.int64]:
        return self._order(epoch).next_uses(epoch, start)

    def _walk(self, epoch: int) -> WindowOrder:
        drawn = self.drawn.take(epoch, 0, len(self.layout))
        layout = ShardLayout.of(self.layout.shards(drawn), len(self.layout.sizes))
        return WindowOrder(layout, self.seed, self.window, self.span)


class MixedOrder:
    """Some images of each of several orders in an epoch, in the same shares all along.

    Image j of the n that an order gives lies at random between j / n and (j + 1) / n of the epoch.
    """

    def __init__(
        self, orders: Sequence[Order], counts: Sequence[int], starts: Sequence[int], seed: int
    ) -> None:
        """`starts` are where the images of each order begin, and where the last end."""
        self.orders, self.counts, self.starts, self.seed = orders, counts, starts, seed
        self.length = sum(counts)

    def take(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        # Before each of these times there are at most `start` images, and at least `stop`.
        margin = len(self.orders)
        early, late = (start - margin) / self.length, (stop + margin) / self.length
        first = [max(0, math.floor(early * count) - 1) for count in self.counts]
        rows = [
            np.arange(low, min(count, math.ceil(late * count) + 1))
            for low, count in zip(first, self.counts, strict=True)
        ]
        times = [
            (of_order + random_uniform(self.seed, RngPurpose.MIX, epoch, number, of_order)) / count
            for number, (of_order, count) in enumerate(zip(rows, self.counts, strict=True))
        ]
        numbers = np.repeat(np.arange(margin), list(map(len, rows)))
        chosen = np.argsort(np.concatenate(times), kind="stable")[start - sum(first) : stop - sum(first)]
        row, number = np.concatenate(rows)[chosen], numbers[chosen]
        images = np.empty(len(chosen), dtype=np.int64)
        for each, order in enumerate(self.orders):
            if len(of_order := row[number == each]):  # they follow each other
                taken = order.take(epoch, int(of_order[0]), int(of_order[-1]) + 1)
                images[number == each] = taken + self.starts[each]
        return images

    def next_uses(self, epoch: int, start: int) -> NDArray[np.int64]:
        raise NotImplementedError("each order has shards of its own: PartOfMix")

    def range_around(self, image: int) -> tuple[int, int]:
        """Return the first image of the order that gives an image, and its last one plus 1."""
        number = int(np.searchsorted(self.starts, image, side="right"))
        return int(self.starts[number - 1]), int(self.starts[number])


class PartOfMix:
    """When a mixed order needs the shards of one of its orders."""

    def __init__(self, mixed: MixedOrder, number: int) -> None:
        self.order, self.count, self.length = mixed.orders[number], mixed.counts[number], mixed.length

    def next_uses(self, epoch: int, start: int) -> NDArray[np.int64]:
        uses = self.order.next_uses(epoch, start * self.count // self.length)
        uses[uses >= self.count] = -1
        return np.where(uses < 0, -1, uses * self.length // self.count)

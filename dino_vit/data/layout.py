"""Which images lie in which shard."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The images of each shard, in some bytes a shard where a source has them shard by shard."""

    starts: NDArray[np.int64]  # (shards + 1,), where the images of each begin
    images: NDArray[np.int64] | None = None  # all images, shard by shard; None: the source has them so

    @classmethod
    def of(cls, shards: NDArray[np.integer[Any]], count: int = 0) -> "ShardLayout":
        """Return the layout of images whose shards are given, of at least `count` shards."""
        starts = np.concatenate([[0], np.cumsum(np.bincount(shards, minlength=count))])
        in_order = bool((shards[1:] >= shards[:-1]).all())
        return cls(starts, None if in_order else np.argsort(shards, kind="stable"))

    def __len__(self) -> int:
        """Return the number of images."""
        return int(self.starts[-1])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Return how many images each shard has."""
        return np.diff(self.starts)

    def members(self, shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images of some shards."""
        sizes = self.starts[shards + 1] - self.starts[shards]
        before = np.cumsum(sizes) - sizes
        rows = np.arange(sizes.sum()) + np.repeat(self.starts[shards] - before, sizes)
        return rows if self.images is None else self.images[rows]

    def shards(self, images: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shard of each of some images."""
        if self.images is None:
            return np.searchsorted(self.starts, images, side="right") - 1
        of_all = np.empty(len(self), dtype=np.int64)
        of_all[self.images] = np.repeat(np.arange(len(self.starts) - 1), self.sizes)
        return of_all[images]

"""Images in shards, and copies of remote shards on a local disk, which all processes of a host read.

A folder of copies has a bound, may be shared by several runs, and may be deleted at any time. A copy appears
under its name when it is complete; a shard without a copy is read by a request for each image.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dino_vit.data.sources.files import Ranges, read_range
from dino_vit.data.sources.index import Index, IndexedSource, cache_folder
from dino_vit.data.sources.source import Source, Subset

SUFFIX = ".shard"  # of a copy
SUMS = "SHA256SUMS"  # which `dino-vit pack` writes beside the shards
# Write the copy of a shard, given by its path and its content, if that is not the shard itself.
Unpack = Callable[[str, BinaryIO, BinaryIO], None]


class DamagedShard(ValueError):
    """A shard does not have the digest that is stated for it."""


def copies_folder(given: str | None = None) -> Path:
    """Return the folder for copies of shards."""
    return Path(given).expanduser() if given else cache_folder() / "shards"


@dataclass(frozen=True)
class ShardCopies:
    """Where the copies of some remote shards lie, and their reading."""

    folder: Path
    paths: Sequence[str]
    stamps: NDArray[np.int64]
    sizes: NDArray[np.int64]  # about how long each copy is

    @cached_property
    def names(self) -> list[str]:
        """The names of the copies, other ones if a shard was changed."""
        keys = (f"{url}\0{stamp[0]}\0{stamp[1]}" for url, stamp in zip(self.paths, self.stamps, strict=True))
        return [f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:24]}{SUFFIX}" for key in keys]

    def path(self, shard: int) -> Path:
        return self.folder / self.names[shard]

    def present(self) -> int:
        """Return the bytes of the copies that there are."""
        return sum(self.size(shard) for shard in range(len(self.paths)) if self.path(shard).exists())

    def size(self, shard: int) -> int:
        return int(self.sizes[shard])

    def read(self, file: int, start: int, size: int) -> bytes | None:
        """Return a range of the copy of a shard, or None if there is none.

        A copy is not held open: once deleted, it must not take room on the disk.
        """
        with suppress(OSError):
            number = os.open(self.path(file), os.O_RDONLY)
            try:
                exists = start + size <= os.fstat(number).st_size  # before so much memory is taken
                data = read_range(number, start, size) if exists else b""
            finally:
                os.close(number)
            return data if len(data) == size else None
        return None


class ShardedSource(IndexedSource):
    """Images in some large files. Remote files are copied to a local disk, shard by shard."""

    def __init__(
        self,
        index: Index,
        files: Sequence[str],
        *,
        unpack: Unpack | None = None,
        sizes: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(index)
        stamps = index.stamps
        self.ranges, self.unpack = Ranges(files, stamps), unpack
        self.copies = ShardCopies(copies_folder(), files, stamps, stamps[:, 0] if sizes is None else sizes)

    @property
    def shards(self) -> NDArray[np.int32]:
        """Return the file of each image."""
        return self.index.columns["file"].astype(np.int32, copy=False)


def shards_of(source: Source) -> tuple[ShardedSource, NDArray[np.int32]] | None:
    """Return the source that reads a source's images from shards, and the shard of each image."""
    if isinstance(source, Subset):
        found = shards_of(source.source)
        return found and (found[0], found[1][np.asarray(source.indices)])
    return (source, source.shards) if isinstance(source, ShardedSource) else None

"""Decoded images that stay in memory, where a set is small: its workers decode each only once.

A kept image has the very pixels that decoding it again would give, so a run is the same with and without.
Where one core reads and trains, three minutes of `recipe=auto` have 1.1 times as many steps on 3,586 JPEGs
of 400 pixels, and 1.05 times on 1,534 of hands, most of 100 pixels (CPU time of steps with and without, in
turns, on an Intel Xeon with AVX-512). Where other cores decode fast enough, they have as many.
"""

import mmap
import multiprocessing
import os
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core import Size
from dino_vit.core.runtime import free_memory
from dino_vit.data.images.formats import Reduction

FACTORS = 1, 2, 4, 8  # by which an image may be reduced while it is decoded; each is kept by itself
SHARE = 0.25  # of the free memory of a host, at most
SPARE = 1.25  # times the size expected from the inspected images
_IRREDUCIBLE = -1, -1  # the size of a file that is decoded at one scale


class DecodedImages:
    """8-bit images by index and factor, in memory that processes share which are forked later.

    What does not fit any more is decoded each time.
    """

    def __init__(self, images: int, expected: int) -> None:
        """`expected` is how many bytes they take; what is not used of the memory takes none."""
        size = round(SPARE * expected) + mmap.PAGESIZE
        self.memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self.table = _shared(images, len(FACTORS), 3)  # start, height and width of the pixels; height 0: none
        self.sizes = _shared(images, 2)  # height and width of the file's image; 0: unknown
        self.used = _shared(1)
        self.lock = multiprocessing.Lock()

    def find(self, index: int, reduction: Reduction | None, channels: int) -> Tensor | None:
        """Return an image (C, H, W) as it was decoded, if it is here; nobody may write to it."""
        with self.lock:  # no other process writes half an entry meanwhile
            height, width = self.sizes[index].tolist()
            factor = reduction(height, width) if reduction and height > 0 else 1
            start, height, width = self.table[index, FACTORS.index(factor)].tolist()
        pixels = self.memory[start : start + height * width * channels]
        return pixels.view(height, width, channels).permute(2, 0, 1) if height else None

    def keep(self, index: int, image: Tensor, size: Size | None, factor: int) -> None:
        """Keep an image, if there is room; `size` is that of the file's, None if it cannot be reduced."""
        number, count = FACTORS.index(factor), image.numel()
        with self.lock:
            start = int(self.used[0])
            if image.dtype != torch.uint8 or start + count > len(self.memory) or self.table[index, number, 1]:
                return
            self.used[0] += count
        self.memory[start : start + count].view(*image.shape[1:], len(image)).copy_(image.permute(1, 2, 0))
        with self.lock:
            self.sizes[index] = size or _IRREDUCIBLE
            self.table[index, number] = start, *image.shape[1:]


def _shared(*shape: int) -> NDArray[np.int64]:
    """Return zeros that forked processes share."""
    return np.frombuffer(mmap.mmap(-1, max(8 * prod(shape), 1)), np.int64).reshape(shape)


def room_for(images: int, sizes: Sequence[Size], channels: int, *, scaled: bool, workers: int) -> int | None:
    """Return how much memory so many images take, by the sizes of some; None if a process may not have it."""
    factors = FACTORS if scaled else FACTORS[:1]
    mean = sum(height * width for height, width in sizes) / len(sizes)
    expected = round(images * channels * mean * sum(1 / factor**2 for factor in factors))
    is_shared = not workers or multiprocessing.get_start_method() == "fork"
    share = SHARE / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return expected if is_shared and SPARE * expected <= share * free_memory() else None

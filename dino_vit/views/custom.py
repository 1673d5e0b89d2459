"""Photometry of the user's own: a module, or any function, on a batch of views."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from dino_vit.data.images.pixels import unit_scale


class CustomPhotometry(nn.Module):
    """Stand in for `Augment`: change views (n, C, h, w) from 0 to 1 by a module, then normalise them.

    torch's random numbers are seeded for each batch by the seed, the epoch and the samples. What else the
    module draws from is its own concern.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, module: Callable[[Tensor], Tensor], *, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        self.module = module
        statistics = rearrange(torch.tensor([mean, std]), "two c -> two c 1 1")
        self.register_buffer("mean", statistics[0], persistent=False)
        self.register_buffer("std", statistics[1], persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, rows: Tensor) -> Tensor:
        # A row is a function of (seed, epoch, sample, view), and its order of jitters is always drawn.
        digest = hashlib.sha256(rows.numpy().tobytes()).digest()
        with torch.random.fork_rng([images.device] if images.is_cuda else []):
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            changed = self.module(unit_scale(images))
        if not isinstance(changed, Tensor) or changed.shape != images.shape:
            found = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(f"photometry.module returned {found} for views {tuple(images.shape)}")
        return (changed.float() - self.mean) / self.std

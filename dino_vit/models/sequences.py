"""How the tokens of images lie in one tensor: of one size as (B, T, D), of several as rows (ΣB·T, D).

B images, T tokens of an image, D width
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dino_vit.core.distributed import to_device
from dino_vit.models.positions import Rotation


class Sequences:
    """The token sequences that a block gets, size by size; attention alone takes them apart.

    For sizes whose `only_cls` is true, the block gives the CLS token alone.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],  # (B, T) of each size
        rotations: Sequence[Rotation | None] = (),  # of the queries and keys of each size
        only_cls: Sequence[bool] = (),
    ) -> None:
        self.shapes = shapes
        self.rotations = rotations or [None] * len(shapes)
        self.only_cls = only_cls or [False] * len(shapes)

    def split(self, x: Tensor, *shape: int) -> list[Tensor]:
        """Return the tokens of each size, (B, T, *shape)."""
        if len(self.shapes) == 1:
            return [x.view(*x.shape[:2], *shape)]
        parts = torch.split(x, [images * tokens for images, tokens in self.shapes])
        return [part.view(*size, *shape) for part, size in zip(parts, self.shapes, strict=True)]

    @staticmethod
    def join(parts: Sequence[Tensor]) -> Tensor:
        """Put the tokens of each size, (B, T, D), into one tensor."""
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten(0, 1) for part in parts])

    def output_tokens(self, x: Tensor) -> Tensor:
        """Return those of its input tokens that the block gives an output for."""
        if not any(self.only_cls):
            return x
        parts = zip(self.split(x, -1), self.only_cls, strict=True)
        return self.join([part[:, :1] if only else part for part, only in parts])

    def output(self) -> "Sequences":
        """Return the sequences that the block gives."""
        sizes = zip(self.shapes, self.only_cls, strict=True)
        return Sequences([(images, 1 if only else tokens) for (images, tokens), only in sizes])

    def spread(self, scales: Tensor) -> Tensor:
        """Repeat numbers of each image (..., ΣB, 1, 1) for each of its tokens that the block gives."""
        if len(self.shapes) == 1:
            return scales
        output = self.output().shapes
        parts = zip(torch.split(scales, [images for images, _ in output], dim=-3), output, strict=True)
        return torch.cat([part.expand(*part.shape[:-2], n, 1).flatten(-3, -2) for part, (_, n) in parts], -2)


def sequences_by_block(
    shapes: Sequence[tuple[int, int]],
    rotations: Sequence[Sequence[Rotation | None]],  # of each size, for each block
    only_cls: Sequence[bool],
) -> list[Sequences]:
    """Return the sequences that each block gets; only the last one computes less than all tokens."""
    by_block = [Sequences(shapes, turned) for turned in zip(*rotations, strict=True)]
    return [*by_block[:-1], Sequences(shapes, by_block[-1].rotations, only_cls)]


def spread_drops(by_block: Sequence[Sequences], drops: Tensor | None) -> list[Tensor | None]:
    """Return what multiplies the branches of each block, from (depth, 2, ΣB, 1, 1)."""
    if drops is None:
        return [None] * len(by_block)
    return [*by_block[0].spread(drops[:-1]), *by_block[-1].spread(drops[-1:])]


def sample_drop_path(
    rates: Sequence[float], images: int, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Sample the factors of stochastic depth for both residual branches of blocks: (depth, 2, images, 1, 1).

    They are 0 or 1 / (1 - rate). They are sampled on the CPU, so that every device gets the same numbers, and
    in one call, so that a GPU gets one copy instead of a kernel for each branch.
    """
    rate = torch.tensor(rates)[:, None, None]
    kept = torch.rand(len(rates), 2, images, generator=generator) >= rate
    return to_device(kept / (1 - rate), device)[..., None, None]  # the expectation stays

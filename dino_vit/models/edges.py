"""The edges in images: histograms of oriented gradients, after Dalal and Triggs (2005).

9 orientations from 0 to 180 degrees, of cells of 8 × 8 pixels; each block of 2 × 2 cells is normalised,
clipped and normalised again, so that lighting and contrast hardly matter.

b images, c channels, n orientations, y x rows and columns of cells or blocks, v u those within a block
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.core import Size

ORIENTATIONS, CELL, CLIP = 9, 8, 0.2
EPS = 1e-4  # of the norm of a block, so that an even block stays near 0


def orientation_histograms(images: Tensor, cell: Size) -> Tensor:
    """Return the mean gradients by orientation of cells, (b, n, y, x), of images (b, c, H, W), in float32.

    A pixel counts by the channel in which its gradient is largest; what is outside of whole cells does not.
    """
    padded = F.pad(images.float(), (1, 1, 1, 1), mode="replicate")
    dx = padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]
    dy = padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]
    length, channel = (dx * dx + dy * dy).sqrt().max(dim=1, keepdim=True)  # ONNX has no hypot
    angle = torch.atan2(dy.gather(1, channel), dx.gather(1, channel))
    # An angle between the centres of two orientations counts for both; opposite directions are one.
    position = angle * (ORIENTATIONS / math.pi) - 0.5  # in orientations
    lower = position.floor()
    above = length * (position - lower)
    votes = length.new_zeros(images.shape[0], ORIENTATIONS, *images.shape[-2:])
    votes.scatter_(1, lower.remainder(ORIENTATIONS).long(), length - above)
    votes.scatter_(1, (lower + 1).remainder(ORIENTATIONS).long(), above)
    return F.avg_pool2d(votes, cell)


def edge_histograms(images: Tensor) -> Tensor:
    """Return histograms of the edges (b, n · 4 · (y - 1) · (x - 1)) of images (b, c, H, W)."""
    cells = orientation_histograms(images, (CELL, CELL))
    blocks = rearrange(cells.unfold(2, 2, 1).unfold(3, 2, 1), "b n y x v u -> b (v u n) y x")
    return normalise_block(blocks, 1, CLIP).flatten(1)


def edges_width(side: int) -> int:
    """Return how many numbers the histograms of a square image have."""
    return ORIENTATIONS * 4 * (side // CELL - 1) ** 2


def normalise_block(histograms: Tensor, dim: int, clip: float) -> Tensor:
    """Normalise histograms, clip what stands out, and normalise again."""
    return F.normalize(F.normalize(histograms, dim=dim, eps=EPS).clamp(max=clip), dim=dim, eps=EPS)

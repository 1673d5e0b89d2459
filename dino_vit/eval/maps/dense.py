"""Judge the features of patches by masks: the class of every pixel, or none.

n images, (H, W) pixels, (h, w) patches, C classes
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.data.sources.masks import IGNORED
from dino_vit.models.positions import Grid

Figure = Callable[[Tensor, Tensor, Tensor], Tensor]  # of the three counts of `Overlaps`, (..., C) each

RESAMPLES = 1000  # of the images, for a confidence interval


def patch_classes(masks: Tensor, grid: Grid, classes: int) -> Tensor:
    """Return the class of most pixels of each patch, (n, h, w); IGNORED where most have none.

    The masks (n, H, W) are of uint8, and H and W are multiples of h and w.
    """
    height, width = masks.shape[1] // grid[0], masks.shape[2] // grid[1]
    kinds = masks.long().masked_fill(masks == IGNORED, classes)
    pixels = kinds.unfold(1, height, height).unfold(2, width, width).flatten(3)  # (n, h, w, pixels)
    counts = torch.zeros(*pixels.shape[:3], classes + 1, dtype=torch.long, device=masks.device)
    counts.scatter_add_(3, pixels, torch.ones_like(pixels))
    most = counts.argmax(dim=3)
    return most.masked_fill(most == classes, IGNORED).to(torch.uint8)


def upsample(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the class (n, H, W) of every pixel by logits of patches (n, C, h, w), bilinearly resized."""
    return F.interpolate(logits, size=size, mode="bilinear", align_corners=False).argmax(dim=1)


class Overlaps(NamedTuple):
    """The pixels of each image and class, (n, C) each: predicted rightly, predicted, true."""

    right: Tensor
    predicted: Tensor
    true: Tensor

    @classmethod
    def of(cls, predicted: Tensor, masks: Tensor, classes: int) -> "Overlaps":
        """Count the pixels (n, H, W) that are not ignored."""
        known = masks != IGNORED
        parts = (known & (predicted == masks), known, known)
        values = (masks, predicted, masks)
        return cls(*(_count(value, part, classes) for value, part in zip(values, parts, strict=True)))

    def append(self, other: "Overlaps") -> "Overlaps":
        """Return the overlaps of these images and of others."""
        return Overlaps(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


def _count(classes_of: Tensor, chosen: Tensor, classes: int) -> Tensor:
    kinds = classes_of.long().masked_fill(~chosen, classes).flatten(1)
    counts = torch.zeros(len(kinds), classes + 1, dtype=torch.long, device=kinds.device)
    return counts.scatter_add_(1, kinds, torch.ones_like(kinds))[:, :classes]


class Interval(NamedTuple):
    """A figure in per cent with its 95 % confidence interval over images."""

    percent: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.percent:.2f} % ({self.low:.2f} to {self.high:.2f})"


def mean_iou(overlaps: Overlaps) -> Interval:
    """Return the mean over classes of intersection over union, each over the pixels of all images.

    Classes that no mask has are left out.
    """
    present = overlaps.true.sum(0) > 0

    def of(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
        shares = right / (predicted + true - right).clamp(min=1)
        return shares[..., present].mean(dim=-1)

    return _with_confidence(overlaps, of)


def pixel_accuracy(overlaps: Overlaps) -> Interval:
    """Return the share of pixels that are predicted rightly."""
    return _with_confidence(
        overlaps, lambda right, predicted, true: right.sum(-1) / true.sum(-1).clamp(min=1)
    )


def _with_confidence(overlaps: Overlaps, figure: Figure) -> Interval:
    """Return a figure of sums over images, and its quantiles over images drawn with replacement."""
    images = len(overlaps.true)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(images, (RESAMPLES, images), generator=generator)
    weights = torch.zeros(RESAMPLES, images, dtype=torch.double)
    weights.scatter_add_(1, drawn, torch.ones_like(weights))
    whole = [part.double().cpu() for part in overlaps]
    resampled = figure(*(weights @ part for part in whole))
    low, high = (float(100 * resampled.quantile(q)) for q in (0.025, 0.975))
    return Interval(float(100 * figure(*(part.sum(0) for part in whole))), low, high)

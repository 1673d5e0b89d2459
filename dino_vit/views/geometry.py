"""The views of an image: which boxes are cropped, and how they are resized.

A view is a box (top, left, height, width) of the decoded image, cropped in a DataLoader worker, and the
parameters of its augmentation, on the device. Both are functions of (seed, epoch, sample, view) alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.sections import Interpolation
from dino_vit.core import Size
from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.views.augment import ViewAugment

BOX_DRAWS = 10
RATIO = 3 / 4, 4 / 3  # of a box, width : height
REDUCTIONS = 8, 4, 2  # that a JPEG can be decoded with, besides 1


@dataclass(frozen=True, kw_only=True)
class View:
    """A view: size, share of the image and augmentation."""

    size: Size
    scale: tuple[float, float]
    augment: ViewAugment = field(default_factory=ViewAugment)
    interpolation: Interpolation = "bicubic"


def draw_box_numbers(
    views: Sequence[View], *, seed: int, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Draw the random numbers behind the boxes: (samples, views, draws, 4).

    One call for a whole batch: a call for each image would take as long as cropping a small one.
    """
    indices = np.arange(len(views))[:, None, None]
    keys = (epoch, samples[:, None, None, None], indices, np.arange(BOX_DRAWS)[:, None], np.arange(4))
    return random_uniform(seed, RngPurpose.BOXES, *keys)


def choose_boxes(
    views: Sequence[View], box_draws: NDArray[np.float64], *, height: int, width: int
) -> NDArray[np.int64]:
    """Return the boxes (views, 4) of an image, as RandomResizedCrop would choose them."""
    boxes = [
        _first_box(view, rows, height, width) for view, rows in zip(views, box_draws.tolist(), strict=True)
    ]
    return np.array(boxes, dtype=np.int64)


def _first_box(
    view: View, box_draws: list[list[float]], height: int, width: int
) -> tuple[int, int, int, int]:
    """Return the first draw that fits, or the largest central box of an allowed ratio."""
    (low, high), (narrow, wide) = view.scale, map(math.log, RATIO)
    for area, ratio, top, left in box_draws:
        pixels = height * width * (low + (high - low) * area)
        aspect = math.exp(narrow + (wide - narrow) * ratio)
        w, h = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < w <= width and 0 < h <= height:  # otherwise the next draw, as in torchvision
            return int(top * (height - h + 1)), int(left * (width - w + 1)), h, w
    w = min(width, max(1, round(height * RATIO[1])))
    h = min(height, max(1, round(width / RATIO[0])))
    return (height - h) // 2, (width - w) // 2, h, w


class ViewBoxes:
    """The boxes of an image's views, and how far it may be reduced while it is decoded."""

    def __init__(self, views: Sequence[View], box_draws: NDArray[np.float64]) -> None:
        self.views, self.box_draws = views, box_draws
        self.size: Size | None = None  # of the image, if it may be reduced
        self.factor = 1  # by which it is reduced
        self._reduced: NDArray[np.int64] | None = None

    def reduction(self, height: int, width: int) -> int:
        """Return by how much an image may be reduced so that each pixel of a view still has one of its own.

        `boxes` are then those of the reduced image.
        """
        boxes = choose_boxes(self.views, self.box_draws, height=height, width=width)
        self.size, self.factor, self._reduced = (height, width), 1, boxes
        sizes = np.array([view.size for view in self.views])
        for factor in REDUCTIONS:
            if ((sizes - 1) * factor >= boxes[:, 2:]).any():  # too small, however it is rounded
                continue
            start = (boxes[:, :2] + factor // 2) // factor  # rounded to its pixels
            end = (boxes[:, :2] + boxes[:, 2:] + factor // 2) // factor
            reduced = np.concatenate([start, end - start], axis=1)
            if (reduced[:, 2:] >= sizes).all():
                self.factor, self._reduced = factor, reduced
                break
        return self.factor

    def boxes(self, image: Tensor) -> NDArray[np.int64]:
        """Return the boxes (views, 4) of the decoded image."""
        if self._reduced is not None:
            return self._reduced
        return choose_boxes(self.views, self.box_draws, height=image.shape[1], width=image.shape[2])


def crop_views(
    image: Tensor,
    boxes: NDArray[np.int64],
    size: Size,
    *,
    interpolation: Interpolation = "bicubic",
    out: Tensor | None = None,
) -> Tensor:
    """Crop boxes of an image (C, H, W) and resize them, with antialiasing, to (n, C, *size)."""
    images = image[None]
    views = torch.empty(len(boxes), len(image), *size, dtype=image.dtype) if out is None else out
    for (top, left, h, w), view in zip(boxes.tolist(), views, strict=True):
        crop = images[:, :, top : top + h, left : left + w]
        view.copy_(F.interpolate(crop, size=size, mode=interpolation, antialias=True)[0])
    # Bicubic interpolation overshoots; uint8 results are clamped by PyTorch.
    return views.clamp_(0, 1) if views.is_floating_point() else views

"""Images with masks: windows that cover them, random crops, and the classes of their patches and pixels.

n images or windows, (h, w) patches, C classes
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.config.commands import IGNORED
from dino_vit.core import Size, log
from dino_vit.core.distributed import rank_slice, world_size
from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.core.text import progress
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.eval.features import FrozenBackbone, check_finite
from dino_vit.eval.reading import in_batches, read_ahead
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import EvalTransform, resize, resize_mask, window_starts
from dino_vit.views.sampler import Sampler

BLOCK = 16  # images in memory at a time, and crops of a step
SCALES = 0.5, 2.0  # of images that random crops are of


class Windows(NamedTuple):
    """An image in windows, which cover it, and its mask."""

    number: int  # of the image in the source
    size: Size  # of the resized image
    corners: list[tuple[int, int]]  # top and left of each window
    images: Tensor  # (n, channels, *window)
    mask: Tensor  # uint8 (H, W), as large as the image in its file


def read_resized(
    transform: EvalTransform, source: ImageSet, index: int, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return an image at the size at which the crop covers its shorter side, times a scale, and its mask."""
    mask = source.mask(index)
    image = read_image(source, index, transform.pixels)
    return resize(image, transform.cover_size(mask.shape, scale), transform.interpolation), mask


def read_windows(transform: EvalTransform, source: ImageSet, index: int) -> Windows:
    """Read an image and its mask, and cut the resized image into windows."""
    (image, mask), (h, w) = read_resized(transform, source, index), transform.size
    size = image.shape[1], image.shape[2]
    corners = [(y, x) for y in window_starts(size[0], h) for x in window_starts(size[1], w)]
    windows = torch.stack([image[:, y : y + h, x : x + w] for y, x in corners])
    return Windows(index, size, corners, windows, mask)


def read_crop(transform: EvalTransform, source: ImageSet, crop: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a random crop (channels, *crop), normalised, and the classes of its pixels."""
    index, number = crop
    u = random_uniform(0, RngPurpose.EVALUATION, number, index, np.arange(4)).tolist()
    image, mask = read_resized(transform, source, index, SCALES[0] + (SCALES[1] - SCALES[0]) * u[0])
    (h, w), size = transform.size, (image.shape[1], image.shape[2])
    y, x = (math.floor(u[1 + i] * (max(0, size[i] - side) + 1)) for i, side in enumerate((h, w)))
    image = transform.normaliser(image.device)(image[:, y : y + h, x : x + w])
    classes = resize_mask(mask, size)[y : y + h, x : x + w]
    border = 0, w - image.shape[2], 0, h - image.shape[1]  # of an image that is smaller than the crop
    image, classes = F.pad(image, border), F.pad(classes, border, value=IGNORED)
    return (image.flip(-1), classes.flip(-1)) if u[3] < 0.5 else (image, classes)


def random_crops(
    frozen: FrozenBackbone, source: ImageSet, batches: Iterable[Sequence[tuple[int, int]]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield crops and the classes of their pixels for batches of (image, number of the crop)."""
    try:
        for crops in read_ahead(partial(read_crop, frozen.transform, source), batches, frozen.threads):
            images, masks = zip(*crops, strict=True)
            yield torch.stack(images), torch.stack(masks)
    except UnreadableImage as error:  # which could be read a moment ago
        raise ValueError(f"{error}; run the same command again") from error


def patch_maps(frozen: FrozenBackbone, images: Tensor, spec: FeatureSpec) -> Tensor:
    """Return the patches of normalised images as maps (n, D, h, w)."""
    parts = [frozen.compute(part.to(frozen.device), spec) for part in torch.split(images, frozen.batch_size)]
    check_finite(features := torch.cat(parts), frozen.model)
    rows, _ = frozen.model.grid_of(*frozen.transform.size)
    return rearrange(features, "n (h w) d -> n d h w", h=rows)


def window_maps(
    frozen: FrozenBackbone, source: ImageSet, indices: Sequence[int], spec: FeatureSpec, title: str
) -> Iterator[tuple[list[Windows], Tensor]]:
    """Yield blocks of images in order, and the maps of all their windows; name what is left out."""

    def read(index: int) -> Windows | UnreadableImage:
        try:
            return read_windows(frozen.transform, source, index)
        except UnreadableImage as error:
            return error

    normalise = frozen.transform.normaliser(frozen.device)
    with progress(title, len(indices)) as advance:
        for block in read_ahead(read, in_batches(indices, BLOCK), frozen.threads):
            for failure in block:
                if isinstance(failure, UnreadableImage):
                    log.warning("left out: %s", failure)
            if images := [image for image in block if isinstance(image, Windows)]:
                windows = torch.cat([image.images for image in images])
                yield images, patch_maps(frozen, normalise(windows), spec)
            advance(len(block))


def count_classes(pixels: Tensor, classes: int) -> Tensor:
    """Count the pixels of each class along the last dimension, and behind them the IGNORED ones."""
    pixels = pixels.long().masked_fill(pixels == IGNORED, classes)
    counts = torch.zeros(*pixels.shape[:-1], classes + 1, dtype=torch.long, device=pixels.device)
    return counts.scatter_add_(-1, pixels, torch.ones_like(pixels))


def patch_classes(masks: Tensor, grid: Sequence[int], classes: int) -> Tensor:
    """Return the class of most pixels of each patch, (n, h, w); IGNORED where most have none."""
    pixels = rearrange(masks, "n (h y) (w x) -> n h w (y x)", h=grid[0], w=grid[1])
    most = count_classes(pixels, classes).argmax(dim=3)
    return most.masked_fill(most == classes, IGNORED).to(torch.uint8)


def count_pixels(predicted: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Count the pixels (H, W) of each class that are predicted rightly, predicted, and true: (3, C)."""
    right = mask.masked_fill(mask != predicted, IGNORED)
    judged = predicted.masked_fill(mask == IGNORED, IGNORED)
    counts = [count_classes(pixels.flatten(), classes) for pixels in (right, judged, mask)]
    return torch.stack(counts)[:, :classes]


def mean_iou(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    """Return the mean over classes of intersection over union; what is neither true nor predicted is none."""
    union = predicted + true - right
    return (right / union).masked_fill(union == 0, torch.nan).nanmean(dim=-1)


def pixel_accuracy(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    """Return the share of pixels that are predicted rightly."""
    return right.sum(-1) / true.sum(-1).clamp(min=1)


_SCORES = 2**26  # of pixels and classes, in memory at a time


def crop_batches(images: Sequence[int], steps: int) -> Iterator[list[tuple[int, int]]]:
    """Yield this process's share of each step: images in the order of an epoch, and the numbers of crops."""
    order = cache(Sampler(length=len(images), batch_size=1, seed=0).order)
    batch, n = max(BLOCK, world_size()), len(images)  # every process has a crop
    for step in range(steps):
        numbers = rank_slice(range(step * batch, (step + 1) * batch))
        yield [(images[order(number // n)[number % n]], number) for number in numbers]


def slide(scores: Tensor, image: Windows) -> Tensor:
    """Return scores of the patches of windows (n, C, h, w) as the mean for every pixel, (C, *image.size)."""
    h, w = image.images.shape[2:]
    total = scores.new_zeros(scores.shape[1], *image.size)
    count = scores.new_zeros(image.size)
    for (y, x), window in zip(image.corners, torch.split(scores, 1), strict=True):
        total[:, y : y + h, x : x + w] += F.interpolate(window, (h, w), mode="bilinear")[0]
        count[y : y + h, x : x + w] += 1
    return total.div_(count)


def best_class(scores: Tensor, size: Size) -> Tensor:
    """Return the class with the highest score of every pixel (H, W), the scores (C, ...) resized to it."""
    best = torch.full(size, -torch.inf, device=scores.device)
    classes = torch.zeros(size, dtype=torch.long, device=scores.device)
    block = max(1, _SCORES // math.prod(size))  # photos of many classes would not fit in memory
    for start in range(0, len(scores), block):
        resized = F.interpolate(scores[None, start : start + block], size, mode="bilinear")[0]
        highest, index = resized.max(0)
        better = highest > best
        best, classes = torch.where(better, highest, best), torch.where(better, start + index, classes)
    return classes

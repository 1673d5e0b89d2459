"""Images read and prepared in batches, the next one while the caller works on another."""

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.process import read_ahead
from dino_vit.data.image_set import ImageSet, evenly_spaced
from dino_vit.data.images.decode import LISTED, UnreadableImage, listed
from dino_vit.data.remote import SourceLost
from dino_vit.data.statistics import inspect_images
from dino_vit.views.eval_transform import FAR, EvalTransform


@dataclass(frozen=True)
class Features:
    """Features (n, ...) in float32, the indices of their images, and the images that could not be read."""

    values: Tensor
    indices: Tensor  # int64 (n,), on the CPU
    unreadable: tuple[UnreadableImage, ...]


def read_batches(
    source: ImageSet,
    transform: EvalTransform,
    batches: Iterable[Sequence[int]],
    *,
    threads: int | None = None,
    pin: bool = False,
) -> Iterator[Features]:
    """Yield batches of images as values (n, C, h, w), prefetching one while the caller works on another."""

    buffers = deque[Tensor]()

    def blocks() -> Iterator[Sequence[tuple[Tensor, int]]]:
        for indices in batches:
            buffers.append(transform.empty(len(indices), pin=pin))
            yield list(zip(buffers[-1], indices, strict=True))

    def read(image: tuple[Tensor, int]) -> UnreadableImage | None:
        out, index = image
        try:
            out.copy_(transform.read(source, index))
        except UnreadableImage as error:
            return error
        return None

    # Threads suffice: decoding and resampling, 95 % of the work on an image of 500 × 375, hold no lock. By
    # default there are no more than 8, so that other processes are not crowded out.
    threads, batches = threads or min(8, os.cpu_count() or 1), list(batches)
    for indices, failures in zip(batches, read_ahead(read, blocks(), threads), strict=True):
        images, kept = buffers.popleft(), [row for row, failure in enumerate(failures) if failure is None]
        yield Features(
            images if len(kept) == len(indices) else images[kept],
            torch.tensor([indices[row] for row in kept], dtype=torch.long),
            tuple(failure for failure in failures if failure is not None),
        )


def say_what_is_unlike(transform: EvalTransform, source: ImageSet) -> None:
    """Warn if images are far smaller than what they are resized to, or of other pixels."""
    try:
        sample = inspect_images(source, evenly_spaced(len(source), 5))
    except (ValueError, SourceLost):  # none of these can be read; others may
        return
    side = min(transform.size)
    if sample.images and FAR * sample.image_size < side:
        text = "images of about %d pixels are enlarged to %d: they lack details of that size"
        log.warning(text, sample.image_size, side)
    pixels = transform.pixels
    if steps := sample.conversions(pixels):
        level = logging.WARNING if sample.bits > pixels.bits else logging.INFO
        converted = ", ".join(f"{count} {step}" for step, count in steps.items())
        text = "of %d images that were inspected, %s, as the weights need them"
        log.log(level, text, len(sample.images), converted)


def missing_indices(source: ImageSet, kept: ArrayLike) -> list[int]:
    return np.setdiff1d(np.arange(len(source)), np.asarray(kept)).tolist()


def warn_of_unreadable(source: ImageSet, transform: EvalTransform, unreadable: Sequence[int]) -> None:
    """Say how many images cannot be read, and why the first cannot, which are read once more."""
    (batch,) = read_batches(source, transform, [unreadable[:LISTED]])
    read, failures = set(batch.indices.tolist()), iter(batch.unreadable)
    images = [
        UnreadableImage(source.name(index), "") if index in read else next(failures)
        for index in unreadable[:LISTED]
    ]
    text = "%d of %d images cannot be read and are left out:%s"
    log.warning(text, len(unreadable), len(source), listed(images, len(unreadable)))

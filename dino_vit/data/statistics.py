"""A look at some images of a source: what channels, depth and size they have, and their mean and std."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.data.images.decode import UnreadableImage, decode, read_image
from dino_vit.data.images.pixels import MAX_PIXELS, Pixels, kind_of, unit_scale
from dino_vit.data.sources.open import Source

T = TypeVar("T")

INSPECTED = 64
MEASURED = 256
# Decoding holds no lock; more threads would hold more large images at a time.
_THREADS = min(4, os.cpu_count() or 1)


class ImageInfo(NamedTuple):
    """What one image is, before any conversion."""

    height: int
    width: int
    channels: int  # without transparency
    alpha: bool
    kind: str  # uint8, float32, ...

    @property
    def deep(self) -> bool:
        """Tell whether 8 bits are too few."""
        return self.kind not in ("uint8", "bool")

    def fits(self, channels: int) -> bool:
        """Tell whether so many channels can be made of it without making anything up."""
        made = {self.channels, self.channels + self.alpha} if channels in (2, 4) else {self.channels}
        return channels in made or (channels == 3 and self.channels == 1)


@dataclass(frozen=True, kw_only=True)
class ImageSummary:
    """What some images of a source are, and which of them cannot be read."""

    sights: tuple[ImageInfo, ...]
    unreadable: tuple[UnreadableImage, ...]

    @property
    def image_size(self) -> int:
        """Return the shorter side of a typical image."""
        return int(median(min(sight.height, sight.width) for sight in self.sights))

    @property
    def channels(self) -> int:
        """Return the channels that all images have, or can be given; most images' where there is none."""
        found = Counter(sight.channels for sight in self.sights)
        return 3 if found.keys() == {1, 3} else found.most_common(1)[0][0]

    @property
    def bits(self) -> int:
        return 16 if any(sight.deep for sight in self.sights) else 8

    def describe(self, pixels: Pixels) -> str:
        """Say what the images are and what is done to them, with counts."""
        parts = [f"{count} {what}" for what, count in Counter(map(name_of, self.sights)).most_common()]
        said = f"{len(self.sights)} images looked at: {', '.join(parts)}"
        done: Counter[str] = Counter()
        for sight in self.sights:
            done.update(_conversions(sight, pixels))
        if self.unreadable:
            done[f"cannot be read, first {self.unreadable[0]}"] = len(self.unreadable)
        return "; ".join([said, *(f"{count} {what}" for what, count in done.most_common())])


def name_of(sight: ImageInfo) -> str:
    """Say what an image is."""
    named = {1: "grey", 3: "RGB"}.get(sight.channels, f"of {sight.channels} channels")
    return f"{named}{' with transparency' if sight.alpha else ''} ({sight.kind})"


def _conversions(sight: ImageInfo, pixels: Pixels) -> Iterable[str]:
    """Yield what an image goes through on its way to the pixels that are wanted."""
    if not sight.fits(pixels.channels):
        yield f"cannot become data.channels={pixels.channels} and count as unreadable"
        return
    if sight.alpha and not pixels.keeps_alpha:
        yield "lose their transparency"
    if sight.channels == 1 and pixels.channels == 3:
        yield "are made RGB by repetition"
    if sight.deep and pixels.bits == 8:
        yield "are scaled down to 8 bits, as data.bits=8 says"


def sample(source: Source, seed: int, count: int) -> list[int]:
    """Return up to `count` places all over a source, a function of the seed; few may coincide."""
    if len(source) <= count:
        return list(range(len(source)))
    drawn = random_bits(seed, RngPurpose.LOOK, np.arange(count)) % np.uint64(len(source))
    return [int(index) for index in np.unique(drawn)]


def inspect_images(source: Source, indices: Sequence[int], *, max_pixels: int = MAX_PIXELS) -> ImageSummary:
    """Look at some images as they are."""
    found = _in_threads(partial(_see, source, max_pixels=max_pixels), indices)
    sights = tuple(one for one in found if isinstance(one, ImageInfo))
    unreadable = tuple(one for one in found if isinstance(one, UnreadableImage))
    if not sights:
        raise ValueError(
            f"none of the {len(indices)} images that were tried can be read; the last: {unreadable[-1]}"
        )
    return ImageSummary(sights=sights, unreadable=unreadable)


def _see(source: Source, index: int, *, max_pixels: int) -> ImageInfo | UnreadableImage:
    name = source.name(index)
    try:
        return inspect_image(source.read(index), name, max_pixels=max_pixels)[0]
    except UnreadableImage as error:
        return error
    except OSError as error:
        return UnreadableImage(name, error.strerror or str(error))


def inspect_image(
    item: bytes | Tensor, name: str, *, max_pixels: int = MAX_PIXELS
) -> tuple[ImageInfo, Tensor]:
    """Decode an item of a source as it is, and say what it is."""
    opaque = 0
    if isinstance(item, Tensor):
        image = item
    else:
        image = decode(item, name, max_pixels=max_pixels)
        if len(image) in (2, 4):
            opaque = len(decode(item, name, alpha=False, max_pixels=max_pixels))
    channels, height, width = image.shape
    sight = ImageInfo(height, width, opaque or channels, bool(opaque) and opaque != channels, kind_of(image))
    return sight, image


class Statistics(NamedTuple):
    """Mean and standard deviation per channel of pixels from 0 to 1, each image counting the same."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    highest: float  # value of any pixel
    images: int


def measure(source: Source, indices: Sequence[int], pixels: Pixels) -> Statistics:
    """Measure mean and std over some images as they are trained on."""
    found = _in_threads(partial(_moments, source, pixels), indices)
    moments = [one for one in found if isinstance(one, Tensor)]
    if not moments:
        failure = next(one for one in found if isinstance(one, UnreadableImage))
        raise ValueError(
            f"none of the {len(indices)} images that were tried can be used; the first: {failure}"
        )
    together = torch.stack(moments)
    mean, square, _ = together.mean(dim=0)
    std = (square - mean**2).clamp_min(0).sqrt()
    return Statistics(tuple(mean.tolist()), tuple(std.tolist()), float(together[:, 2].max()), len(moments))


def _moments(source: Source, pixels: Pixels, index: int) -> Tensor | UnreadableImage:
    """Return the mean, the mean square and the highest value of each channel, (3, C), in float64."""
    try:
        image = unit_scale(read_image(source, index, pixels))
    except UnreadableImage as error:
        return error
    return torch.cat((moments(image), image.amax(dim=(1, 2))[None].double()))


def moments(image: Tensor) -> Tensor:
    """Return the mean and the mean square of each channel of an image (C, H, W): (2, C), in float64."""
    variance, mean = torch.var_mean(image, dim=(1, 2), correction=0)
    return torch.stack((mean.double(), variance.double() + mean.double() ** 2))


def _in_threads(function: Callable[[int], T], indices: Sequence[int]) -> list[T]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, indices))

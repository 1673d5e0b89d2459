"""Inspect images of a source: format, size, channels, depth and damage; and measure mean and std."""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from statistics import median
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.config.sections import ChannelStatistics
from dino_vit.core.process import in_threads
from dino_vit.core.text import plural, progress
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import UnreadableImage, decode, listed, read_item, unreadable
from dino_vit.data.images.formats import format_of, taking_turns
from dino_vit.data.images.pixels import MAX_PIXELS, NOT_FINITE, Pixels
from dino_vit.data.remote import raise_if_lost

T = TypeVar("T")
INSPECTED_IMAGES = 64  # at most, where nothing is measured
MEASURED_IMAGES = 256  # at most, for mean, std and layout
LAYOUT = 16  # cells along each side of an image, of which the layout is compared
_THREADS = min(8, os.cpu_count() or 1)  # decoding releases the GIL; each thread holds an image


@dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """One image before any conversion."""

    index: int
    format: str
    file_bytes: int  # 0 for an array
    height: int
    width: int
    channels: int  # without alpha
    alpha: bool
    kind: str  # uint8, float32, ...
    low: float
    high: float
    seconds: float = 0.0  # of a core, to read and decode it
    layout: Tensor | None = field(default=None, repr=False, compare=False)  # of mean 0 and length 1

    @property
    def deep(self) -> bool:
        """Tell whether 8 bits are not enough, of 32 and 64 bits, which lists become, by the values."""
        wide = self.kind in ("int32", "int64", "uint32", "uint64")
        return self.kind not in ("uint8", "bool") and not (wide and self.high <= 255)

    def fits(self, channels: int) -> bool:
        """Tell whether the image can be converted to this number of channels."""
        possible = {self.channels, self.channels + self.alpha} if channels in (2, 4) else {self.channels}
        return channels in possible or (channels == 3 and self.channels == 1)

    def describe(self) -> str:
        color = {1: "grey", 3: "RGB"}.get(self.channels, f"{self.channels}-channel")
        return f"{color}{' with alpha' if self.alpha else ''} ({self.kind})"


@dataclass(frozen=True, kw_only=True)
class ImageSummary:
    """The inspected images of a source, and those that cannot be read."""

    images: list[ImageInfo]
    unreadable: list[UnreadableImage]

    @property
    def image_size(self) -> int:
        """Return the shorter side of a typical image."""
        return int(median(min(image.height, image.width) for image in self.images))

    @property
    def likeness(self) -> float:
        """Return the mean correlation of two images, in grey and reduced: 0 if nothing of them lies alike.

        Of photos of everything it is near 0; of one kind of thing, each time in the middle, 0.2 or more.
        """
        layouts = [image.layout for image in self.images if image.layout is not None]
        if len(layouts) < 2:
            return 0.0
        count, total = len(layouts), torch.stack(layouts).sum(dim=0)
        return float((total @ total - count) / (count * (count - 1)))

    @property
    def channels(self) -> int:
        """Return the channels that all images have or can be converted to, else the most frequent ones."""
        counts = Counter(image.channels for image in self.images)
        # Grey can be repeated to RGB, but not the reverse.
        return 3 if counts.keys() == {1, 3} else counts.most_common(1)[0][0]

    @property
    def bits(self) -> Literal[8, 16]:
        return 16 if any(image.deep for image in self.images) else 8

    def count(self, key: Callable[[ImageInfo], str]) -> dict[str, int]:
        """Count images by a property, most frequent first."""
        return dict(Counter(map(key, self.images)).most_common())

    def conversions(self, pixels: Pixels) -> Counter[str]:
        """Count what happens to images when they are converted to `pixels`."""
        return Counter(step for image in self.images for step in _conversions(image, pixels))

    def describe(self, pixels: Pixels) -> str:
        """Describe the images and their conversion to `pixels`, with counts."""
        kinds = [f"{count} {kind}" for kind, count in self.count(ImageInfo.describe).items()]
        steps = [f"{count} {step}" for step, count in self.conversions(pixels).most_common()]
        if self.unreadable:
            all_of_them = "unreadable.txt lists all that the run meets"
            steps += [f"{len(self.unreadable)} cannot be read ({all_of_them}):{listed(self.unreadable)}"]
        return "; ".join([f"{plural(len(self.images), 'image')} inspected: {', '.join(kinds)}", *steps])


def _conversions(image: ImageInfo, pixels: Pixels) -> Iterator[str]:
    if not image.fits(pixels.channels):
        yield f"cannot be converted to data.channels={pixels.channels} and count as unreadable"
        return
    if image.alpha and not pixels.keeps_alpha:
        yield "lose their alpha channel"
    if image.channels == 1 and pixels.channels == 3:
        yield "repeated from grey to RGB"
    if image.deep and pixels.bits == 8:
        yield "scaled down to 8 bits"


def inspect_images(source: ImageSet, indices: Sequence[int], *, max_pixels: int = MAX_PIXELS) -> ImageSummary:
    """Inspect images without conversion; one of them must be readable."""
    # The layouts of all would take memory.
    compared = frozenset(indices[:: -(-len(indices) // MEASURED_IMAGES)])
    inspect = partial(_inspect, compared=compared, max_pixels=max_pixels)
    images, failed = _measure_each("Inspecting images", inspect, source, indices)
    return ImageSummary(images=images, unreadable=failed)


def _measure_each(
    title: str, measure: Callable[[ImageSet, int], T], source: ImageSet, indices: Sequence[int]
) -> tuple[list[T], list[UnreadableImage]]:
    """Return what is measured of images, and those that cannot be read; one of them must be readable."""

    def attempt(index: int) -> T | UnreadableImage:
        try:
            return measure(source, index)
        except UnreadableImage as error:
            return error
        except ValueError as error:
            return unreadable(source.name(index), error)

    with progress(title, len(indices)) as advance:
        results = in_threads(attempt, indices, lambda _: advance(1), _THREADS)
    failed = [result for result in results if isinstance(result, UnreadableImage)]
    measured = [result for result in results if not isinstance(result, UnreadableImage)]
    if not measured:
        raise_if_lost(failed[0])
        raise ValueError(f"none of {plural(len(indices), 'image')} can be used, such as {failed[0]}")
    return measured, failed


def _inspect(source: ImageSet, index: int, *, compared: Collection[int], max_pixels: int) -> ImageInfo:
    name, start = source.name(index), time.thread_time()  # other threads of this process take turns
    item = read_item(source, index, max_pixels)
    image = decode(item, name, max_pixels=max_pixels)
    seconds = time.thread_time() - start
    channels, height, width = image.shape
    values = image.numpy()  # NumPy has min and max of more types than torch
    low, high = float(values.min()), float(values.max())
    if not isfinite(low) or not isfinite(high):
        raise ValueError(NOT_FINITE)
    color = channels
    if channels in (2, 4):
        color = len(decode(item, name, alpha=False, max_pixels=max_pixels))
    return ImageInfo(
        index=index,
        format="array" if isinstance(item, Tensor) else format_of(item),
        file_bytes=0 if isinstance(item, Tensor) else len(item),
        height=height,
        width=width,
        channels=color,
        alpha=color < channels,
        kind=str(image.dtype).removeprefix("torch."),
        low=low,
        high=high,
        layout=_layout(image) if index in compared else None,
        seconds=seconds,
    )


def _layout(image: Tensor) -> Tensor | None:
    """Return where an image (C, H, W) is light, as LAYOUT² numbers; None if it is so everywhere alike."""
    height, width = image.shape[1:]
    few = image[:, :: max(1, height // (4 * LAYOUT)), :: max(1, width // (4 * LAYOUT))]
    values = few.to(torch.float32).mean(dim=0)
    cells = F.interpolate(values[None, None], (LAYOUT, LAYOUT), mode="area").flatten()
    cells = cells - cells.mean()
    length = float(cells.norm())
    return cells / length if isfinite(length) and length > 1e-6 * float(values.abs().max()) else None


def channel_statistics(source: ImageSet, indices: Sequence[int], pixels: Pixels) -> ChannelStatistics:
    """Measure mean and std of images as they are trained on."""
    measure = partial(_image_statistics, pixels=pixels)
    moments, _ = _measure_each("Measuring mean and std", measure, source, indices)
    stacked = torch.stack(moments)
    mean, square, _ = stacked.mean(dim=0)
    std = (square - mean**2).clamp_min(0).sqrt()
    return ChannelStatistics(
        tuple(mean.tolist()), tuple(std.tolist()), float(stacked[:, 2].max()), len(moments)
    )


def _image_statistics(source: ImageSet, index: int, *, pixels: Pixels) -> Tensor:
    """Return the mean, the mean square and the highest value of each channel, (3, C), in float64."""
    item, channel_pixels = read_item(source, index, pixels.max_pixels), replace(pixels, channels=1)
    image = decode(item, source.name(index), alpha=pixels.keeps_alpha, max_pixels=pixels.max_pixels)
    image = pixels.with_channels(image)
    with taking_turns(image[0].numel()):  # and a channel at a time, as floats are larger
        moments = (_moments(channel_pixels.conform(channel[None])) for channel in image)
        return torch.stack([*moments], dim=1)


def _moments(values: Tensor) -> Tensor:
    """Return the mean, the mean square and the highest of some values."""
    values = values / 255 if values.dtype == torch.uint8 else values
    variance, mean = (moment.double() for moment in torch.var_mean(values, correction=0))
    return torch.stack((mean, variance + mean**2, values.amax().double()))

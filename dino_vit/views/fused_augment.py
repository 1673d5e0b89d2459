"""Augmentation of colour images in four kernels, each for all images: what a GPU runs in training.

The numbers are those of `Augment` but for the rounding. Channels are tensors of their own, so that a compiled
function keeps them in registers. Only the mean of contrast needs a kernel before: each image has one.

n images, c channels, h height, w width
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core.fused import fused

Luma = tuple[float, float, float]  # weights of red, green and blue
Planes = tuple[Tensor, Tensor, Tensor]  # red, green, blue, (n, h, w) each


def augment(
    images: Tensor,  # (n, 3, h, w): uint8, or float32 from 0 to 1
    jitters: Tensor,  # (numbers, n): of each step of `hues`, one for a hue, three for a blend
    flip: Tensor,  # (n,), as grey and solarise
    grey: Tensor,
    taps: Tensor,  # (taps, n) of the blur
    solarise: Tensor,
    mean: Tensor,  # (3, 1, 1), as std
    std: Tensor,
    hues: tuple[bool, ...],  # which steps shift the hue, in `turns`; the others blend with a grey
    turns: int,
    luma: Luma,
) -> Tensor:
    """Return the augmented and normalised images, float32."""
    means = contrast_means(images, jitters, hues, turns, luma)
    # Inductor would copy the channels together too, in a kernel of its own.
    x = torch.stack(colours(images, jitters, means, flip, grey, hues, turns, luma), dim=1)
    return blur_rows(blur_columns(x, taps), taps, solarise, mean, std)


@fused
def contrast_means(images: Tensor, jitters: Tensor, hues: tuple[bool, ...], turns: int, luma: Luma) -> Tensor:
    """Return the mean grey (n, 1, 1) that contrast blends an image with."""
    planes, numbers = _planes(images), _numbers(jitters)
    chosen = torch.zeros_like(planes[0])
    for is_hue in hues:
        if is_hue:
            planes = _shift_hue(planes, next(numbers), turns)
            continue
        factor, pixel_weight, mean_weight = next(numbers), next(numbers), next(numbers)
        grey = _luma(planes, luma)
        chosen = torch.where(mean_weight != 0, grey, chosen)
        planes = _blend(planes, factor, grey * pixel_weight)  # what follows contrast is of no use
    return chosen.mean((-2, -1), keepdim=True)


@fused
def colours(
    images: Tensor,
    jitters: Tensor,
    means: Tensor,
    flip: Tensor,
    grey: Tensor,
    hues: tuple[bool, ...],
    turns: int,
    luma: Luma,
) -> Planes:
    """Flip, jitter, and make grey; return levels."""
    planes = _planes(torch.where(flip.view(-1, 1, 1, 1) > 0, images.flip(-1), images))
    numbers = _numbers(jitters)
    for is_hue in hues:
        if is_hue:
            planes = _shift_hue(planes, next(numbers), turns)
        else:
            factor, pixel_weight, mean_weight = next(numbers), next(numbers), next(numbers)
            planes = _blend(planes, factor, _luma(planes, luma) * pixel_weight + means * mean_weight)
    brightness, is_grey = _luma(planes, luma), grey.view(-1, 1, 1) > 0
    red, green, blue = (torch.where(is_grey, brightness, plane) for plane in planes)
    return red, green, blue


@fused
def blur_columns(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve along the height."""
    return _convolved(x, taps, 2)


@fused
def blur_rows(x: Tensor, taps: Tensor, solarise: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Convolve along the width, solarise, normalise."""
    x = _convolved(x, taps, 3)
    x = torch.where(solarise.view(-1, 1, 1, 1) > 0, x.minimum(255 - x), x)
    return (x - mean) / std


def _planes(images: Tensor) -> Planes:
    red, green, blue = images.float().unbind(1)
    return (red * 255, green * 255, blue * 255) if images.is_floating_point() else (red, green, blue)


def _numbers(jitters: Tensor) -> Iterator[Tensor]:
    return (own.view(-1, 1, 1) for own in jitters.unbind())


def _luma(planes: Planes, luma: Luma) -> Tensor:
    return planes[0] * luma[0] + planes[1] * luma[1] + planes[2] * luma[2]


def _blend(planes: Planes, factor: Tensor, grey: Tensor) -> Planes:
    red, green, blue = (plane.mul(factor).add(grey).clamp(0, 255) for plane in planes)
    return red, green, blue


def _clamped(planes: Planes, low: Tensor, high: Tensor) -> Planes:
    red, green, blue = (plane.maximum(low).minimum(high) for plane in planes)
    return red, green, blue


def _shift_hue(planes: Planes, shift: Tensor, turns: int) -> Planes:
    """Shift the hue as `Augment` does."""
    shift = shift * (-6 / turns)
    for _ in range(turns):
        red, green, blue = planes
        low, high = red.minimum(green).minimum(blue), red.maximum(green).maximum(blue)
        below, step = low + high - (red + green + blue), (high - low) * shift
        red, green, blue = (
            below + 2 * red + (green - blue).sign() * step,
            below + 2 * green + (blue - red).sign() * step,
            below + 2 * blue + (red - green).sign() * step,
        )
        planes = _clamped((red, green, blue), low, high)
    return planes


def _convolved(x: Tensor, taps: Tensor, dim: int) -> Tensor:
    """Convolve along a dimension, reflected at its borders."""
    radius, size = len(taps) // 2, x.shape[dim]
    padded = F.pad(x, (0, 0, radius, radius) if dim == 2 else (radius, radius, 0, 0), mode="reflect")
    out = torch.zeros_like(x)
    for shift, tap in enumerate(taps.unbind()):
        out = out + padded.narrow(dim, shift, size) * tap.view(-1, 1, 1, 1)
    return out

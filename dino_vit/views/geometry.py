"""Views of an image: where each is cut out, and how it will be coloured.

A view is a box (top, left, height, width), used where the image is decoded, and a row of photometry, used
where `augment.Augment` runs; both are functions of (seed, epoch, sample, view) alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core.randomness import RngPurpose, random_uniform

Size = tuple[int, int]
Interpolation = Literal["bicubic", "bilinear"]

BOX_TRIES = 10


class Column:
    """The columns of a photometric row; what is off is 0. Plain numbers: compilers take no enumeration."""

    FLIP = 0
    JITTER = 1
    ORDER = 2  # which of the 24 orders of the four jitter operations
    BRIGHTNESS = 3
    CONTRAST = 4
    SATURATION = 5
    HUE = 6
    GREY = 7
    SIGMA = 8
    SOLARISE = 9
    NOISE = 10  # its standard deviation, of values from 0 to 1
    KEY_HIGH = 11  # the noise's key of 48 bits, in halves that a float32 holds exactly
    KEY_LOW = 12


COLUMNS = 13


@dataclass(frozen=True, kw_only=True)
class ViewPhotometry:
    """How probable each operation is and how far it goes."""

    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    grey: float = 0.2
    blur: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarise: float = 0.0
    noise: float = 0.0
    noise_std: tuple[float, float] = (0.01, 0.1)

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grey", "blur", "solarise", "noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is a probability, but {getattr(self, name)} is not between 0 and 1."
                )
        for name, limit in (("brightness", 1.0), ("contrast", 1.0), ("saturation", 1.0), ("hue", 0.5)):
            if not 0 <= getattr(self, name) <= limit:
                raise ValueError(f"{name} must lie between 0 and {limit}, but is {getattr(self, name)}.")
        if not 0 < self.blur_sigma[0] <= self.blur_sigma[1]:
            raise ValueError(f"blur_sigma must be a pair 0 < low <= high, but is {self.blur_sigma}.")
        if not 0 < self.noise_std[0] <= self.noise_std[1] <= 1:
            raise ValueError(f"noise_std must be a pair 0 < low <= high <= 1, but is {self.noise_std}.")


@dataclass(frozen=True, kw_only=True)
class View:
    """A view: size (height, width), share of the image, aspect ratios (width / height) and photometry."""

    size: Size
    scale: tuple[float, float]
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    photometry: ViewPhotometry = ViewPhotometry()
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"A view needs at least one pixel, but its size is {self.size}.")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be shares of the image, 0 < low <= high <= 1, but is {self.scale}.")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio must be a pair 0 < low <= high, but is {self.ratio}.")


def draw_boxes(
    views: Sequence[View], *, seed: int, epoch: int, sample: int, height: int, width: int
) -> NDArray[np.int64]:
    """Draw (top, left, height, width) of every view of an image, as a random resized crop does."""
    tries = draw_tries(views, seed=seed, epoch=epoch, samples=np.array([sample]))
    return choose_boxes(views, tries[0], height=height, width=width)


def draw_tries(
    views: Sequence[View], *, seed: int, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Draw the numbers behind the boxes of every view of every sample, (samples, views, tries, 4)."""
    number = np.arange(len(views))[:, None, None]
    keys = (epoch, samples[:, None, None, None], number, np.arange(BOX_TRIES)[:, None], np.arange(4))
    return random_uniform(seed, RngPurpose.BOXES, *keys)


def choose_boxes(
    views: Sequence[View], tries: NDArray[np.float64], *, height: int, width: int
) -> NDArray[np.int64]:
    """Return the box of each view, (views, 4), in an image of known size."""
    boxes = [_first_box(view, rows, height, width) for view, rows in zip(views, tries.tolist(), strict=True)]
    return np.array(boxes, dtype=np.int64)


def _first_box(view: View, tries: list[list[float]], height: int, width: int) -> tuple[int, int, int, int]:
    """Return the first try that fits, or the largest central box of an allowed ratio."""
    (low, high), (narrow, wide) = view.scale, (math.log(view.ratio[0]), math.log(view.ratio[1]))
    for area, ratio, top, left in tries:
        pixels = height * width * (low + (high - low) * area)
        aspect = math.exp(narrow + (wide - narrow) * ratio)
        w, h = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(top * (height - h + 1)), int(left * (width - w + 1)), h, w
    w = min(width, max(1, round(height * view.ratio[1])))
    h = min(height, max(1, round(width / view.ratio[0])))
    return (height - h) // 2, (width - w) // 2, h, w


def interleave(image: Tensor) -> Tensor:
    """Return an image (C, H, W) as it is cut fastest: RGB bytes with the channels of a pixel side by side."""
    if image.dtype != torch.uint8 or len(image) != 3:
        return image
    return image[None].contiguous(memory_format=torch.channels_last)[0]


def cut_views(
    image: Tensor,
    boxes: NDArray[np.int64],
    size: Size,
    *,
    interpolation: Interpolation = "bicubic",
    out: Tensor | None = None,
) -> Tensor:
    """Cut boxes out of an image (C, H, W) and resample them, with antialias, to (n, C, *size)."""
    whole = interleave(image)[None]
    cut = torch.empty(len(boxes), len(image), *size, dtype=image.dtype) if out is None else out
    for (top, left, h, w), place in zip(boxes.tolist(), cut, strict=True):
        part = whole[:, :, top : top + h, left : left + w]
        place.copy_(F.interpolate(part, size=size, mode=interpolation, antialias=True)[0])
    return cut.clamp_(0, 1) if cut.is_floating_point() else cut  # bicubic overshoots; uint8 was cut off


def draw_photometry(
    views: Sequence[View], *, seed: int, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Draw the photometric rows of every view of every sample: (samples, views, columns)."""
    keys = (epoch, samples[:, None, None], np.arange(len(views))[:, None], np.arange(11))
    u = np.moveaxis(random_uniform(seed, RngPurpose.PHOTOMETRY, *keys), -1, 0)  # (11, samples, views)

    def setting(name: str) -> NDArray[np.float64]:
        return np.array([getattr(view.photometry, name) for view in views])

    low, high = setting("blur_sigma").T
    rows = np.empty((len(samples), len(views), COLUMNS), dtype=np.float32)
    rows[..., Column.FLIP] = u[0] < setting("flip")
    rows[..., Column.JITTER] = u[1] < setting("jitter")
    rows[..., Column.ORDER] = np.floor(24 * u[2])
    rows[..., Column.BRIGHTNESS] = 1 + (2 * u[3] - 1) * setting("brightness")
    rows[..., Column.CONTRAST] = 1 + (2 * u[4] - 1) * setting("contrast")
    rows[..., Column.SATURATION] = 1 + (2 * u[5] - 1) * setting("saturation")
    rows[..., Column.HUE] = (2 * u[6] - 1) * setting("hue")
    rows[..., Column.GREY] = u[7] < setting("grey")
    rows[..., Column.SIGMA] = (u[8] < setting("blur")) * (low + (high - low) * u[9])
    rows[..., Column.SOLARISE] = u[10] < setting("solarise")
    rows[..., Column.NOISE :] = 0  # to the last
    if setting("noise").any():
        low, high = setting("noise_std").T
        chance, std, key = np.moveaxis(
            random_uniform(seed, RngPurpose.NOISE, *keys[:-1], np.arange(3)), -1, 0
        )
        noisy = chance < setting("noise")
        rows[..., Column.NOISE] = noisy * (low + (high - low) * std)
        rows[..., Column.KEY_HIGH] = noisy * np.floor(2.0**24 * key)
        rows[..., Column.KEY_LOW] = noisy * (np.floor(2.0**48 * key) % 2**24)
    return rows

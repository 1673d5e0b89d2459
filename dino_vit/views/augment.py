"""Augmentation of views: flip, colour jitter, grey, blur, solarisation, normalisation.

`draw_augment` draws a row of parameters for each view; `Augment` applies the rows to a batch on any
device, in float32 on levels from 0 to 255, without rounding between operations (PIL rounds after each).

Axes: n images, c channels, h height, w width. An operation takes images and their rows, and overwrites the
images. There is one path for all devices: on a CPU it takes 1 % of a step of ViT-S/16.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import permutations

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dino_vit.core.distributed import to_device
from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.data.images.pixels import unit_scale

Operation = Callable[[Tensor, Tensor], object]

# The shortest sequence of the four jitter operations that contains every order of them: a batch of images of
# any orders takes twelve operations, where four for each of four positions would be sixteen.
JITTERS = (0, 1, 2, 3, 0, 1, 2, 0, 3, 1, 0, 2)
_NEGLIGIBLE = 1e-3  # taps of the Gaussian below this weight are left out; the centre has weight 1
_REACH = math.sqrt(-2 * math.log(_NEGLIGIBLE))  # in sigmas
_LUMA = (0.2989, 0.587, 0.114)


def _places(order: Sequence[int]) -> list[int]:
    """Return where in `JITTERS` the operations of an order are."""
    places = [-1]
    for number in order:
        places.append(JITTERS.index(number, places[-1] + 1))
    return places[1:]


_PLACES = [_places(order) for order in permutations(range(4))]


@dataclass(frozen=True, kw_only=True)
class ViewAugment:
    """The probability and strength of each operation for one view; everything is off by default."""

    flip: float = 0.0
    jitter: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    grey: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarise: float = 0.0


class Column(IntEnum):
    """The columns of a row of parameters; 0 means off."""

    FLIP = 0
    JITTER = 1
    ORDER = 2  # index into the 24 orders of the four jitter operations
    BRIGHTNESS = 3
    CONTRAST = 4
    SATURATION = 5
    HUE = 6
    GREY = 7
    SIGMA = 8
    SOLARISE = 9


def draw_augment(
    views: Sequence[ViewAugment], *, seed: int, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Draw the rows of parameters of every view of every sample: (samples, views, columns)."""
    keys = (epoch, samples[:, None, None], np.arange(len(views))[:, None])
    u = np.moveaxis(random_uniform(seed, RngPurpose.AUGMENT, *keys, np.arange(11)), -1, 0)

    def setting(name: str) -> NDArray[np.float64]:
        return np.array([getattr(view, name) for view in views])

    low, high = setting("blur_sigma").T
    rows = np.zeros((len(samples), len(views), len(Column)), dtype=np.float32)
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
    return rows


class Augment(nn.Module):
    """Turn views (n, c, h, w) and their rows of parameters (n, `Column`) into normalised float32 views.

    Views are uint8, or float32 from 0 to 1 if they are deeper than 8 bits; any number of channels. Rows are
    read on the host: an operation computes only the images it applies to, and never waits for a device.
    On a CPU the result for an image is the same, bit for bit, whatever its batch, process and threads.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, *, mean: Sequence[float], std: Sequence[float], sigma_max: float = 2.0, hue_max: float = 0.5
    ) -> None:
        super().__init__()
        self.jitter: list[Operation] = [_brightness_, _contrast_]
        self.grey: list[Operation] = []
        if len(mean) == 3:
            self.jitter += [_saturation_, partial(_hue_, turns=max(1, math.ceil(6 * hue_max)))]
            self.grey = [_grey_]
        self.blur = partial(_blur_, sigma_max=sigma_max)
        levels = 255 * rearrange(torch.tensor([mean, std]), "two c -> two c 1 1")
        self.register_buffer("mean", levels[0], persistent=False)
        self.register_buffer("std", levels[1], persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, rows: Tensor) -> Tensor:
        assert images.dtype in (torch.uint8, torch.float32), images.dtype
        assert images.shape[1] == len(self.mean), images.shape
        x = images * 255 if images.is_floating_point() else images.float()
        steps = self._steps(rows)
        # The indices of all steps move to the device in one copy, their parameters in another.
        flat = torch.tensor([row for _, chosen in steps for row in chosen], dtype=torch.long)
        counts = [len(chosen) for _, chosen in steps]
        indices = torch.split(to_device(flat, x.device), counts)
        parameters = torch.split(to_device(rows[flat], x.device), counts)
        for (operation, _), index, own in zip(steps, indices, parameters, strict=True):
            if len(index) == len(x):
                operation(x, own)
            elif len(index):
                selected = x.index_select(0, index)
                operation(selected, own)
                x.index_copy_(0, index, selected)
        return x.sub_(self.mean).div_(self.std)

    def _steps(self, rows: Tensor) -> list[tuple[Operation, list[int]]]:
        """List the operations in order, each with the indices of the images it applies to."""
        on = [[row for row, value in enumerate(column) if value > 0] for column in rows.T.tolist()]
        places = [_PLACES[number] for number in rows[:, Column.ORDER].int().tolist()]
        jitter = [
            (self.jitter[number], [row for row in on[Column.JITTER] if place in places[row]])
            for place, number in enumerate(JITTERS)
            if number < len(self.jitter)
        ]
        return [
            (_flip_, on[Column.FLIP]),
            *jitter,
            *((grey, on[Column.GREY]) for grey in self.grey),
            (self.blur, on[Column.SIGMA]),
            (_solarise_, on[Column.SOLARISE]),
        ]


class CustomAugment(nn.Module):
    """Stand in for `Augment`: change views (n, C, h, w) from 0 to 1 by a module, then normalise them.

    torch's random numbers are seeded for each batch by the seed, the epoch and the samples. What else the
    module draws from is its own concern.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, module: Callable[[Tensor], Tensor], *, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        self.module = module
        statistics = rearrange(torch.tensor([mean, std]), "two c -> two c 1 1")
        self.register_buffer("mean", statistics[0], persistent=False)
        self.register_buffer("std", statistics[1], persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, rows: Tensor) -> Tensor:
        # A row is a function of (seed, epoch, sample, view), and its order of jitters is always drawn.
        digest = hashlib.sha256(rows.numpy().tobytes()).digest()
        with torch.random.fork_rng([images.device] if images.is_cuda else []):
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            changed = self.module(unit_scale(images))
        if not isinstance(changed, Tensor) or changed.shape != images.shape:
            returned = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(f"augment.module returned {returned} for views {tuple(images.shape)}")
        return (changed.float() - self.mean) / self.std


def _factor(rows: Tensor, column: Column) -> Tensor:
    return rearrange(rows[:, column], "n -> n 1 1 1")


def _flip_(x: Tensor, _: Tensor) -> None:
    x.copy_(x.flip(-1))


def _luma(x: Tensor) -> Tensor:
    red, green, blue = x.chunk(3, dim=1)
    return (red * _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])


def _grey_(x: Tensor, _: Tensor) -> None:
    x.copy_(_luma(x).expand_as(x))


def _brightness_(x: Tensor, rows: Tensor) -> None:
    x.mul_(_factor(rows, Column.BRIGHTNESS)).clamp_(0, 255)


def _contrast_(x: Tensor, rows: Tensor) -> None:
    """Blend with the mean luma, or with the mean of each channel if the image is not RGB."""
    # A mean over all pixels at once would depend on the number of threads.
    mean = x.mean(-1, keepdim=True).mean(-2, keepdim=True)
    _blend_(x, _factor(rows, Column.CONTRAST), _luma(mean) if x.shape[1] == 3 else mean)


def _saturation_(x: Tensor, rows: Tensor) -> None:
    _blend_(x, _factor(rows, Column.SATURATION), _luma(x))


def _blend_(x: Tensor, factor: Tensor, grey: Tensor) -> None:
    """Set x to factor · x + (1 − factor) · grey, within the levels."""
    x.mul_(factor).add_(grey.mul_(1 - factor)).clamp_(0, 255)


def _hue_(x: Tensor, rows: Tensor, *, turns: int) -> None:
    """Shift the hue of HSV, without a branch per pixel, which would cost more than the arithmetic.

    In HSV a channel's value is a trapezoid of the hue: over one turn it stays at the maximum of the three
    channels for a third, falls for a sixth, stays at the minimum for a third, and rises for a sixth.
    Extended beyond the maximum and the minimum, the falling or rising line now has the value 2 x − middle;
    the order of the other two channels tells which line it is. Clamping restores the flat parts. This holds
    for shifts of up to a sixth, so a larger shift takes several `turns`.
    """
    shift = _factor(rows, Column.HUE) * (-6 / turns)
    red, green, blue = x.chunk(3, dim=1)
    sides = torch.empty_like(x)
    for _ in range(turns):
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        below = (low + high).sub_(red).sub_(green).sub_(blue)  # −middle
        step = (high - low).mul_(shift)
        torch.sub(green, blue, out=sides[:, 0:1])
        torch.sub(blue, red, out=sides[:, 1:2])
        torch.sub(red, green, out=sides[:, 2:3])
        torch.add(below, x, alpha=2.0, out=x).addcmul_(sides.sign_(), step)
        torch.clamp(x, low, high, out=x)


def _blur_(x: Tensor, rows: Tensor, *, sigma_max: float) -> None:
    """Convolve with a Gaussian, reflected at the borders, as a sum of shifted images."""
    height, width = x.shape[-2:]
    kernel = _gaussian(_factor(rows, Column.SIGMA), sigma_max, min(height, width) - 1)
    taps, radius = torch.split(kernel, 1, dim=-1), kernel.shape[-1] // 2
    for dim, size, border in ((-2, height, (0, 0, radius, radius)), (-1, width, (radius, radius, 0, 0))):
        padded = F.pad(x, border, mode="reflect")
        torch.mul(padded.narrow(dim, 0, size), taps[0], out=x)
        for shift, tap in enumerate(taps[1:], start=1):
            x.addcmul_(padded.narrow(dim, shift, size), tap)


def _gaussian(sigma: Tensor, sigma_max: float, largest: int) -> Tensor:
    """Return the weights (n, 1, 1, taps) of Gaussians, up to a negligible one or the size of the image."""
    radius = min(math.floor(sigma_max * _REACH), largest)
    distances = torch.arange(-radius, radius + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (distances / sigma) ** 2)
    kernel = kernel * (kernel >= _NEGLIGIBLE)
    return kernel / kernel.sum(-1, keepdim=True)


def _solarise_(x: Tensor, _: Tensor) -> None:
    """Invert values above one half; on 8-bit levels this equals the threshold 128."""
    torch.minimum(x, 255 - x, out=x)

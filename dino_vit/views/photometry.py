"""Photometry of views: flip, colour jitter, grey, blur, solarisation, noise, normalisation.

`draw_photometry` draws a row of parameters for each view; `Augment` applies the rows to a batch on any
device, in float32 on levels from 0 to 255, without rounding between operations (PIL rounds after each).

Axes: n images, c channels, h height, w width. A function whose name ends in _ overwrites its first argument;
its factor is a number for all images, or a tensor (n, 1, 1, 1); that of noise is (n, 3).
"""

import math
from collections.abc import Callable, Iterator, Sequence
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

from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.views.noise import add_noise_

Factor = float | Tensor
Operation = Callable[[Tensor, Factor], object]
Step = tuple[Operation, list[int], Tensor]  # operation, indices of its images, factors of all images

_ORDERS = list(permutations(range(4)))
# Two fast paths for a CPU, timed by benchmarks/input. A view of this many values or more is processed alone:
# operations whose factor is a plain number compute less.
_LARGE = 3 * 128 * 128
_CHUNK = 1 << 18  # values of smaller views that are processed together: they stay in the cache of a core
_NEGLIGIBLE = 1e-3  # taps of the Gaussian below this weight are left out; the centre has weight 1
_REACH = math.sqrt(-2 * math.log(_NEGLIGIBLE))  # in sigmas
_LUMA = (0.2989, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class ViewPhotometry:
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
    noise: float = 0.0
    noise_std: tuple[float, float] = (0.01, 0.1)


class Column(IntEnum):
    """The columns of a photometric row; 0 means off."""

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
    NOISE = 10  # standard deviation, for values from 0 to 1
    KEY_HIGH = 11  # the 48-bit key of the noise, in two halves that float32 holds exactly
    KEY_LOW = 12


def draw_photometry(
    views: Sequence[ViewPhotometry], *, seed: int, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Draw the photometric rows of every view of every sample: (samples, views, columns)."""
    keys = (epoch, samples[:, None, None], np.arange(len(views))[:, None])
    u = np.moveaxis(random_uniform(seed, RngPurpose.PHOTOMETRY, *keys, np.arange(11)), -1, 0)

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
    if setting("noise").any():
        u = np.moveaxis(random_uniform(seed, RngPurpose.NOISE, *keys, np.arange(3)), -1, 0)
        noisy, (low, high) = u[0] < setting("noise"), setting("noise_std").T
        rows[..., Column.NOISE] = noisy * (low + (high - low) * u[1])
        rows[..., Column.KEY_HIGH] = noisy * np.floor(2.0**24 * u[2])
        rows[..., Column.KEY_LOW] = noisy * (np.floor(2.0**48 * u[2]) % 2**24)
    return rows


class Augment(nn.Module):
    """Turn views (n, c, h, w) and their photometric rows (n, `Column`) into normalised float32 views.

    Views are uint8, or float32 from 0 to 1 if they are deeper than 8 bits; any number of channels. Rows are
    read on the host: an operation computes only the images it applies to, and never waits for a device.
    Noise comes last, because jitter would scale it and blur would remove it. On a CPU the result for an
    image is the same, bit for bit, whatever its batch, process and threads.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, *, mean: Sequence[float], std: Sequence[float], sigma_max: float = 2.0, hue_max: float = 0.5
    ) -> None:
        super().__init__()
        self.jitter: list[tuple[Operation, int]] = []
        self.jitter += [(_brightness_, Column.BRIGHTNESS), (_contrast_, Column.CONTRAST)]
        self.colour = len(mean) == 3
        if self.colour:
            hue = partial(_hue_, turns=max(1, math.ceil(6 * hue_max)))
            self.jitter += [(_saturation_, Column.SATURATION), (hue, Column.HUE)]
        self.blur = partial(_blur_, sigma_max=sigma_max)
        levels = 255 * rearrange(torch.tensor([mean, std]), "two c -> two c 1 1")
        self.register_buffer("mean", levels[0], persistent=False)
        self.register_buffer("std", levels[1], persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, rows: Tensor) -> Tensor:
        assert images.dtype in (torch.uint8, torch.float32), images.dtype
        assert images.shape[1] == len(self.mean), images.shape
        if images.is_cpu:
            large = images[0].numel() >= _LARGE
            return self._one_by_one(images, rows) if large else self._in_chunks(images, rows)
        x = _apply_(_levels(images), self._jitter_steps(rows) + self._blur_steps(rows))
        return x.sub_(self.mean).div_(self.std)

    def _one_by_one(self, images: Tensor, rows: Tensor) -> Tensor:
        out = torch.empty(images.shape)
        for image, row, tensor, result in zip(images, rows.tolist(), rows, out, strict=True):
            x = _levels(image[None].flip(-1) if row[Column.FLIP] else image[None])
            order = _ORDERS[int(row[Column.ORDER])] if row[Column.JITTER] else ()
            for operation, column in (self.jitter[n] for n in order if n < len(self.jitter)):
                operation(x, row[column])
            if row[Column.GREY] and self.colour:
                _grey_(x, row[Column.GREY])
            if row[Column.SIGMA]:
                self.blur(x, row[Column.SIGMA])
            if row[Column.SOLARISE]:
                _solarise_(x, row[Column.SOLARISE])
            if row[Column.NOISE]:
                _noise_(x, tensor[None, Column.NOISE :])
            torch.div(x[0].sub_(self.mean), self.std, out=result)
        return out

    def _in_chunks(self, images: Tensor, rows: Tensor) -> Tensor:
        """Process similar views together: sorted by the order of their jitter, then by their blur."""
        out = torch.empty(images.shape)
        for index in _chunks(images, rows[:, Column.JITTER] * (1 + rows[:, Column.ORDER])):
            x = _levels(images.index_select(0, index))
            _put_(out, index, _apply_(x, self._jitter_steps(rows[index])))
        for index in _chunks(images, rows[:, Column.SIGMA]):
            x = _apply_(out.index_select(0, index), self._blur_steps(rows[index])).sub_(self.mean)
            for image, row in zip(x, index.tolist(), strict=True):
                torch.div(image, self.std, out=out[row])
        return out

    def _jitter_steps(self, rows: Tensor) -> list[Step]:
        """List the operations up to grey, in order."""
        on, factor = _rows_where_on(rows), rearrange(rows, "n f -> f n 1 1 1")
        orders = [_ORDERS[number] for number in rows[:, Column.ORDER].int().tolist()]
        jitter: list[Step] = [
            (operation, [row for row in on[Column.JITTER] if orders[row][position] == number], factor[column])
            for position in range(4)
            for number, (operation, column) in enumerate(self.jitter)
        ]
        grey: list[Step] = [(_grey_, on[Column.GREY], factor[Column.GREY])] if self.colour else []
        return [(_flip_, on[Column.FLIP], factor[Column.FLIP]), *jitter, *grey]

    def _blur_steps(self, rows: Tensor) -> list[Step]:
        """List the operations from the blur on, in order."""
        on, factor = _rows_where_on(rows), rearrange(rows, "n f -> f n 1 1 1")
        return [
            (self.blur, on[Column.SIGMA], factor[Column.SIGMA]),
            (_solarise_, on[Column.SOLARISE], factor[Column.SOLARISE]),
            (_noise_, on[Column.NOISE], rows[:, Column.NOISE :]),
        ]


def _rows_where_on(rows: Tensor) -> list[list[int]]:
    """Return for each column the rows with a positive value."""
    return [[row for row, value in enumerate(column) if value > 0] for column in rows.T.tolist()]


def _levels(images: Tensor) -> Tensor:
    return images * 255 if images.is_floating_point() else images.float()


def _chunks(images: Tensor, key: Tensor) -> Sequence[Tensor]:
    """Split the indices of images, sorted by key, into chunks."""
    return torch.split(torch.argsort(key, stable=True), max(1, _CHUNK // images[0].numel()))


def _apply_(x: Tensor, steps: list[Step]) -> Tensor:
    """Apply the steps; their factors are on the host, x may be on a device."""
    steps = [step for step in steps if step[1]]
    for (operation, rows, _), (index, factor) in zip(steps, _moved(steps, x.device), strict=True):
        if rows[-1] - rows[0] + 1 == len(rows):  # neighbours are processed in place
            operation(x[rows[0] : rows[-1] + 1], factor)
        else:
            selected = x.index_select(0, index)
            operation(selected, factor)
            _put_(x, index, selected)
    return x


def _moved(steps: list[Step], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the indices and factors of each step on a device, all moved in two copies."""
    index = torch.tensor([row for _, rows, _ in steps for row in rows], dtype=torch.long)
    parts = torch.split(index, [len(rows) for _, rows, _ in steps])
    factors = [factor.index_select(0, part) for (_, _, factor), part in zip(steps, parts, strict=True)]
    flat = torch.cat([torch.empty(0), *map(torch.flatten, factors)]).to(device, non_blocking=True)
    parts = torch.split(index.to(device, non_blocking=True), [len(part) for part in parts])
    for part, one, moved in zip(parts, factors, torch.split(flat, [f.numel() for f in factors]), strict=True):
        yield part, moved.view(one.shape)


def _put_(x: Tensor, index: Tensor, images: Tensor) -> None:
    if not x.is_cpu:
        x.index_copy_(0, index, images)
        return
    for image, row in zip(images, index.tolist(), strict=True):  # twice as fast as index_copy_ on a CPU
        x[row].copy_(image)


def _limit_(x: Tensor, factor: Factor) -> None:
    """Clamp to the levels; a factor of up to 1 cannot have left them."""
    if not isinstance(factor, float) or factor > 1:
        x.clamp_(0, 255)


def _flip_(x: Tensor, _: Factor) -> None:
    x.copy_(x.flip(-1))


def _luma(x: Tensor) -> Tensor:
    red, green, blue = x.chunk(3, dim=1)
    return (red * _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])


def _grey_(x: Tensor, _: Factor) -> None:
    x.copy_(_luma(x).expand_as(x))


def _brightness_(x: Tensor, factor: Factor) -> None:
    _limit_(x.mul_(factor), factor)


def _contrast_(x: Tensor, factor: Factor) -> None:
    """Blend with the mean luma, or with the mean of each channel if the image is not RGB."""
    # A mean over all pixels at once would depend on the number of threads.
    mean = x.mean(-1, keepdim=True).mean(-2, keepdim=True)
    if x.shape[1] == 3:
        mean = _luma(mean)
    _blend_(x, factor, mean)


def _saturation_(x: Tensor, factor: Factor) -> None:
    _blend_(x, factor, _luma(x))


def _blend_(x: Tensor, factor: Factor, grey: Tensor) -> None:
    """Set x to factor · x + (1 − factor) · grey, within the levels."""
    if x.is_cuda:  # in two kernels
        torch.clamp(torch.lerp(grey, x, factor), 0, 255, out=x)
    elif isinstance(factor, float):
        _limit_(torch.add(grey.mul_(1 - factor), x, alpha=factor, out=x), factor)
    else:
        x.mul_(factor).add_(grey.mul_(1 - factor)).clamp_(0, 255)


def _hue_(x: Tensor, turn: Factor, *, turns: int) -> None:
    """Shift the hue of HSV, without a branch per pixel: on a CPU branches cost more than the arithmetic.

    In HSV a channel's value is a trapezoid of the hue: over one turn it stays at the maximum of the three
    channels for a third, falls for a sixth, stays at the minimum for a third, and rises for a sixth.
    Extended beyond the maximum and the minimum, the falling or rising line now has the value 2 x − middle;
    the order of the other two channels tells which line it is. Clamping restores the flat parts. This holds
    for shifts of up to a sixth, so a larger shift takes several `turns`.
    """
    red, green, blue = x.chunk(3, dim=1)
    for _ in range(turns):
        low, high = torch.minimum(red, green), torch.maximum(red, green)
        low, high = torch.minimum(low, blue, out=low), torch.maximum(high, blue, out=high)
        below = (low + high).sub_(red).sub_(green).sub_(blue)  # −middle
        step = (high - low).mul_(turn * (-6 / turns))
        sides = torch.cat([green - blue, blue - red, red - green], dim=1).sign_()
        torch.add(below, x, alpha=2.0, out=x).addcmul_(sides, step)
        torch.clamp(x, low, high, out=x)


def _solarise_(x: Tensor, _: Factor) -> None:
    """Invert values above one half; on 8-bit levels this equals the threshold 128."""
    x.copy_(torch.minimum(x, 255 - x))


def _noise_(x: Tensor, factor: Factor) -> None:
    assert isinstance(factor, Tensor)
    std, high, low = factor.unbind(1)
    add_noise_(x, rearrange(255 * std, "n -> n 1 1 1"), high.long() * 2**24 + low.long())


def _blur_(x: Tensor, sigma: Factor, *, sigma_max: float) -> None:
    """Convolve with a Gaussian, reflected at the borders, as a sum of shifted images."""
    height, width = x.shape[-2:]
    taps = _taps(sigma, sigma_max, min(height, width) - 1)
    radius = len(taps) // 2
    for dim, size, border in ((-2, height, (0, 0, radius, radius)), (-1, width, (radius, radius, 0, 0))):
        padded = F.pad(x, border, mode="reflect")
        torch.mul(padded.narrow(dim, 0, size), taps[0], out=x)
        for shift, tap in enumerate(taps[1:], start=1):
            shifted = padded.narrow(dim, shift, size)
            if isinstance(tap, float):
                x.add_(shifted, alpha=tap)
            else:
                x.addcmul_(shifted, tap)


def _taps(sigma: Factor, sigma_max: float, largest: int) -> Sequence[Factor]:
    """Return the weights of a Gaussian up to a negligible one, or up to the size of the image."""
    if isinstance(sigma, float):
        radius = min(math.floor(sigma * _REACH), largest)
        weights = [math.exp(-0.5 * (distance / sigma) ** 2) for distance in range(-radius, radius + 1)]
        total = sum(weights)
        return [weight / total for weight in weights]
    radius = widest = min(math.floor(sigma_max * _REACH), largest)
    distances = torch.arange(-radius, radius + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (distances / sigma.clamp_min(1e-3)) ** 2)
    kernel = kernel * (kernel >= _NEGLIGIBLE)
    kernel = kernel / kernel.sum(-1, keepdim=True)
    if sigma.is_cpu:  # on a device, reading the largest sigma would wait for it
        radius = min(math.floor(float(sigma.max()) * _REACH), largest)
    return torch.split(kernel.narrow(-1, widest - radius, 2 * radius + 1), 1, dim=-1)

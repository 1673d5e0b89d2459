"""Photometry of a batch of views, each with its own row of parameters, on whatever device the batch is.

Works in float32 on levels from 0 to 255, without rounding between operations (PIL rounds after each of them).
Axes: n images, c channels, h height, w width. A function whose name ends in _ overwrites its first argument;
its factor is a number for all of the images, or a tensor (n, 1, 1, 1).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dino_vit.views.geometry import Column
from dino_vit.views.noise import add_noise_

Factor = float | Tensor
Operation = Callable[[Tensor, Factor], object]
Step = tuple[Operation, Tensor, Tensor]

_ORDERS = torch.tensor(list(permutations(range(4))))
# On a CPU an image of so many values is worked on by itself: operations with plain numbers compute less.
_LARGE = 3 * 128 * 128
# Of smaller ones so many values share a call, as stay in a core's own cache.
_CHUNK = 1 << 18
# A tap of the Gaussian that weighs less than this, beside a centre of 1, is left out.
_NEGLIGIBLE = 1e-3
_REACH = math.sqrt(-2 * math.log(_NEGLIGIBLE))  # in sigmas
_LUMA = (0.2989, 0.587, 0.114)


class Augment(nn.Module):
    """Turn views (n, c, h, w) and their photometric rows (n, `Column`) into normalised float32 views.

    Views are uint8, or float32 from 0 to 1 if they are deeper than 8 bits; any number of channels.

    Rows on the host, as the loader leaves them, are read there: an operation computes only the images it is
    meant for, and an accelerator is never waited for. With rows on the device, and in a compiled module, each
    operation computes all images and masks select: more work, but one graph whose shapes depend on no value.

    Noise comes last, for jitter would scale it and blur wipe it out; it is a function of the row's key and of
    the pixel. Without `noise` the graphs, which cannot see that no row asks for any, leave it out.

    On a CPU an image comes out the same, to the last bit, whatever its batch, the process and the threads.
    """

    mean: Tensor
    std: Tensor
    orders: Tensor

    def __init__(
        self,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        sigma_max: float = 2.0,
        hue_max: float = 0.5,
        noise: bool = True,
    ) -> None:
        super().__init__()
        if len(mean) != len(std) or min(std) <= 0:
            raise ValueError(f"mean and std need one entry per channel and std > 0: got {mean} and {std}.")
        self.jitter: list[tuple[Operation, int]] = [
            (_brightness_, Column.BRIGHTNESS),
            (_contrast_, Column.CONTRAST),
        ]
        self.colour = len(mean) == 3
        if self.colour:
            hue = partial(_hue_, turns=max(1, math.ceil(6 * hue_max)))
            self.jitter += [(_saturation_, Column.SATURATION), (hue, Column.HUE)]
        self.blur = partial(_blur_, sigma_max=sigma_max)
        self.noise = noise
        levels = 255 * rearrange(torch.tensor([mean, std]), "two c -> two c 1 1")
        self.register_buffer("mean", levels[0], persistent=False)
        self.register_buffer("std", levels[1], persistent=False)
        self.register_buffer("orders", _ORDERS, persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, rows: Tensor) -> Tensor:
        deep_or_not = images.dtype in (torch.uint8, torch.float32)
        if not deep_or_not or images.ndim != 4 or images.shape[1] != len(self.mean):
            raise ValueError(
                f"Augment takes uint8 or float32 images (n, {len(self.mean)}, h, w), a channel per entry of "
                f"its mean; got {images.dtype} {tuple(images.shape)}."
            )
        if torch.compiler.is_compiling() or not rows.is_cpu:
            x = _by_masks(_levels(images), self._steps(rows)[: None if self.noise else -1])
        elif not images.is_cpu:
            steps = self._steps(rows)
            x = _by_rows_(_levels(images), steps, _flags(steps))
        elif images[0].numel() < _LARGE:
            return self._in_chunks(images, rows)
        else:
            return self._one_by_one(images, rows)
        return x.sub_(self.mean).div_(self.std)

    def _one_by_one(self, images: Tensor, rows: Tensor) -> Tensor:
        out, orders = torch.empty(images.shape), _ORDERS.tolist()
        for image, own, row, place in zip(images, rows, rows.tolist(), out, strict=True):
            x = _levels(image[None].flip(-1) if row[Column.FLIP] else image[None])
            if row[Column.JITTER]:
                for number in orders[int(row[Column.ORDER])]:
                    if number < len(self.jitter):
                        operation, column = self.jitter[number]
                        operation(x, row[column])
            if row[Column.GREY] and self.colour:
                _grey_(x, row[Column.GREY])
            if row[Column.SIGMA]:
                self.blur(x, row[Column.SIGMA])
            if row[Column.SOLARISE]:
                _solarise_(x, row[Column.SOLARISE])
            if row[Column.NOISE]:
                _noise_(x, _noise_factor(own[None]))
            torch.div(x[0].sub_(self.mean), self.std, out=place)
        return out

    def _in_chunks(self, images: Tensor, rows: Tensor) -> Tensor:
        """Put alike images side by side: by the order of their jitter, from the blur on by its radius."""
        out = torch.empty(images.shape)
        orders, sigmas = rows[:, Column.JITTER] * (1 + rows[:, Column.ORDER]), rows[:, Column.SIGMA]
        for places, steps, flags, start in self._chunks(images, rows, orders):
            x = _levels(images.index_select(0, places))
            _put_(out, places, _by_rows_(x, steps[:-3], flags[:-3], start))
        for places, steps, flags, start in self._chunks(images, rows, sigmas):
            x = _by_rows_(out.index_select(0, places), steps[-3:], flags[-3:], start)
            for image, place in zip(x.sub_(self.mean), places.tolist(), strict=True):
                torch.div(image, self.std, out=out[place])
        return out

    def _chunks(
        self, images: Tensor, rows: Tensor, key: Tensor
    ) -> Iterator[tuple[Tensor, list[Step], list[list[bool]], int]]:
        index = torch.argsort(key, stable=True)
        steps = self._steps(rows[index])
        flags, size = _flags(steps), max(1, _CHUNK // images[0].numel())
        for start in range(0, len(images), size):
            yield index[start : start + size], steps, flags, start

    def _steps(self, rows: Tensor) -> list[Step]:
        """List the operations in order, each with the images (n,) it is for and its factors (n, 1, 1, 1)."""
        on = (rows > 0).unbind(1)
        factor = rearrange(rows, "n f -> f n 1 1 1")
        orders = (_ORDERS if rows.is_cpu else self.orders)[rows[:, Column.ORDER].long()]
        steps: list[Step] = [(_flip_, on[Column.FLIP], factor[Column.FLIP])]
        for position in orders.unbind(1):
            for number, (operation, column) in enumerate(self.jitter):
                steps.append((operation, on[Column.JITTER] & (position == number), factor[column]))
        if self.colour:
            steps.append((_grey_, on[Column.GREY], factor[Column.GREY]))
        steps.append((self.blur, on[Column.SIGMA], factor[Column.SIGMA]))
        steps.append((_solarise_, on[Column.SOLARISE], factor[Column.SOLARISE]))
        steps.append((_noise_, on[Column.NOISE], _noise_factor(rows)))
        return steps


def _levels(images: Tensor) -> Tensor:
    return images * 255 if images.is_floating_point() else images.float()


def _by_masks(x: Tensor, steps: list[Step]) -> Tensor:
    for operation, chosen, factor in steps:
        done = x.clone()
        operation(done, factor)
        x = torch.where(rearrange(chosen, "n -> n 1 1 1"), done, x)
    return x


def _flags(steps: list[Step]) -> list[list[bool]]:
    flags: list[list[bool]] = torch.stack([chosen for _, chosen, _ in steps]).tolist()
    return flags


def _by_rows_(x: Tensor, steps: list[Step], flags: list[list[bool]], start: int = 0) -> Tensor:
    """Apply the steps of the rows from start on; they are on the host, x may be elsewhere."""
    for (operation, _, factor), chosen in zip(steps, flags, strict=True):
        rows = [row for row, flag in enumerate(chosen[start : start + len(x)]) if flag]
        if not rows:
            continue
        first, last = rows[0], rows[-1] + 1
        if last - first == len(rows):
            part = factor[start + first : start + last].to(x.device, non_blocking=True)
            operation(x[first:last], part)
        else:
            index = torch.tensor(rows)
            part = factor[start + index].to(x.device, non_blocking=True)
            index = index.to(x.device, non_blocking=True)
            own = x.index_select(0, index)
            operation(own, part)
            _put_(x, index, own)
    return x


def _put_(x: Tensor, places: Tensor, images: Tensor) -> None:
    if not x.is_cpu:
        x.index_copy_(0, places, images)
        return
    for image, place in zip(images, places.tolist(), strict=True):  # half the time of index_copy_ there
        x[place].copy_(image)


def _scale_and_add_(x: Tensor, factor: Factor, other: Tensor) -> Tensor:
    """Become factor · x + other."""
    if isinstance(factor, float):
        return torch.add(other, x, alpha=factor, out=x)
    return x.mul_(factor).add_(other)


def _limit_(x: Tensor, factor: Factor) -> None:
    """Cut off what is no level; a factor of up to 1 has led to nothing of that kind."""
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
    """Stretch around the mean luma, or around each channel's own mean where there is no luma."""
    # A mean over all that there is would be summed up in as many parts as there are threads.
    mean = x.mean(-1, keepdim=True).mean(-2, keepdim=True)
    if x.shape[1] == 3:
        mean = _luma(mean)
    _limit_(_scale_and_add_(x, factor, mean * (1 - factor)), factor)


def _saturation_(x: Tensor, factor: Factor) -> None:
    _limit_(_scale_and_add_(x, factor, _luma(x).mul_(1 - factor)), factor)


def _hue_(x: Tensor, turn: Factor, *, turns: int) -> None:
    """Turn the hue of HSV, without a choice per pixel: on a CPU choosing costs more than the arithmetic.

    In HSV the value of a channel is a trapezium of the hue: as the hue goes round, it stays at the highest of
    the three for a third of the way, falls for a sixth, stays at the lowest for a third, rises for a sixth.
    On the straight line through its fall, or its rise, it is now at 2 x − middle; the order of the other
    two channels says which line. That is right for up to a sixth, so a farther turn takes several `turns`.
    """
    red, green, blue = x.chunk(3, dim=1)
    for _ in range(turns):
        low, high = torch.minimum(red, green), torch.maximum(red, green)
        low, high = torch.minimum(low, blue, out=low), torch.maximum(high, blue, out=high)
        below = (low + high).sub_(red).sub_(green).sub_(blue)  # −middle
        step = (high - low).mul_(turn * (-6 / turns))
        sides = torch.cat([green - blue, blue - red, red - green], dim=1).sign_()
        _scale_and_add_(x, 2.0, below).addcmul_(sides, step)
        torch.clamp(x, low, high, out=x)


def _solarise_(x: Tensor, _: Factor) -> None:
    """Invert what is brighter than one half: on 8-bit levels the same as the threshold 128."""
    x.copy_(torch.minimum(x, 255 - x))


def _noise_factor(rows: Tensor) -> Tensor:
    return rearrange(rows[:, Column.NOISE :], "n f -> n f 1 1")


def _noise_(x: Tensor, factor: Factor) -> None:
    assert isinstance(factor, Tensor), "noise needs its key"
    std, high, low = factor.unbind(1)
    add_noise_(x, rearrange(255 * std, "n 1 1 -> n 1 1 1"), (high.long() * 2**24 + low.long()).flatten())


def _blur_(x: Tensor, sigma: Factor, *, sigma_max: float) -> None:
    """Convolve with Gaussians, mirrored at the borders, as a sum of shifted images."""
    height, width = x.shape[-2:]
    taps = _taps(sigma, sigma_max, min(height, width) - 1)
    radius = len(taps) // 2
    for dim, size, border in ((-2, height, (0, 0, radius, radius)), (-1, width, (radius, radius, 0, 0))):
        padded = F.pad(x, border, mode="reflect")
        torch.mul(padded.narrow(dim, 0, size), taps[0], out=x)
        for shift, tap in enumerate(taps[1:], start=1):
            _add_scaled_(x, padded.narrow(dim, shift, size), tap)


def _add_scaled_(x: Tensor, other: Tensor, factor: Factor) -> None:
    if isinstance(factor, float):
        x.add_(other, alpha=factor)
    else:
        x.addcmul_(other, factor)


def _taps(sigma: Factor, sigma_max: float, largest: int) -> Sequence[Factor]:
    """Return the weights of a Gaussian, up to a radius that its height or the image ends at."""
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
    if sigma.is_cpu and not torch.compiler.is_compiling():  # where looking costs nothing
        radius = min(math.floor(float(sigma.max()) * _REACH), largest)
    return torch.split(kernel.narrow(-1, widest - radius, 2 * radius + 1), 1, dim=-1)

"""Photometry of a batch of views, each with its own row of parameters, on whatever device the batch is.

Works in float32 on [0, 1] without rounding between operations (PIL rounds to 256 levels after each of them).
Axes: n images, c channels, h height, w width. A function whose name ends in _ overwrites its first argument.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from dino_vit.data.pixels import unit_scale
from dino_vit.views import Column

Operation = Callable[[Tensor, Tensor], Tensor]
Step = tuple[Operation, Tensor, Tensor]

_ORDERS = torch.tensor(list(permutations(range(4))))
# Float32 bytes of the images worked on at a time on the CPU: small enough for a core's own cache.
_CPU_CHUNK = 1 << 20
# A tap of the Gaussian that weighs less than this, beside a centre of 1, is left out.
_NEGLIGIBLE = 1e-3


class Augment(nn.Module):
    """Turn views (n, c, h, w) and their photometric rows (n, `Column`) into normalised float32 views.

    Views are uint8, or float32 from 0 to 1 if they are deeper than 8 bits; any number of channels.

    Rows on the host, as the loader leaves them, are read there: an operation computes only the images it is
    meant for, and an accelerator is never waited for. With rows on the device, and in a compiled module, each
    operation computes all images and masks select: more work, but one graph whose shapes depend on no value.
    """

    mean: Tensor
    std: Tensor
    orders: Tensor

    def __init__(self, *, mean: Sequence[float], std: Sequence[float], sigma_max: float = 2.0) -> None:
        super().__init__()
        if len(mean) != len(std) or min(std) <= 0:
            raise ValueError(f"mean and std need one entry per channel and std > 0: got {mean} and {std}.")
        self.sigma_max = sigma_max
        self.register_buffer("mean", rearrange(torch.tensor(mean), "c -> c 1 1"), persistent=False)
        self.register_buffer("std", rearrange(torch.tensor(std), "c -> c 1 1"), persistent=False)
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
            x = _by_masks(unit_scale(images), self._steps(rows))
        elif images.is_cpu:
            return self._in_cache(images, rows)
        else:
            steps = self._steps(rows)
            x = _by_rows_(unit_scale(images), steps, _flags(steps))
        return x.sub_(self.mean).div_(self.std)

    def _in_cache(self, images: Tensor, rows: Tensor) -> Tensor:
        """Work on few images at a time, alike ones side by side: an operation finds its own in one slice."""
        index = torch.argsort(rows[:, Column.JITTER] * (1 + rows[:, Column.ORDER]), stable=True)
        steps = self._steps(rows[index])
        flags, places = _flags(steps), index.tolist()
        out = torch.empty(images.shape)
        size = max(1, _CPU_CHUNK // (4 * images[0].numel()))
        for start in range(0, len(images), size):
            x = unit_scale(images.index_select(0, index[start : start + size]))
            x = _by_rows_(x, steps, flags, start).sub_(self.mean)
            for image, place in zip(x, places[start : start + size], strict=True):
                torch.div(image, self.std, out=out[place])
        return out

    def _steps(self, rows: Tensor) -> list[Step]:
        """List the operations in order, each with the images (n,) it is for and its factors (n, 1, 1, 1)."""
        on = (rows > 0).unbind(1)
        factor = rearrange(rows, "n f -> f n 1 1 1")
        jitter: list[tuple[Operation, int]] = [
            (_brightness_, Column.BRIGHTNESS),
            (_contrast_, Column.CONTRAST),
        ]
        if len(self.mean) == 3:
            jitter += [(_saturation_, Column.SATURATION), (_hue_, Column.HUE)]
        orders = (_ORDERS if rows.is_cpu else self.orders)[rows[:, Column.ORDER].long()]

        steps: list[Step] = [(_flip_, on[Column.FLIP], factor[Column.FLIP])]
        for position in orders.unbind(1):
            for number, (operation, name) in enumerate(jitter):
                steps.append((operation, on[Column.JITTER] & (position == number), factor[name]))
        if len(self.mean) == 3:
            steps.append((_grey_, on[Column.GREY], factor[Column.GREY]))
        blur = partial(_blur_, sigma_max=self.sigma_max)
        steps.append((blur, on[Column.SIGMA], factor[Column.SIGMA]))
        steps.append((_solarise_, on[Column.SOLARISE], factor[Column.SOLARISE]))
        return steps


def _by_masks(x: Tensor, steps: list[Step]) -> Tensor:
    for operation, chosen, factor in steps:
        x = torch.where(rearrange(chosen, "n -> n 1 1 1"), operation(x.clone(), factor), x)
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
            x.index_copy_(0, index, operation(x.index_select(0, index), part))
    return x


def _flip_(x: Tensor, _: Tensor) -> Tensor:
    return x.copy_(x.flip(-1))


def _luma(x: Tensor) -> Tensor:
    red, green, blue = torch.split(x, 1, dim=1)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def _grey_(x: Tensor, _: Tensor) -> Tensor:
    return x.copy_(_luma(x).expand_as(x))


def _brightness_(x: Tensor, factor: Tensor) -> Tensor:
    return x.mul_(factor).clamp_(0, 1)


def _contrast_(x: Tensor, factor: Tensor) -> Tensor:
    """Stretch around the mean luma, or around each channel's own mean where there is no luma."""
    mean = x.mean(dim=(-2, -1), keepdim=True)
    if x.shape[1] == 3:
        mean = _luma(mean)
    return x.mul_(factor).add_(mean * (1 - factor)).clamp_(0, 1)


def _saturation_(x: Tensor, factor: Tensor) -> Tensor:
    grey = _luma(x).mul_(1 - factor)
    return torch.addcmul(grey, x, factor, out=x).clamp_(0, 1)


def _hue_(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue of HSV, without a choice per pixel: on a CPU choosing costs more than the arithmetic.

    Let the channels of a pixel be scaled to run from 0 to 1. Its angle from green is 1 + b + r − g sixths
    of a turn, towards blue where b > r, and a channel is a trapezium of the angle from its place (−2, 0, 2).
    """
    red, green, blue = torch.split(x, 1, dim=1)
    low = torch.minimum(red, green).minimum(blue)
    chroma = torch.maximum(red, green).maximum(blue).sub_(low)
    angle = (blue + red).sub_(green).sub_(low).div_(chroma.clamp_min(1e-12)).add_(1).copysign_(blue - red)
    angle.add_(turn, alpha=6)
    angle.sub_((angle / 6).round_(), alpha=6)  # to [−3, 3]
    places = rearrange(torch.arange(-2, 3, 2, device=x.device), "c -> c 1 1")
    torch.sub(angle, places, out=x).abs_().sub_(3).abs_().sub_(1).clamp_(0, 1)
    return torch.addcmul(low, x, chroma, out=x)


def _solarise_(x: Tensor, _: Tensor) -> Tensor:
    """Invert what is brighter than one half: on 8-bit levels the same as the threshold 128."""
    return x.copy_(torch.minimum(x, 1 - x))


def _blur_(x: Tensor, sigma: Tensor, *, sigma_max: float) -> Tensor:
    """Convolve with Gaussians, mirrored at the borders, as a sum of shifted images."""
    if x.is_cpu and not torch.compiler.is_compiling():
        sigma_max = float(sigma.max())  # fewer taps, where looking costs nothing
    height, width = x.shape[-2:]
    radius = min(math.floor(sigma_max * math.sqrt(-2 * math.log(_NEGLIGIBLE))), height - 1, width - 1)
    distance = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.exp(-0.5 * (distance / sigma.clamp_min(1e-3)) ** 2)
    kernel = kernel * (kernel >= _NEGLIGIBLE)  # so that a kernel does not depend on its batch's radius
    taps = torch.split(kernel / kernel.sum(-1, keepdim=True), 1, dim=-1)
    padded = F.pad(x, (0, 0, radius, radius), mode="reflect")
    torch.mul(padded[..., :height, :], taps[0], out=x)
    for shift, tap in enumerate(taps[1:], start=1):
        x.addcmul_(padded[..., shift : shift + height, :], tap)
    padded = F.pad(x, (radius, radius, 0, 0), mode="reflect")
    torch.mul(padded[..., :width], taps[0], out=x)
    for shift, tap in enumerate(taps[1:], start=1):
        x.addcmul_(padded[..., shift : shift + width], tap)
    return x

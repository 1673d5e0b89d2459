"""Augmentation of views: flips, rotation, colour jitter, grey, blur, solarisation, normalisation.

`draw_augment` draws a row of parameters for each view; `Augment` applies the rows to a batch on any
device, in float32 on levels from 0 to 255, without rounding between operations (PIL rounds after each).

Axes: n images, c channels, h height, w width. An operation takes images and their parameters (k, n, 1, 1, 1),
and overwrites the images. All but the blur has one path for all devices: on a CPU 1 % of a ViT-S/16's step.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import permutations
from typing import Any

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
Step = tuple[Operation, NDArray[np.int64], NDArray[np.float32]]  # indices (m,) of images, parameters (k, m)

# Brightness, contrast and saturation blend an image with a grey, so images of any order of the four jitter
# operations pass these six steps: a step blends, or shifts the hue (True).
JITTERS = (False, True, False, False, True, False)
_NEGLIGIBLE = 1e-3  # taps of the Gaussian below this weight are left out; the centre has weight 1
_REACH = math.sqrt(-2 * math.log(_NEGLIGIBLE))  # in sigmas
_LUMA = (0.2989, 0.587, 0.114)
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE, _NOTHING = range(5)


def _in_steps(order: Sequence[int]) -> list[int]:
    """Return the operation of each step of `JITTERS` for an order of the four."""
    operations, step = [_NOTHING] * len(JITTERS), -1
    for number in order:
        step = JITTERS.index(number == _HUE, step + 1)
        operations[step] = number
    return operations


_IN_STEPS = np.array([_in_steps(order) for order in permutations(range(4))])


@dataclass(frozen=True, kw_only=True)
class ViewAugment:
    """The probability and strength of each operation for one view; everything is off by default."""

    flip: float = 0.0
    vertical_flip: float = 0.0
    rotation: float = 0.0  # up to this many degrees either way
    turn: float = 0.0  # or a multiple of 90 or 180 degrees
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
    VERTICAL_FLIP = 10
    ROTATION = 11  # in degrees, counter-clockwise


def draw_augment(
    views: Sequence[ViewAugment], *, seed: int, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Draw the rows of parameters of every view of every sample: (samples, views, columns)."""
    keys = (epoch, samples[:, None, None], np.arange(len(views))[:, None])
    u = np.moveaxis(random_uniform(seed, RngPurpose.AUGMENT, *keys, np.arange(13)), -1, 0)

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
    rows[..., Column.VERTICAL_FLIP] = u[11] < setting("vertical_flip")
    turn, angle = setting("turn"), (2 * u[12] - 1) * setting("rotation")
    rows[..., Column.ROTATION] = angle + turn * np.floor(u[12] * 360 / np.maximum(turn, 1))
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
        self.sigma_max, self.colour = sigma_max, len(mean) == 3
        self.hue = partial(_hue_, turns=max(1, math.ceil(6 * hue_max)))
        levels = 255 * rearrange(torch.tensor([mean, std]), "two c -> two c 1 1")
        self.register_buffer("mean", levels[0], persistent=False)
        self.register_buffer("std", levels[1], persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, rows: Tensor) -> Tensor:
        assert images.dtype in (torch.uint8, torch.float32), images.dtype
        assert images.shape[1] == len(self.mean), images.shape
        x = images * 255 if images.is_floating_point() else images.float()
        if steps := [step for step in self._steps(rows.numpy(), *x.shape[-2:]) if len(step[1])]:
            # The indices of all steps move to the device in one copy, their parameters in another.
            operations, chosen, numbers = zip(*steps, strict=True)
            indices = _on_device(chosen, x.device)
            parameters = _on_device([own.ravel() for own in numbers], x.device)
            for operation, index, own in zip(operations, indices, parameters, strict=True):
                own = own.view(-1, len(index), 1, 1, 1)
                if len(index) == len(x):
                    operation(x, own)
                else:
                    selected = x.index_select(0, index)
                    operation(selected, own)
                    x.index_copy_(0, index, selected)
        return x.sub_(self.mean).div_(self.std)

    def _steps(self, rows: NDArray[np.float32], height: int, width: int) -> Iterator[Step]:
        """Yield the operations in order, each with the images that it applies to and its parameters."""
        on = rows.T > 0
        yield _step(partial(_flip_, dim=-1), on[Column.FLIP])
        yield _step(partial(_flip_, dim=-2), on[Column.VERTICAL_FLIP])
        angle, turn = rows[:, Column.ROTATION] % 360, 90 if height == width else 180
        for exact in range(turn, 360, turn):
            yield _step(partial(_turn_, quarters=exact // 90), angle == exact)
        radians = np.radians(angle, dtype=np.float64)
        yield _step(_rotate_, angle % turn != 0, np.cos(radians), np.sin(radians))
        yield from self._jitters(rows)
        if self.colour:
            yield _step(_grey_, on[Column.GREY])
        blurred, reach = on[Column.SIGMA], min(height, width) - 1
        yield _blur_, blurred.nonzero()[0], _gaussian(rows[blurred, Column.SIGMA], self.sigma_max, reach)
        yield _step(_solarise_, on[Column.SOLARISE])

    def _jitters(self, rows: NDArray[np.float32]) -> Iterator[Step]:
        in_steps = _IN_STEPS[rows[:, Column.ORDER].astype(int)]
        in_steps[rows[:, Column.JITTER] <= 0] = _NOTHING
        if not self.colour:
            in_steps[in_steps >= _SATURATION] = _NOTHING
        factors = rows[:, Column.BRIGHTNESS : Column.HUE].T
        for number, is_hue in zip(in_steps.T, JITTERS, strict=True):
            if is_hue:
                yield _step(self.hue, number == _HUE, rows[:, Column.HUE])
            elif (number < _NOTHING).any():  # a blend of other images changes nothing
                factor = np.select([number == kind for kind in range(_HUE)], list(factors), 1.0)
                greys = [(1 - factor) * (number == kind) for kind in (_SATURATION, _CONTRAST)]
                yield _step(_blend_, np.ones(len(rows), bool), factor, *greys)


def _step(operation: Operation, images: NDArray[np.bool_], *own: NDArray[np.float32]) -> Step:
    return operation, images.nonzero()[0], np.array([values[images] for values in own], np.float32)


def _on_device(parts: Sequence[NDArray[Any]], device: torch.device) -> Sequence[Tensor]:
    """Move arrays to a device in one copy."""
    joined = torch.from_numpy(np.concatenate(parts))
    return torch.split(to_device(joined, device), [len(part) for part in parts])


class CustomAugment(nn.Module):
    """Stand in for `Augment`: change views (n, C, h, w) from 0 to 1 by a module, then normalise them.

    torch is seeded for each batch by the seed, the epoch and the samples; other generators are not.
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
        # A row is a function of (seed, epoch, sample, view), and its order of jitters is always drawn. The
        # columns after SOLARISE are left out: the digest does not depend on how many there are.
        digest = hashlib.sha256(rows.numpy()[:, : Column.VERTICAL_FLIP].tobytes()).digest()
        with torch.random.fork_rng([images.device] if images.is_cuda else []):
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            changed = self.module(unit_scale(images))
        if not isinstance(changed, Tensor) or changed.shape != images.shape:
            returned = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(f"augment.module returned {returned} for views {tuple(images.shape)}")
        return (changed.float() - self.mean) / self.std


def _flip_(x: Tensor, _: Tensor, *, dim: int) -> None:
    x.copy_(x.flip(dim))


def _turn_(x: Tensor, _: Tensor, *, quarters: int) -> None:
    x.copy_(x.rot90(quarters, (-2, -1)))


def _rotate_(x: Tensor, own: Tensor) -> None:
    """Rotate counter-clockwise about the centre, bilinear; beyond its borders the image is mirrored."""
    (height, width), (cos, sin) = x.shape[-2:], own.squeeze(2).unbind()
    down = torch.arange(height, device=x.device)[:, None] - (height - 1) / 2
    right = torch.arange(width, device=x.device) - (width - 1) / 2
    # Rotated in pixels, and then divided by half the sides: a view that is not square is not sheared.
    grid = torch.stack([(cos * right - sin * down) / width, (sin * right + cos * down) / height], dim=-1)
    x.copy_(F.grid_sample(x, 2 * grid, mode="bilinear", padding_mode="reflection", align_corners=False))


def _luma(x: Tensor) -> Tensor:
    red, green, blue = x.chunk(3, dim=1)
    return (red * _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])


def _grey_(x: Tensor, _: Tensor) -> None:
    x.copy_(_luma(x).expand_as(x))


def _blend_(x: Tensor, own: Tensor) -> None:
    """Set x to factor · x + pixel_weight · grey + mean_weight · mean, within the levels.

    The grey is the luma of each pixel, or the pixel itself if the image is not RGB.
    """
    factor, pixel_weight, mean_weight = own.unbind()
    grey = _luma(x) if x.shape[1] == 3 else x.clone()
    # A mean over all pixels at once would depend on the number of threads.
    mean = grey.mean(-1, keepdim=True).mean(-2, keepdim=True)
    grey.mul_(pixel_weight).addcmul_(mean, mean_weight)
    torch.addcmul(grey, x, factor, out=x).clamp_(0, 255)


def _hue_(x: Tensor, own: Tensor, *, turns: int) -> None:
    """Shift the hue of HSV, without a branch per pixel, which would cost more than the arithmetic.

    In HSV a channel's value is a trapezoid of the hue: over one turn it stays at the maximum of the three
    channels for a third, falls for a sixth, stays at the minimum for a third, and rises for a sixth.
    Extended beyond the maximum and the minimum, the falling or rising line now has the value 2 x − middle;
    the order of the other two channels tells which line it is. Clamping restores the flat parts. This holds
    for shifts of up to a sixth, so a larger shift takes several `turns`.
    """
    shift = own[0] * (-6 / turns)
    for _ in range(turns):
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        below = (low + high).sub_(x.sum(1, keepdim=True))  # −middle
        step = (high - low).mul_(shift)
        sides = x.roll(-1, 1).sub_(x.roll(1, 1)).sign_()  # green − blue, blue − red, red − green
        torch.add(below, x, alpha=2.0, out=x).addcmul_(sides, step)
        torch.clamp(x, low, high, out=x)


def _blur_(x: Tensor, taps: Tensor) -> None:
    """Convolve with a Gaussian, reflected at the borders.

    On a CPU it is a sum of shifted images, whose result does not depend on the number of threads, elsewhere
    two products with a matrix for each image. For 64 images the products read and write 0.4 GB, a depthwise
    convolution 0.7 GB, shifted sums 6.5 GB. Compiled shifted sums took 3.1 of the 34 ms of a step on an H200;
    products should take 0.3 to 0.7 ms (estimated from bytes and operations, not measured).
    """
    if x.device.type == "cpu":
        _blur_by_shifts_(x, taps)
    else:
        _blur_by_products_(x, taps)


def _blur_by_products_(x: Tensor, taps: Tensor) -> None:
    height, width = x.shape[-2:]
    columns = _blur_matrices(taps, height)
    rows = columns if width == height else _blur_matrices(taps, width)
    blurred = (x.flatten(1, 2) @ rows.mT).view_as(x)
    for channel in range(x.shape[1]):  # broadcast over channels, the matrices would be copied for each
        torch.bmm(columns, blurred[:, channel], out=x[:, channel])


def _blur_matrices(taps: Tensor, size: int) -> Tensor:
    """Return the matrices (n, size, size) that blur a column of `size` pixels."""
    radius = len(taps) // 2
    identity = torch.eye(size, device=taps.device)[None]
    reflected = F.pad(identity, (0, 0, radius, radius), mode="reflect")[0]
    return torch.einsum("tn,ijt->nij", taps.flatten(1), reflected.unfold(0, len(taps), 1))


def _blur_by_shifts_(x: Tensor, taps: Tensor) -> None:
    (height, width), radius = x.shape[-2:], len(taps) // 2
    first, *others = taps.unbind()
    for dim, size, border in ((-2, height, (0, 0, radius, radius)), (-1, width, (radius, radius, 0, 0))):
        padded = F.pad(x, border, mode="reflect")
        torch.mul(padded.narrow(dim, 0, size), first, out=x)
        for shift, tap in enumerate(others, start=1):
            x.addcmul_(padded.narrow(dim, shift, size), tap)


def _gaussian(sigma: NDArray[np.float32], sigma_max: float, largest: int) -> NDArray[np.float32]:
    """Return the weights (taps, n) of Gaussians, up to a negligible one or the size of the image."""
    radius = min(math.floor(sigma_max * _REACH), largest)
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1)[:, None] / sigma) ** 2)
    kernel *= kernel >= _NEGLIGIBLE
    return (kernel / kernel.sum(0)).astype(np.float32)


def _solarise_(x: Tensor, _: Tensor) -> None:
    """Invert values above one half; on 8-bit levels this equals the threshold 128."""
    torch.minimum(x, 255 - x, out=x)

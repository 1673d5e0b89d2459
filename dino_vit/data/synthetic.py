"""Textures made on the fly: the set that the demo and the tests learn from.

A class is a grey pattern: what all views of an image share and photometry does not hide. Rotation, phase,
scale, aspect, warp, contrast, polarity, shading and noise are free, so that the pixels alone say little.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.randomness import Stream, random_bits, random_uniform

Plane = NDArray[np.floating[Any]]
Pattern = Callable[[Plane, Plane, list[float]], Plane]


class SyntheticSource:
    """A labelled set of any length; image `index` is a function of (seed, index)."""

    def __init__(self, *, length: int = 20_000, size: int = 32, seed: int = 0) -> None:
        if length < 1 or not 16 <= size <= 512:
            raise ValueError(
                f"A synthetic set needs a length of 1 or more and a size of 16 to 512 pixels; "
                f"got length {length}, size {size}."
            )
        self.length, self.size, self.seed = length, size, seed
        axis = np.linspace(-1, 1, size, dtype=np.float32)
        self._y, self._x = axis[:, None], axis[None, :]

    def __len__(self) -> int:
        return self.length

    def read(self, index: int) -> Tensor:
        index = range(self.length)[index]
        u = random_uniform(self.seed, Stream.SYNTHETIC, index, 0, np.arange(32)).tolist()
        pattern = PATTERNS[index % len(PATTERNS)](*self._coordinates(u[:10]), u[16:])
        contrast = (0.35 + 0.65 * u[10]) * (1 if u[11] < 0.5 else -1)
        towards, slope = 2 * math.pi * u[12], 0.8 * u[13]
        shading = 0.8 * (u[14] - 0.5) + slope * (math.cos(towards) * self._x + math.sin(towards) * self._y)
        noise = (0.05 + 0.25 * u[15]) * self._noise(index)
        grey = 127.5 + 127.5 * np.tanh(0.8 * (contrast * pattern + shading) + noise)
        plane = torch.from_numpy(np.rint(grey).astype(np.uint8))
        return plane.expand(3, -1, -1).contiguous()

    def label(self, index: int) -> int | None:
        return range(self.length)[index] % len(PATTERNS)

    def name(self, index: int) -> str:
        index = range(self.length)[index]
        return f"{self.classes[index % len(PATTERNS)]}/{index:08d}"

    @property
    def classes(self) -> list[str]:
        return [pattern.__name__.strip("_") for pattern in PATTERNS]

    @property
    def fingerprint(self) -> str:
        return f"synthetic-{self.length}-{self.size}-{self.seed}"

    def _coordinates(self, u: list[float]) -> tuple[Plane, Plane]:
        """Return warped, turned, stretched, shifted coordinates in which patterns have periods near 1."""
        bend = 0.2 * u[0]
        x = self._x + bend * np.sin(3 * self._y + 2 * math.pi * u[1])
        y = self._y + bend * np.sin(3 * self._x + 2 * math.pi * u[2])
        turn, periods, stretch = 2 * math.pi * u[3], 1.6 * 2.0 ** u[4], 1.3 ** (u[5] - 0.5)
        cos, sin = periods * math.cos(turn), periods * math.sin(turn)
        return stretch * (cos * x - sin * y) + 7 * u[6], (sin * x + cos * y) / stretch + 7 * u[7]

    def _noise(self, index: int) -> Plane:
        """Return noise of mean 0 and variance 1: the sum of four random bytes for each pixel."""
        words = random_bits(self.seed, Stream.SYNTHETIC, index, 1, np.arange((self.size**2 + 1) // 2))
        levels = words.astype("<u8", copy=False).view(np.uint8)[: 4 * self.size**2]
        total = rearrange(levels, "(h w four) -> h w four", h=self.size, four=4).sum(-1, dtype=np.float32)
        noise: Plane = (total - 510) / math.sqrt(4 * (256**2 - 1) / 12)
        return noise


def _wave(t: Plane) -> Plane:
    wave: Plane = np.sin(2 * np.pi * t)
    return wave


def _cell(t: Plane) -> Plane:
    """Return the distance to the middle of its unit cell, from −1/2 to 1/2."""
    distance: Plane = t - np.floor(t) - 0.5
    return distance


def _inside(distance: Plane) -> Plane:
    """Return 1 where a distance is negative and −1 where it is positive, with a soft edge."""
    return np.tanh(-12 * distance)


def _stripes(x: Plane, y: Plane, u: list[float]) -> Plane:
    return _wave(x)


def _zigzag(x: Plane, y: Plane, u: list[float]) -> Plane:
    return _wave(x + 1.1 * np.abs(_cell(0.8 * y)))


def _checkers(x: Plane, y: Plane, u: list[float]) -> Plane:
    return np.tanh(4 * _wave(0.6 * x) * _wave(0.6 * y))


def _dots(x: Plane, y: Plane, u: list[float]) -> Plane:
    return _inside(np.hypot(_cell(x), _cell(y)) - 0.27)


def _net(x: Plane, y: Plane, u: list[float]) -> Plane:
    return _inside(np.minimum(np.abs(_cell(0.9 * x)), np.abs(_cell(0.9 * y))) - 0.09)


def _bricks(x: Plane, y: Plane, u: list[float]) -> Plane:
    bed, head = np.abs(_cell(1.3 * y + 0.5)) / 1.3, np.abs(_cell(0.65 * x + 0.5 * np.floor(1.3 * y))) / 0.65
    return _inside(np.minimum(bed, head) - 0.08)


def _basket(x: Plane, y: Plane, u: list[float]) -> Plane:
    return _wave(1.6 * np.where(_wave(0.4 * x) * _wave(0.4 * y) > 0, x, y))


def _targets(x: Plane, y: Plane, u: list[float]) -> Plane:
    return _wave(2.8 * np.hypot(_cell(0.55 * x), _cell(0.55 * y)))


def _scales(x: Plane, y: Plane, u: list[float]) -> Plane:
    arch = np.abs(np.cos(np.pi * (0.8 * x + 0.5 * np.floor(1.2 * y))))
    return np.tanh(3 * _wave(1.2 * y + 0.8 * arch))


def _labyrinth(x: Plane, y: Plane, u: list[float]) -> Plane:
    turns = [math.pi * (k + u[k]) / 6 for k in range(6)]
    waves = [_wave(math.cos(turn) * x + math.sin(turn) * y + u[6 + k]) for k, turn in enumerate(turns)]
    return np.asarray(np.tanh(1.2 * np.sum(waves, axis=0)))


PATTERNS: tuple[Pattern, ...] = (
    _stripes,
    _zigzag,
    _checkers,
    _dots,
    _net,
    _bricks,
    _basket,
    _targets,
    _scales,
    _labyrinth,
)

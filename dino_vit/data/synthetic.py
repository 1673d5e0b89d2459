"""Textures made on the fly: the images that the demo and the tests learn from.

A texture is a quilt: pieces of one pattern, which is its class. Each piece turns, scales, shifts, inverts and
shades the pattern by itself, the whole is bent and noisy. So the class is what all views of an image share,
and nothing else is: what is free from image to image but the same all over one (its brightness, its contrast)
is what DINO would learn in the class's place, and in the minutes of a demo nothing but that.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform
from dino_vit.data.image_set import ImageSet
from dino_vit.data.labels import Labels
from dino_vit.data.stores.calls import Calls

Plane = NDArray[np.floating[Any]]

VERSION = 2  # of the pictures: a run does not go on with others
PIECES = 4, 6  # of a quilt, at least and at most
PERIODS = 2.2, 3.4  # of a pattern in half an image, at least and at most


class Textures:
    """Textures and their labels; the texture of a row is a function of (seed, row)."""

    def __init__(self, length: int, size: int, seed: int) -> None:
        if not 1 <= length <= 10**9 or not 16 <= size <= 512:
            raise ValueError(
                f"a synthetic set has 1 to a billion images of 16 to 512 pixels, not {length} of {size}"
            )
        self.size, self.seed, self.classes = size, seed, list(PATTERNS)
        axis = np.linspace(-1, 1, size, dtype=np.float32)
        self._y, self._x = axis[:, None], axis[None, :]

    def read(self, row: int) -> Tensor:
        draws = random_uniform(self.seed, RngPurpose.SYNTHETIC, row, 0, np.arange(18 + 8 * PIECES[1]))
        u, piece_draws = draws[:18].tolist(), rearrange(draws[18:].astype(np.float32), "(u n) -> u n", u=8)
        pieces = PIECES[0] + math.floor((PIECES[1] - PIECES[0] + 1) * u[0])
        x, y, tone, polarity = _in_pieces(*self._bent(u[1], u[2]), piece_draws[:, :pieces])
        pattern = PATTERNS[self.classes[row % len(PATTERNS)]](x, y, u[4:])
        # No class is brighter or has more contrast than another.
        pattern = polarity * (pattern - pattern.mean()) / pattern.std()
        noise = (0.05 + 0.07 * u[3]) * self._noise(row)
        grey = 127.5 + 127.5 * np.tanh(0.65 * pattern + tone + noise)
        plane = torch.from_numpy(np.rint(grey).astype(np.uint8))
        return plane.expand(3, -1, -1).contiguous()

    def codes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the classes of some rows."""
        return rows % len(PATTERNS)

    def name(self, row: int) -> str:
        return f"{self.classes[row % len(PATTERNS)]}/{row:08d}"

    def _bent(self, u: float, v: float) -> tuple[Plane, Plane]:
        """Return coordinates whose straight lines are waves."""
        x = self._x + 0.16 * np.sin(3 * self._y + np.float32(2 * math.pi * u))
        y = self._y + 0.16 * np.sin(3 * self._x + np.float32(2 * math.pi * v))
        return x, y

    def _noise(self, row: int) -> Plane:
        """Return noise of mean 0 and variance 1: the sum of four random bytes for each pixel."""
        words = random_bits(self.seed, RngPurpose.SYNTHETIC, row, 1, np.arange((self.size**2 + 1) // 2))
        levels = words.astype("<u8", copy=False).view(np.uint8)[: 4 * self.size**2]
        total = rearrange(levels, "(h w four) -> h w four", h=self.size, four=4).sum(-1, dtype=np.float32)
        return (total - 510) / math.sqrt(4 * (256**2 - 1) / 12)


def make_textures(*, length: int = 20_000, size: int = 32, seed: int = 0) -> ImageSet:
    """Return a labelled set of textures of any length."""
    textures, fingerprint = Textures(length, size, seed), f"synthetic-{VERSION}-{length}-{size}-{seed}"
    return ImageSet(
        store=Calls(textures.read, fingerprint),
        rows=range(length),
        names=textures.name,
        labels=Labels(textures.codes, tuple(textures.classes)),
        fingerprint=fingerprint,
        stamp="",
    )


def _in_pieces(x: Plane, y: Plane, u: Plane) -> tuple[Plane, Plane, Plane, Plane]:
    """Return coordinates in which patterns have periods near 1, tone and polarity, piece by piece."""
    left, top, tone = 2 * u[:3, :, None, None] - 1
    piece = ((x - left) ** 2 + (y - top) ** 2).argmin(0)  # the one whose middle is nearest
    turn = 2 * math.pi * u[3]
    periods = PERIODS[0] * (PERIODS[1] / PERIODS[0]) ** u[4]
    cos, sin = (periods * np.cos(turn))[piece], (periods * np.sin(turn))[piece]
    across, along = 7 * u[5:7]
    polarity = np.where(u[7] < 0.5, np.float32(-1), np.float32(1))
    x, y = cos * x - sin * y + across[piece], sin * x + cos * y + along[piece]
    return x, y, 0.3 * tone.ravel()[piece], polarity[piece]


def _wave(t: Plane) -> Plane:
    return np.sin(np.float32(2 * np.pi) * t)


def _cell(t: Plane) -> Plane:
    """Return the distance to the middle of its unit cell, from −1/2 to 1/2."""
    return t - np.floor(t) - 0.5


def _inside(distance: Plane) -> Plane:
    """Return 1 where a distance is negative and −1 where it is positive, with a soft edge."""
    return np.tanh(-10 * distance)


def _from_middle(x: Plane, y: Plane) -> Plane:
    """Return the distance to the nearest point of a triangular lattice of spacing 1."""
    first = np.hypot(_cell(x), math.sqrt(3) * _cell(y / math.sqrt(3)))
    second = np.hypot(_cell(x + 0.5), math.sqrt(3) * _cell(y / math.sqrt(3) + 0.5))
    return np.minimum(first, second)


def _bricks(x: Plane, y: Plane, u: list[float]) -> Plane:
    bed, head = np.abs(_cell(1.2 * y + 0.5)) / 1.2, np.abs(_cell(0.6 * x + 0.5 * np.floor(1.2 * y))) / 0.6
    return _inside(np.minimum(bed, head) - 0.1)


def _crosses(x: Plane, y: Plane, u: list[float]) -> Plane:
    across, along = np.abs(_cell(0.62 * x)) / 0.62, np.abs(_cell(0.62 * y)) / 0.62
    return _inside(np.maximum(np.minimum(across, along) - 0.16, np.maximum(across, along) - 0.6))


def _labyrinth(x: Plane, y: Plane, u: list[float]) -> Plane:
    turns = [math.pi * (k + u[k]) / 7 for k in range(7)]
    waves = [_wave(math.cos(turn) * x + math.sin(turn) * y + u[7 + k]) for k, turn in enumerate(turns)]
    return np.asarray(np.tanh(1.2 * np.sum(waves, axis=0)))


# By class. `u` are uniform random numbers of the image.
PATTERNS: dict[str, Callable[[Plane, Plane, list[float]], Plane]] = {
    "stripes": lambda x, y, u: _wave(x),
    "zigzag": lambda x, y, u: _wave(x + 1.2 * np.abs(_cell(0.7 * y))),
    "checkers": lambda x, y, u: np.tanh(4 * _wave(0.55 * x) * _wave(0.55 * y)),
    "dots": lambda x, y, u: _inside(_from_middle(x, y) - 0.28),
    "rings": lambda x, y, u: _inside(np.abs(_from_middle(0.62 * x, 0.62 * y) - 0.33) - 0.13),
    "bricks": _bricks,
    "basket": lambda x, y, u: _wave(1.5 * np.where(_wave(0.36 * x) * _wave(0.36 * y) > 0, x, y)),
    "crosses": _crosses,
    "net": lambda x, y, u: _inside(np.minimum(np.abs(_cell(0.8 * x)), np.abs(_cell(0.8 * y))) / 0.8 - 0.13),
    "labyrinth": _labyrinth,
}

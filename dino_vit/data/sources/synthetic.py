"""Textures and scenes made on the fly: the sets that the demo and the tests learn from.

A texture is a quilt: pieces of one pattern, which is its class. Each piece turns, scales, shifts, inverts and
shades the pattern by itself, the whole is bent and noisy. So the class is what all views of an image share,
and nothing else is: what is free from image to image but the same all over one (its brightness, its contrast)
is what DINO would learn in the class's place, and in the minutes of a demo nothing but that.

A scene has two to five regions of free shape with soft borders, each of another class with a turn, a scale
and colours of its own, and a mask. A class is a pattern and a hue that it often shows, as grass has, but only
its pattern tells for certain; of more than ten classes some share a pattern, and their hues are closer to
those of their class. Dense features are judged by whether they find the class of each patch.
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
from dino_vit.data.image_set import ImageSet, Store

Plane = NDArray[np.floating[Any]]

VERSION = 2  # of the pictures: a run does not go on with others
PIECES = 4, 6  # of a quilt, at least and at most
PERIODS = 2.2, 3.4  # of a pattern in half an image, at least and at most
SCENES_VERSION = 2
REGIONS = 2, 5  # of a scene, at least and at most
MOST_CLASSES = 255  # the last value of a mask is none
WAVES = 4  # that bend the border of a region
BORDER = 1.5  # pixels in which one region turns into the next, about
PERIOD_SIZE = 32  # pixels of a scene in which patterns have the periods of textures
NUMBERS = 25  # that a region is drawn from


class _Textures(Store):
    """Textures; that of a row is a function of (seed, row)."""

    def __init__(self, length: int, size: int, seed: int) -> None:
        if not 1 <= length <= 10**9 or not 16 <= size <= 512:
            raise ValueError(
                f"a synthetic set has 1 to a billion images of 16 to 512 pixels, not {length} of {size}"
            )
        self.size, self.seed = size, seed
        self.classes, self.key = list(PATTERNS), f"synthetic-{VERSION}-{length}-{size}-{seed}"
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

    def label(self, row: int) -> int:
        return row % len(PATTERNS)

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


class _Scenes(_Textures):
    """Scenes with masks; image and mask of a row are functions of (seed, row)."""

    def __init__(self, length: int, size: int, seed: int, classes: int) -> None:
        super().__init__(length, size, seed)
        if not 2 <= classes <= MOST_CLASSES:
            raise ValueError(f"scenes have 2 to {MOST_CLASSES} classes, not {classes}")
        names = list(PATTERNS)
        self.classes = [f"{names[i % 10]} {1 + i // 10}" if i >= 10 else names[i] for i in range(classes)]
        unusual = f"-{classes}" if classes != len(PATTERNS) else ""
        self.key = f"scenes-{SCENES_VERSION}-{length}-{size}-{seed}{unusual}"

    def read(self, row: int) -> Tensor:
        classes, covers = self._regions(row)
        number, scene = len(self.classes), np.zeros((3, self.size, self.size), np.float32)
        patterns, spread = list(PATTERNS.values()), 0.35 / math.ceil(number / len(PATTERNS))
        for region, (kind, cover) in enumerate(zip(classes, covers, strict=True)):
            u = self._draw(row, 2 + region, NUMBERS)
            pattern = patterns[kind % len(patterns)](*self._coordinates(u), u[11:].tolist())
            pattern = ((pattern - pattern.mean()) / pattern.std()).astype(np.float32)
            hue = 2 * math.pi * (kind / number + np.arange(3) / 3)  # of red, green and blue
            colours = np.stack([0.4 * np.cos(hue) + spread * (2 * u[5:8] - 1), 0.4 + 0.25 * u[8:11]])
            tone, contrast = colours.astype(np.float32)[..., None, None]
            scene += cover * (tone + (contrast if u[4] < 0.5 else -contrast) * pattern)
        noise = (0.05 + 0.07 * self._draw(row, 1, 1)[0]) * self._noise(row)
        levels = 127.5 + 127.5 * np.tanh(scene + noise, dtype=np.float32)
        return torch.from_numpy(np.rint(levels).astype(np.uint8))

    def mask(self, row: int) -> Tensor:
        """Return the class of every pixel, uint8 (H, W)."""
        classes, covers = self._regions(row)
        return torch.from_numpy(classes[covers.argmax(0)].astype(np.uint8))

    def label(self, row: int) -> int:
        """Return the class of the largest region."""
        return int(self.mask(row).flatten().bincount().argmax())

    def name(self, row: int) -> str:
        return f"{row:08d}"

    def _draw(self, row: int, part: int, count: int) -> Plane:
        # Not the numbers of the texture of the same index.
        return random_uniform(self.seed, RngPurpose.SYNTHETIC, row, 2, part, np.arange(count))

    def _coordinates(self, u: Plane) -> tuple[Plane, Plane]:
        """Return turned and shifted coordinates in which patterns have periods near 1."""
        turn = 2 * math.pi * u[0]
        periods = PERIODS[0] * (PERIODS[1] / PERIODS[0]) ** u[1] * self.size / PERIOD_SIZE
        cos, sin = np.float32(periods * math.cos(turn)), np.float32(periods * math.sin(turn))
        across, along = (np.float32(7 * shift) for shift in u[2:4])
        return cos * self._x - sin * self._y + across, sin * self._x + cos * self._y + along

    def _regions(self, row: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Plane]:
        """Return the class of each region, and the part (regions, H, W) of each pixel that it covers."""
        u = self._draw(row, 0, 1 + len(self.classes))
        most = min(REGIONS[1], len(self.classes))
        count = REGIONS[0] + math.floor((most - REGIONS[0] + 1) * u[0])
        classes = u[1:].argsort()[:count]
        numbers = self._draw(row, -1, count * (2 + 3 * WAVES)).reshape(count, -1).astype(np.float32)
        scores = []
        for left, top, *waves in numbers:
            score = -((self._x - (1.6 * left - 0.8)) ** 2) - (self._y - (1.6 * top - 0.8)) ** 2
            for turn, length, shift in np.reshape(waves, (WAVES, 3)):
                angle, pace = 2 * math.pi * turn, 2 + 4 * length
                wave = np.cos(angle) * self._x + np.sin(angle) * self._y
                score = score + 0.9 / pace * np.sin(pace * wave + 2 * math.pi * shift)
            scores.append(score)
        sharpness = np.float32(self.size / (2 * BORDER))
        powers = np.exp(sharpness * (np.stack(scores) - np.max(scores, axis=0)))
        return classes, (powers / powers.sum(0)).astype(np.float32)


def make_textures(*, length: int = 20_000, size: int = 32, seed: int = 0) -> ImageSet:
    """Return a labelled set of textures of any length."""
    store = _Textures(length, size, seed)
    return _generated(store, length)


def make_scenes(*, length: int = 20_000, size: int = 64, seed: int = 0, classes: int = 10) -> ImageSet:
    """Return scenes with masks, labelled by the class of the largest region."""
    store = _Scenes(length, size, seed, classes)
    return _generated(store, length)


def _generated(store: _Textures, length: int) -> ImageSet:
    return ImageSet(
        store=store,
        rows=range(length),
        names=store.name,
        labels=store.label,
        classes=store.classes,
        fingerprint=store.key,
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

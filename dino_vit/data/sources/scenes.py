"""Scenes made on the fly: images of several textures, and the class of every pixel.

A scene has two to five regions of free shape with soft borders, each of another pattern of `synthetic.py`
with a turn, a scale and colours of its own. A class has a hue that it often shows, as grass has, but only its
pattern tells for certain. Dense features are judged by whether they find the class of each patch.
"""

import math

import numpy as np
import torch
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.data.sources.synthetic import PATTERNS, PERIODS, Plane, SyntheticSource

VERSION = 2  # of the pictures: a run does not go on with others
REGIONS = 2, 5  # of a scene, at least and at most
WAVES = 4  # that bend the border of a region
BORDER = 1.5  # pixels in which one region turns into the next, about
PERIOD_SIZE = 32  # pixels of an image in which patterns have the periods of `synthetic.py`
NUMBERS = 25  # that a region is drawn from


class SceneSource(SyntheticSource):
    """A set of any length; scene and mask `index` are functions of (seed, index).

    The label of an image is the class of its largest region.
    """

    def __init__(self, *, length: int = 20_000, size: int = 64, seed: int = 0) -> None:
        super().__init__(length=length, size=size, seed=seed)

    def read(self, index: int) -> Tensor:
        classes, covers = self._regions(index)
        names, scene = self.classes, np.zeros((3, self.size, self.size), np.float32)
        for region, (kind, cover) in enumerate(zip(classes, covers, strict=True)):
            u = self._draw(index, 2 + region, NUMBERS)
            pattern = PATTERNS[names[kind]](*self._coordinates(u), u[11:].tolist())
            pattern = ((pattern - pattern.mean()) / pattern.std()).astype(np.float32)
            hue = 2 * math.pi * (kind / len(names) + np.arange(3) / 3)  # of red, green and blue
            colours = np.stack([0.4 * np.cos(hue) + 0.35 * (2 * u[5:8] - 1), 0.4 + 0.25 * u[8:11]])
            tone, contrast = colours.astype(np.float32)[..., None, None]
            scene += cover * (tone + (contrast if u[4] < 0.5 else -contrast) * pattern)
        noise = (0.05 + 0.07 * self._draw(index, 1, 1)[0]) * self._noise(index)
        levels = 127.5 + 127.5 * np.tanh(scene + noise, dtype=np.float32)
        return torch.from_numpy(np.rint(levels).astype(np.uint8))

    def mask(self, index: int) -> Tensor:
        """Return the class of every pixel, uint8 (H, W)."""
        classes, covers = self._regions(index)
        return torch.from_numpy(classes[covers.argmax(0)].astype(np.uint8))

    def label(self, index: int) -> int | None:
        return int(self.mask(index).flatten().bincount().argmax())

    def name(self, index: int) -> str:
        return f"{range(self.length)[index]:08d}"

    @property
    def fingerprint(self) -> str:
        return f"scenes-{VERSION}-{self.length}-{self.size}-{self.seed}"

    def _draw(self, index: int, part: int, count: int) -> Plane:
        index = range(self.length)[index]
        # Not the numbers of the texture of the same index.
        return random_uniform(self.seed, RngPurpose.SYNTHETIC, index, 2, part, np.arange(count))

    def _coordinates(self, u: Plane) -> tuple[Plane, Plane]:
        """Return turned and shifted coordinates in which patterns have periods near 1."""
        turn = 2 * math.pi * u[0]
        periods = PERIODS[0] * (PERIODS[1] / PERIODS[0]) ** u[1] * self.size / PERIOD_SIZE
        cos, sin = np.float32(periods * math.cos(turn)), np.float32(periods * math.sin(turn))
        across, along = (np.float32(7 * shift) for shift in u[2:4])
        return cos * self._x - sin * self._y + across, sin * self._x + cos * self._y + along

    def _regions(self, index: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Plane]:
        """Return the class of each region, and the part (regions, H, W) of each pixel that it covers."""
        u = self._draw(index, 0, 1 + len(PATTERNS))
        count = REGIONS[0] + math.floor((REGIONS[1] - REGIONS[0] + 1) * u[0])
        classes = u[1:].argsort()[:count]
        numbers = self._draw(index, -1, count * (2 + 3 * WAVES)).reshape(count, -1).astype(np.float32)
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

"""The images of a source, each disturbed in one way, as a source of its own."""

from collections.abc import Callable, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.sources.source import Source
from dino_vit.views.preparation import Preparation

Picture = NDArray[np.uint8]  # (H, W, 3)
VERSION = 2  # of all kinds of disturbance; another one when a kind changes, whose features are cached


class Disturbance(NamedTuple):
    """A kind of disturbance at one strength."""

    kind: str
    strength: float
    apply: Callable[[Picture, float, np.random.Generator], Picture]  # takes the strength; may change the size

    def __str__(self) -> str:
        return f"{self.kind} {self.strength:g}"


class DisturbedSource:
    """The images of a source after a disturbance, with their labels.

    What is random in it is a function of seed, kind and index, and the same at every strength. With a
    preparation of 8-bit RGB the images are resized and cropped first, so that a strength means the same for
    all of them; prepare what comes out with `fit="whole"` and the same size, which then changes nothing.
    """

    def __init__(
        self, source: Source, disturbance: Disturbance, *, seed: int, preparation: Preparation | None = None
    ) -> None:
        self.source, self.disturbance, self.seed = source, disturbance, seed
        self.preparation = preparation

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Tensor:
        try:
            if self.preparation is None:
                image = read_image(self.source, index)
            else:
                image = self.preparation.read(self.source, index)
        except UnreadableImage as error:
            raise OSError(error.reason) from error
        kind, strength, apply = self.disturbance
        key = crc32(kind.encode())
        generator = np.random.default_rng(derive_seed(self.seed, RngPurpose.DISTURBANCE, key, index))
        picture = apply(np.ascontiguousarray(image.permute(1, 2, 0).numpy()), strength, generator)
        return torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1).contiguous()

    def label(self, index: int) -> int | None:
        return self.source.label(index)

    def name(self, index: int) -> str:
        return self.source.name(index)

    @property
    def classes(self) -> Sequence[str]:
        return self.source.classes

    @property
    def fingerprint(self) -> str:
        made = f"{self.disturbance}, version {VERSION}, seed {self.seed}, {self.preparation}"
        return f"{self.source.fingerprint}, {made}"

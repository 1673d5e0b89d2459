"""Some images of a source as a source of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dino_vit.data.sources.source import Source

if TYPE_CHECKING:
    from torch import Tensor


class Subset:
    """The items of a source at the given indices, in their order."""

    def __init__(self, source: Source, indices: NDArray[np.int64]) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> bytes | Tensor:
        return self.source.read(int(self.indices[index]))

    def label(self, index: int) -> int | None:
        return self.source.label(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    @property
    def classes(self) -> Sequence[str]:
        return self.source.classes

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.indices, dtype="<i8").tobytes()).hexdigest()
        return f"{self.source.fingerprint}-{len(self)}-{digest[:16]}"

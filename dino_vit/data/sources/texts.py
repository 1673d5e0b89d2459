"""A million texts as two arrays, which processes share and nothing needs to pickle one by one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Texts:
    """Texts end to end, and where each ends; bytes that are no UTF-8 survive, as in names of files."""

    def __init__(self, letters: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.letters, self.ends = letters, ends

    @classmethod
    def of(cls, texts: Iterable[str | bytes]) -> Texts:
        raw = [os.fsencode(text) for text in texts]
        letters = np.frombuffer(b"".join(raw), dtype=np.uint8)
        return cls(letters, np.cumsum([len(text) for text in raw], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.raw(index))

    def __iter__(self) -> Iterator[str]:
        return (os.fsdecode(raw) for raw in self.raws())

    def raw(self, index: int) -> bytes:
        """Return the bytes of a text."""
        index = range(len(self))[index]
        start = self.ends[index - 1] if index else 0
        return self.letters[start : self.ends[index]].tobytes()

    def raws(self) -> Iterator[bytes]:
        """Yield the bytes of all texts, faster than one by one."""
        letters, start = self.letters.tobytes(), 0
        for end in self.ends.tolist():
            yield letters[start:end]
            start = end

    def columns(self, name: str) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, for an index."""
        return {f"{name}.letters": self.letters, f"{name}.ends": self.ends}

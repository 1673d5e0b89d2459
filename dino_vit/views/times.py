"""How long images take in a loader process, part by part."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass


@dataclass
class LoadTimes:
    """Seconds that a process took for some images, by what it did with them."""

    images: int = 0
    read: float = 0.0
    decode: float = 0.0
    cut: float = 0.0
    colour: float = 0.0  # 0 on the device

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of a block to one of the parts."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)

    def __add__(self, other: "LoadTimes") -> "LoadTimes":
        return LoadTimes(*map(sum, zip(astuple(self), astuple(other), strict=True)))

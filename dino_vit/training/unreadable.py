"""Images that cannot be read: named once in `unreadable.txt`, and the end of a run if they are many."""

from __future__ import annotations

from pathlib import Path

import torch

from dino_vit.core.distributed import all_gather
from dino_vit.views.loader import Batch

# The share is taken of at least so many images, or a few bad ones at the start would end a run.
AT_LEAST = 1000


class Unreadable:
    """What a process could not read so far; `check` is for all processes together."""

    def __init__(self, folder: Path, *, limit: float) -> None:
        self.path = folder / "unreadable.txt"
        self.limit = limit
        self.known = set(self.path.read_text().splitlines()) if self.path.exists() else set[str]()
        self.failed, self.tried = 0, 0
        self.failure: str | None = None

    def count(self, batch: Batch) -> None:
        """Take note of a batch, and write down what is new."""
        self.failed += len(batch.unreadable)
        self.tried += len(batch.samples) + len(batch.unreadable)
        self.failure = self.failure or batch.failure
        for line in map(str, batch.unreadable):
            if line not in self.known:
                self.known.add(line)
                self._write_down(line)

    def _write_down(self, line: str) -> None:
        """Add an image to the list, unless another process did in the meantime."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+") as file:
            file.seek(0)
            if line not in file.read().splitlines():
                file.write(f"{line}\n")

    @property
    def many(self) -> bool:
        """Tell whether this process alone would have all of them look."""
        return self.failure is not None or self._beyond(self.failed, self.tried)

    def _beyond(self, failed: int, tried: int) -> bool:
        return failed > self.limit * max(tried, AT_LEAST)

    def check(self, device: torch.device) -> None:
        """End the run in all processes, which must all call this, if there are too many in all of them."""
        mine = torch.tensor([[self.failed, self.tried, self.failure is not None]], device=device)
        failed, tried, blank = all_gather(mine).sum(dim=0).tolist()
        if blank:
            raise ValueError(self.failure or "Another process found no image that can be read; see there.")
        if self._beyond(failed, tried):
            raise ValueError(
                f"{failed} of {tried} images read so far cannot be read or used, more than "
                f"data.max_unreadable={self.limit}: see {self.path}. Mend the images, or raise the limit and "
                f"run the same command again"
            )

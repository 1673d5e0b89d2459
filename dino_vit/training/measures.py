"""What is measured between two log lines: kept on the device, so that no step waits for the host."""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dino_vit.core.distributed import all_gather
from dino_vit.data.sources.files import SourceLost
from dino_vit.views.loader import Batch
from dino_vit.views.times import LoadTimes

# The share of unreadable images is taken of at least this many, or a few at the start would end a run.
AT_LEAST = 1000
# What a checkpoint holds of an interval.
_SUMS = ("loss", "finite", "skipped", "skipped_in_a_row")


class IntervalSummary(NamedTuple):
    """The measures of an interval, on the host."""

    loss: float  # mean of the finite steps, over all processes
    gradient_norm: float  # of the last step
    skipped: int
    skipped_in_a_row: int
    images_per_second: float
    data_wait: float  # share of the time


class Interval:
    """Sums since the last log line; `read` is the only moment when the host waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.skipped_in_a_row = torch.zeros((), device=device)
        self.loading = LoadTimes()  # of all batches since the start
        self.restart()

    def restart(self) -> None:
        """Start a new interval; only the steps skipped in a row and `loading` carry over."""
        self.loss, self.finite, self.skipped, self.norm = torch.zeros(4, device=self.device).unbind()
        self.start, self.waited, self.images = time.perf_counter(), 0.0, 0

    def wait(self, batches: Iterator[Batch | None]) -> Batch | None:
        """Return the next batch, and count the time that it took to arrive."""
        start = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - start
        if batch is not None:
            self.loading += batch.times
        return batch

    def add(self, loss: Tensor, norm: Tensor, finite: Tensor, images: int) -> None:
        """Count a step, with its loss over all processes."""
        self.loss = self.loss + torch.where(finite, loss, 0.0)
        self.finite = self.finite + finite
        self.skipped = self.skipped + ~finite
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * ~finite
        self.norm = norm
        self.images += images

    def read(self) -> IntervalSummary:
        """Return the measures of the interval so far."""
        mean = self.loss / self.finite  # NaN if every step was skipped
        on_device = torch.stack((mean, self.norm, self.skipped, self.skipped_in_a_row))
        loss, norm, skipped, in_a_row = on_device.tolist()
        seconds = time.perf_counter() - self.start
        return IntervalSummary(
            loss, norm, int(skipped), int(in_a_row), self.images / seconds, self.waited / seconds
        )

    def state(self) -> dict[str, float]:
        """Return the sums for a checkpoint, all but the times."""
        return {name: float(getattr(self, name)) for name in _SUMS}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from sums of a checkpoint."""
        for name in _SUMS:
            setattr(self, name, torch.tensor(state.get(name, 0.0), device=self.device))


class UnreadableImages:
    """Count unreadable images, list each once in `unreadable.txt`, and end the run if there are too many."""

    def __init__(self, folder: Path, *, limit: float) -> None:
        self.path = folder / "unreadable.txt"
        self.limit = limit
        self.known = set(self._listed())
        self.failed, self.tried = 0, 0
        self.failure: Exception | None = None

    def count(self, batch: Batch) -> None:
        """Count a batch, and list images that were not listed before."""
        self.failed += len(batch.unreadable)
        self.tried += len(batch.samples) + len(batch.unreadable)
        self.failure = self.failure or batch.failure
        new = [line for line in dict.fromkeys(map(str, batch.unreadable)) if line not in self.known]
        if not new:
            return
        with suppress(OSError):  # if the disk is full, they are listed when they come again
            self.path.parent.mkdir(parents=True, exist_ok=True)
            listed = set(self._listed())  # by other processes too
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in new if line not in listed)
            self.known.update(new)

    def _listed(self) -> list[str]:
        text = self.path.read_bytes().decode(errors="replace") if self.path.exists() else ""
        return text.splitlines()

    @property
    def too_many(self) -> bool:
        """Tell whether all processes should `check`, as far as this one knows."""
        return self.failure is not None or self.failed > self.limit * max(self.tried, AT_LEAST)

    def check(self, device: torch.device) -> None:
        """Raise in all processes, which must all call this, if there are too many over all of them."""
        code = getattr(self.failure, "exit_code", 1) if self.failure else 0
        counts = all_gather(torch.tensor([[self.failed, self.tried, code]], device=device))
        if code := int(counts[:, 2].max()):
            error = SourceLost if code == SourceLost.exit_code else ValueError
            raise self.failure or error("another process could not read its images; see its output")
        failed, tried, _ = counts.sum(dim=0).tolist()
        if failed > self.limit * max(tried, AT_LEAST):
            raise ValueError(
                f"{failed} of the {tried} images read so far cannot be read or used, more than "
                f"data.max_unreadable={self.limit}; see {self.path}. Repair the images, or raise the "
                "limit and run the same command again"
            )

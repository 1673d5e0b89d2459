"""What is measured between two log lines: kept on the device, so that no step waits for the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dino_vit.core.distributed import all_gather, all_reduce_mean, world_size
from dino_vit.method.loss import LossStatistics, loss_statistics
from dino_vit.models.pair import embedding_std
from dino_vit.views.loader import Batch

T = TypeVar("T")

# The share of unreadable images is taken of at least so many, or a few at the start would end a run.
AT_LEAST = 1000


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
        self.restart()

    def restart(self) -> None:
        """Start a new interval; only the steps skipped in a row carry over."""
        self.loss, self.finite, self.skipped, self.norm = torch.zeros(4, device=self.device).unbind()
        self.start, self.waited, self.images = time.perf_counter(), 0.0, 0

    def wait(self, batches: Iterator[T]) -> T:
        """Return the next batch, and count the time that it took to arrive."""
        start = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - start
        return batch

    def add(self, loss: Tensor, norm: Tensor, finite: Tensor, images: int) -> None:
        """Count a step."""
        self.loss = self.loss + torch.where(finite, loss, 0.0)
        self.finite = self.finite + finite
        self.skipped = self.skipped + ~finite
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * ~finite
        self.norm = norm
        self.images += images

    def read(self) -> IntervalSummary:
        """Return the measures of the interval so far."""
        mean = all_reduce_mean(self.loss) / self.finite  # NaN if every step was skipped
        on_device = torch.stack((mean, self.norm, self.skipped, self.skipped_in_a_row))
        loss, norm, skipped, in_a_row = on_device.tolist()
        seconds = time.perf_counter() - self.start
        return IntervalSummary(
            loss, norm, int(skipped), int(in_a_row), self.images / seconds, self.waited / seconds
        )


class OutputStatistics(NamedTuple):
    """The measures of a logged step that cost something: of the teacher's outputs and features."""

    loss: LossStatistics
    embedding_std: Tensor
    rows: int  # teacher outputs, over all processes


def measure_outputs(
    loss: Tensor, cls: Tensor, teacher_logits: Tensor, center: Tensor, teacher_temp: float
) -> OutputStatistics:
    """Measure the teacher's outputs in one forward pass."""
    statistics = loss_statistics(loss, teacher_logits, center, teacher_temperature=teacher_temp)
    return OutputStatistics(
        statistics, all_reduce_mean(embedding_std(cls)), len(teacher_logits) * world_size()
    )


class UnreadableImages:
    """Count unreadable images, list each once in `unreadable.txt`, and end the run if there are too many."""

    def __init__(self, folder: Path, *, limit: float) -> None:
        self.path = folder / "unreadable.txt"
        self.limit = limit
        self.known = set(self.path.read_text().splitlines()) if self.path.exists() else set[str]()
        self.failed, self.tried = 0, 0
        self.failure: str | None = None

    def count(self, batch: Batch) -> None:
        """Count a batch, and list images that were not listed before."""
        self.failed += len(batch.unreadable)
        self.tried += len(batch.samples) + len(batch.unreadable)
        self.failure = self.failure or batch.failure
        for line in map(str, batch.unreadable):
            if line not in self.known:
                self.known.add(line)
                self._append(line)

    def _append(self, line: str) -> None:
        """Append a line, unless another process did in the meantime."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+") as file:
            file.seek(0)
            if line not in file.read().splitlines():
                file.write(f"{line}\n")

    @property
    def too_many(self) -> bool:
        """Tell whether all processes should `check`, as far as this one knows."""
        return self.failure is not None or self._exceeds(self.failed, self.tried)

    def _exceeds(self, failed: int, tried: int) -> bool:
        return failed > self.limit * max(tried, AT_LEAST)

    def check(self, device: torch.device) -> None:
        """Raise in all processes, which must all call this, if there are too many over all of them."""
        counts = torch.tensor([[self.failed, self.tried, self.failure is not None]], device=device)
        failed, tried, failures = all_gather(counts).sum(dim=0).tolist()
        if failures:
            raise ValueError(self.failure or "another process could not read any image; see its output")
        if self._exceeds(failed, tried):
            raise ValueError(
                f"{failed} of the {tried} images read so far cannot be read or used, more than "
                f"data.max_unreadable={self.limit}; see {self.path}. Repair the images, or raise the "
                "limit and run the same command again"
            )

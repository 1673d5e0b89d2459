"""What is summed between two log lines, on the device."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dino_vit.views.loader import Batch

MAX_SKIPPED = 5  # steps in a row; so many end the run
# What a checkpoint holds of an interval.
_SUMS = ("loss", "finite", "skipped_in_a_row")


class Interval:
    """Sums since the last log line; the host waits for the device only where it reads them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of the whole run, `longest_skip` of this start; the first and last without the search of float16.
        self.skipped, self.skipped_in_a_row, self.longest_skip = torch.zeros(3, device=device).unbind()
        # As the host knows it, some steps later.
        self.longest_skip_on_host = torch.zeros((), pin_memory=device.type == "cuda")
        self.loading = defaultdict[str, float](float)  # times of all batches since the start
        self.loaded = 0  # images of these
        self.restart()

    def restart(self) -> None:
        """Start a new interval; skipped steps and `loading` carry over."""
        self.loss, self.finite, self.norm = torch.zeros(3, device=self.device).unbind()
        self.start_timing()

    def start_timing(self) -> None:
        """Leave out of the times what was no training."""
        self.start, self.waited, self.images = time.perf_counter(), 0.0, 0

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, and count the time that it took to arrive."""
        start = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - start
        for part, seconds in batch.times.items():
            self.loading[part] += seconds
        self.loaded += len(batch.samples)
        return batch

    def add(
        self, loss: Tensor, norm: Tensor, finite: Tensor, images: int, scale: Tensor | None = None
    ) -> None:
        """Count a step, with its loss over all processes; `scale` is that of float16 gradients."""
        self.loss = self.loss + torch.where(finite, loss, 0.0)
        self.finite = self.finite + finite
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * ~finite
        # While float16's scale can still fall, skipped steps are how it is found.
        is_lasting = ~finite if scale is None else ~finite & (scale <= 1)
        self.skipped = self.skipped + is_lasting
        self.longest_skip = torch.maximum(self.longest_skip, self.skipped_in_a_row * is_lasting)
        self.longest_skip_on_host.copy_(self.longest_skip, non_blocking=True)
        self.norm = norm
        self.images += images

    @property
    def seems_stuck(self) -> bool:
        """Whether too many steps in a row were skipped, as far as the host knows without waiting."""
        return bool(self.longest_skip_on_host >= MAX_SKIPPED)

    def too_many_skipped(self) -> int:
        """Return the most steps in a row that were skipped if they are too many, and 0 otherwise."""
        most = int(self.longest_skip)
        return most if most >= MAX_SKIPPED else 0

    def read(self) -> dict[str, Any]:
        """Return the figures of the interval so far, by their names in a `MetricsRecord`."""
        mean = self.loss / self.finite  # of all processes; NaN if every step was skipped
        loss, norm, skipped = torch.stack((mean, self.norm, self.skipped)).tolist()
        seconds = time.perf_counter() - self.start
        return {
            "loss": loss,
            "gradient_norm": norm,  # of the last step
            "nonfinite_steps": int(skipped),
            "images_per_second": self.images / seconds,
            "data_wait": self.waited / seconds,
        }

    def sums(self) -> dict[str, float]:
        """Return the sums for a checkpoint, all but the times."""
        return {name: float(getattr(self, name)) for name in _SUMS}

    def restore(self, sums: Mapping[str, float], skipped: float) -> None:
        """Go on from the sums of a checkpoint."""
        for name in _SUMS:
            setattr(self, name, torch.tensor(sums[name], device=self.device))
        self.skipped = torch.tensor(skipped, device=self.device)

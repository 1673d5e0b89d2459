"""Measures of an interval between two log lines, kept on the device so that no step waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dino_vit.core.distributed import all_reduce_mean

T = TypeVar("T")


class Measured(NamedTuple):
    """What an interval came to, on the host."""

    loss: float  # mean of the finite steps, over all processes
    gradient_norm: float  # of the last step
    lost: int
    lost_in_a_row: int
    images_per_second: float
    data_wait: float  # share of the time


class Meter:
    """Count steps and time; `read` is the one moment at which the host waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lost_in_a_row = torch.zeros((), device=device)
        self.restart()

    def restart(self) -> None:
        """Begin an interval; only the steps that were lost in a row go on."""
        self.loss, self.finite, self.lost, self.norm = torch.zeros(4, device=self.device).unbind()
        self.began, self.waited, self.images = time.perf_counter(), 0.0, 0

    def wait(self, items: Iterator[T]) -> T:
        """Return the next item, and remember how long it took to come."""
        began = time.perf_counter()
        item = next(items)
        self.waited += time.perf_counter() - began
        return item

    def add(self, loss: Tensor, norm: Tensor, finite: Tensor, images: int) -> None:
        """Count a step."""
        self.loss = self.loss + torch.where(finite, loss, 0.0)
        self.finite = self.finite + finite
        self.lost = self.lost + ~finite
        self.lost_in_a_row = (self.lost_in_a_row + 1) * ~finite
        self.norm = norm
        self.images += images

    def read(self) -> Measured:
        """Return what the interval came to so far."""
        mean = all_reduce_mean(self.loss) / self.finite  # NaN if every step was lost
        device_side = torch.stack((mean, self.norm, self.lost, self.lost_in_a_row)).tolist()
        seconds = time.perf_counter() - self.began
        loss, norm, lost, in_a_row = device_side
        return Measured(loss, norm, int(lost), int(in_a_row), self.images / seconds, self.waited / seconds)

"""Batches of views, from any step on; bit for bit the same with any number of DataLoader workers."""

import logging
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from multiprocessing.synchronize import Event
from pathlib import Path
from traceback import clear_frames
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dino_vit.core import Size, log
from dino_vit.core.process import STOP_SIGNALS, is_foreseen, portable, release_freed_memory
from dino_vit.core.runtime import cores_of_a_process
from dino_vit.data import remote
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import UnreadableImage, decode_item, read_item
from dino_vit.data.images.decoded import DecodedImages
from dino_vit.data.images.pixels import RGB, Pixels
from dino_vit.data.remote import raise_if_lost
from dino_vit.data.shards import Prefetch
from dino_vit.views.augment import draw_augment
from dino_vit.views.geometry import View, ViewBoxes, crop_views, draw_box_numbers
from dino_vit.views.masks import Masking, Masks, PatchDrop
from dino_vit.views.sampler import BatchSpec, Sampler

REPLACEMENTS = 10  # if an image and this many replacements are unreadable, the data are broken or unreachable
# The share of unreadable images is taken of at least this many, or a few at the start would end a run.
AT_LEAST = 1000
PREFETCH = 2  # batches that each worker makes ahead
MOST_WORKERS = 16  # more rarely help, but cost memory


def choose_workers(given: int | None, processes: int) -> int:
    """Return the DataLoader workers of each process: as given, else its cores but the one it needs itself."""
    return min(cores_of_a_process(processes) - 1, MOST_WORKERS) if given is None else given


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Hold signals back while workers start: they inherit this, and must not die before they ignore them."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def init_worker(stops: Event, timeout_s: float, number: int) -> None:
    """Ignore signals sent to all processes of a run, which needs its workers to finish the step."""
    remote.process_stops, remote.timeout_s = stops, timeout_s  # no worker goes on waiting for a server
    release_freed_memory()
    if number:
        log.setLevel(logging.ERROR)  # one says that a server does not answer
    for ignored in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if stops.is_set() else None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def timed(times: dict[str, float], part: str) -> Iterator[None]:
    """Add the seconds of a block to one of the parts."""
    start = time.perf_counter()
    try:
        yield
    finally:
        times[part] += time.perf_counter() - start


class Batch(NamedTuple):
    """One process's views of a step, by size, view-major: the first view of all images, then the second.

    The DataLoader pins the tensors of such a tuple.
    """

    epoch: int
    step: int  # within the epoch
    samples: Tensor  # (images,), the indices that the sampler chose
    read: Tensor  # (images,), the indices that were read: a replacement for each unreadable image
    views: dict[Size, Tensor]  # (views · images, C, h, w): uint8, or float32 if deeper
    augment: dict[Size, Tensor]  # float32 (views · images, columns)
    unreadable: Sequence[UnreadableImage]  # the images that were replaced
    times: dict[str, float]  # seconds, by what was done with the images
    masks: Masks | None = None  # of the global views, view by view
    kept: Tensor | None = None  # int64 (global views · images, kept): the patches that the student sees

    def share_memory(self) -> "Batch":
        """Move the tensors to shared memory, and return the batch."""
        tensors = self.samples, self.read, *self.views.values(), *self.augment.values(), *(self.masks or ())
        for tensor in tensors if self.kept is None else (*tensors, self.kept):
            tensor.share_memory_()
        return self


@dataclass(kw_only=True, eq=False)
class Loader(Dataset[Any]):
    """Read, decode and crop the images of each step, in `workers` DataLoader workers that last for the run.

    With `scaled_decoding` a JPEG is decoded no larger than its views need it. What is decoded may be kept.
    """

    source: ImageSet
    views: Sequence[View]
    sampler: Sampler
    pixels: Pixels = RGB
    masking: Masking | None = None
    patch_drop: PatchDrop | None = None
    scaled_decoding: bool = False
    decoded: DecodedImages | None = None
    prefetch: Sequence[Prefetch] = ()  # one for each remote source
    workers: int = 0
    pin: bool = False

    def __post_init__(self) -> None:
        self.by_size: dict[Size, list[int]] = {}
        for index, view in enumerate(self.views):
            self.by_size.setdefault(view.size, []).append(index)

    def batches(self, start_step: int = 0) -> Generator[Batch]:
        """Yield the batches from `start_step` on, without end; closing the iterator ends the workers."""
        stops = multiprocessing.Event()
        loader: DataLoader[Any] = DataLoader(
            replace(self, prefetch=()),  # whose threads stay in this process
            batch_size=None,
            sampler=self.sampler.batch_specs(start_step),
            num_workers=self.workers,
            prefetch_factor=PREFETCH if self.workers else None,
            pin_memory=self.pin,
            generator=torch.Generator(),  # without it, the DataLoader would draw from the global one
            worker_init_fn=partial(init_worker, stops, remote.timeout_s),
        )
        batches: Iterator[Any] = iter(())
        try:
            with signals_blocked():
                batches = iter(loader)
            with ExitStack() as threads:
                for prefetch in self.prefetch:  # after the fork of the workers, which would inherit its files
                    threads.enter_context(prefetch.running(start_step))
                for taken in count():
                    batch = next(batches)
                    for prefetch in self.prefetch:
                        prefetch.position = start_step + taken // self.sampler.accumulate
                        if prefetch.failure:
                            raise prefetch.failure
                    if isinstance(batch, Exception):
                        raise batch
                    yield batch
        except Exception as error:
            if self.workers:
                clear_frames(error.__traceback__)  # those of the DataLoader would keep its workers alive
            if isinstance(error, (EOFError, ConnectionError)):  # one was about to hand over a batch's memory
                raise RuntimeError("DataLoader worker exited unexpectedly") from error
            raise
        finally:
            stops.set()
            del batches  # which ends the workers: a traceback may keep this frame

    def __getitem__(self, spec: BatchSpec) -> Any:
        """Make a batch, or return an error for users, which the DataLoader would wrap in a traceback."""
        try:
            batch = self.make(spec)
        except Exception as error:
            if not is_foreseen(error):
                raise
            return portable(error)
        # Where shared memory is full, this is an error; the DataLoader's thread would print it and go on.
        return batch.share_memory() if get_worker_info() else batch

    def make(self, spec: BatchSpec) -> Batch:
        """Make one batch in this process."""
        unreadable: list[UnreadableImage] = []
        times = defaultdict[str, float](float)
        channels, dtype = self.pixels.channels, self.pixels.dtype
        views = {
            size: torch.empty((len(indices), len(spec.samples), channels, *size), dtype=dtype)
            for size, indices in self.by_size.items()
        }
        keys: Any = {"seed": self.sampler.seed, "epoch": spec.epoch, "samples": spec.samples}
        box_draws = draw_box_numbers(self.views, **keys)
        read = torch.from_numpy(spec.samples).clone()
        for row, sample in enumerate(spec.samples.tolist()):
            read[row], image, crops = self._read(sample, box_draws[row], unreadable, times)
            with timed(times, "crop"):
                boxes = crops.boxes(image)
                for size, indices in self.by_size.items():
                    interpolation = self.views[indices[0]].interpolation
                    out = views[size][:, row]
                    crop_views(image, boxes[indices], size, interpolation=interpolation, out=out)
        rows = draw_augment([view.augment for view in self.views], **keys)
        place = spec.epoch, spec.step, spec.first, len(spec.samples)
        return Batch(
            epoch=spec.epoch,
            step=spec.step,
            samples=torch.from_numpy(spec.samples),
            read=read,
            views={size: stacked.flatten(0, 1) for size, stacked in views.items()},
            augment={
                size: torch.from_numpy(rearrange(rows[:, indices], "b v f -> (v b) f"))
                for size, indices in self.by_size.items()
            },
            unreadable=unreadable,
            times=dict(times),
            masks=self.masking.draw(*place) if self.masking else None,
            kept=self.patch_drop.draw(*place) if self.patch_drop else None,
        )

    def _read(
        self,
        sample: int,
        box_draws: NDArray[np.float64],
        unreadable: list[UnreadableImage],
        times: dict[str, float],
    ) -> tuple[int, Tensor, ViewBoxes]:
        """Return index, pixels and boxes of a sample, or of its first readable replacement."""
        for index in chain([sample], self.sampler.replacements(sample, REPLACEMENTS)):
            crops = ViewBoxes(self.views, box_draws)
            try:
                return index, self._decoded(index, crops, times), crops
            except UnreadableImage as error:
                unreadable.append(error)
        raise_if_lost(unreadable[-1])
        raise ValueError(
            f"{REPLACEMENTS + 1} randomly chosen images cannot be read, the last one is {unreadable[-1]}. "
            "Check that the source is complete and can be reached."
        )

    def _decoded(self, index: int, crops: ViewBoxes, times: dict[str, float]) -> Tensor:
        """Return the kept pixels of an image, or decode it, no larger than its views need it."""
        reduction = crops.reduction if self.scaled_decoding else None
        if self.decoded:
            with timed(times, "find"):
                if (kept := self.decoded.find(index, reduction, self.pixels.channels)) is not None:
                    return kept
        with timed(times, "read"):
            item = read_item(self.source, index, self.pixels.max_pixels)
        with timed(times, "decode"):
            image = decode_item(item, self.source.name(index), self.pixels, reduction)
        if self.decoded and isinstance(item, bytes):
            self.decoded.keep(index, image, crops.size, crops.factor)
        return image


class UnreadableImages:
    """Count unreadable images, list each once in `unreadable.txt`, and end the run if there are too many."""

    def __init__(self, folder: Path, *, limit: float) -> None:
        self.path, self.limit = folder / "unreadable.txt", limit
        self.listed: set[str] = set()
        self.failed, self.tried = 0, 0

    def count(self, batch: Batch) -> None:
        """Count a batch, list images that were not listed before, and raise if there are too many."""
        self.failed += len(batch.unreadable)
        self.tried += len(batch.samples) + len(batch.unreadable)
        new = dict.fromkeys(line for line in map(str, batch.unreadable) if line not in self.listed)
        if new:  # if the disk is full, they are listed when they come again
            with suppress(OSError):
                with self.path.open("a+", encoding="utf-8", errors="replace") as file:
                    file.seek(0)
                    listed = set(file.read().splitlines())  # by other processes and earlier starts
                    file.writelines(f"{line}\n" for line in new if line not in listed)
                self.listed.update(new)
        if self.failed > self.limit * max(self.tried, AT_LEAST):
            raise ValueError(
                f"{self.failed} of the {self.tried} images read so far cannot be read or used, more than "
                f"data.max_unreadable={self.limit}; see {self.path}. Repair the images, or raise the "
                "limit and run the same command again"
            )

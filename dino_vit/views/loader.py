"""Batches of views, from any step on; bit for bit the same with any number of loader processes."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from math import ceil
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dino_vit.core import log
from dino_vit.core.distributed import local_world_size
from dino_vit.core.native import separate_stderr
from dino_vit.core.signals import REQUEUE
from dino_vit.core.sizes import Size
from dino_vit.data.images.decode import UnreadableImage, decode_item, read_item
from dino_vit.data.images.pixels import RGB, Pixels
from dino_vit.data.shard_cache import Prefetch
from dino_vit.data.sources import files
from dino_vit.data.sources.files import SourceLost
from dino_vit.data.sources.open import Source
from dino_vit.models.masks import Masks
from dino_vit.views.geometry import Cut, View, crop_views, draw_tries, interleave
from dino_vit.views.masks import Masking
from dino_vit.views.photometry import draw_photometry
from dino_vit.views.sampler import BatchSpec, Sampler
from dino_vit.views.times import LoadTimes

REPLACEMENTS = 10  # if an image and this many replacements are unreadable, the data are broken or unreachable
PREFETCH = 2  # batches that each loader process makes ahead
STUCK = 2  # seconds after which a loader process that does not end is killed
SHARED = Path("/dev/shm")  # the shared memory of Linux, which a container often limits to 64 MB


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One process's views of a step, by size, view-major: the first view of all images, then the second."""

    epoch: int
    step: int  # within the epoch
    samples: Tensor  # (images,), the indices that the sampler chose
    read: Tensor  # (images,), the indices that were read: a replacement for each unreadable image
    views: dict[Size, Tensor]  # (views · images, C, h, w): uint8, or float32 if deeper or augmented
    photometry: dict[Size, Tensor]  # float32 (views · images, columns); empty if already applied
    unreadable: tuple[UnreadableImage, ...]  # the images that were replaced
    masks: Masks | None = None  # of the global views, view by view
    failure: Exception | None = None  # why images are blank, so that the run must end
    times: LoadTimes = field(default_factory=LoadTimes)

    def pin_memory(self) -> "Batch":
        """Return a copy in pinned memory (the DataLoader calls this)."""
        return replace(
            self,
            views={size: tensor.pin_memory() for size, tensor in self.views.items()},
            photometry={size: tensor.pin_memory() for size, tensor in self.photometry.items()},
            masks=self.masks and self.masks.pin_memory(),
        )


class Loader:
    """Read, decode and crop the images of each step, in `workers` processes that last for the whole run.

    With `augment` they apply the photometry too, and return float32 views: four times the memory. With
    `scaled_decoding` a JPEG is decoded no larger than its views need it.
    """

    def __init__(
        self,
        *,
        source: Source,
        views: Sequence[View],
        sampler: Sampler,
        pixels: Pixels = RGB,
        augment: nn.Module | None = None,
        masking: Masking | None = None,
        scaled_decoding: bool = False,
        in_step: bool = False,
        prefetch: Prefetch | None = None,
        workers: int = 0,
        pin: bool = False,
    ) -> None:
        assert len(source) == sampler.length, (len(source), sampler.length)
        self.dataset = _Steps(source, tuple(views), pixels, augment, masking, sampler, scaled_decoding)
        self.sampler, self.masking, self.in_step = sampler, masking, in_step
        self.prefetch, self.workers, self.pin = prefetch, workers, pin
        self.lost_worker = False  # whether a loader process was killed
        if workers and SHARED.exists():
            _check_shared_memory(workers, PREFETCH * self.dataset.bytes_of_a_batch)

    def make(self, spec: BatchSpec) -> Batch:
        """Make one batch in this process."""
        batch = self.dataset[spec]
        if isinstance(batch, ValueError):
            raise batch
        return batch

    def batches(self, position: int = 0) -> Generator[Batch]:
        """Yield the batches from a step on, without end; closing the iterator ends the loader processes.

        If an image and its replacements are unreadable, or a loader process was killed, raise an error. With
        `in_step`, yield a batch with a blank image and its `failure`, or make the batches here and set
        `lost_worker`, so that the caller can end all processes after the same step.
        """
        stops = multiprocessing.Event()  # so that no loader process goes on waiting for a server
        loader: DataLoader[Batch | ValueError] = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self.sampler.batch_specs(position),
            num_workers=self.workers,
            prefetch_factor=PREFETCH if self.workers else None,
            pin_memory=self.pin,
            generator=torch.Generator(),  # without it, the DataLoader would draw from the global one
            worker_init_fn=partial(_init_worker, stops),
        )
        batches: Any = _iterate(loader)
        # After the fork of the processes, which would inherit its files.
        shards = self.prefetch.running(position) if self.prefetch else nullcontext()
        try:
            with shards:
                for taken in count():
                    batch = self._next(batches, position, taken)
                    if isinstance(batch, ValueError):
                        raise batch
                    if self.prefetch:
                        self.prefetch.position = position + taken // self.sampler.accumulate
                        batch = replace(batch, failure=batch.failure or self.prefetch.failure)
                    if batch.failure and not self.in_step:
                        raise batch.failure
                    yield batch
        finally:
            if self.workers:  # not left to garbage collection: a traceback may keep the iterator alive
                stops.set()
                stuck = threading.Timer(STUCK, _kill, (batches._workers,))
                stuck.start()
                batches._shutdown_workers()
                stuck.cancel()

    def _next(self, batches: Any, position: int, taken: int) -> Batch | ValueError:
        """Return the next batch, from a loader process as long as all of them live."""
        if not self.lost_worker:
            try:
                batch: Batch | ValueError = next(batches)
                return batch
            # OSError, EOFError: what the process had made was not yet fetched from it.
            except (RuntimeError, OSError, EOFError):
                how = self.workers and _how_one_ended(batches._workers)
                if not how:
                    raise
                self.lost_worker = True
                text = (
                    f"a loader process ended {how}, probably because memory ran out: use fewer workers "
                    f"(now {self.workers}) or smaller batches"
                )
                if not self.in_step:
                    raise WorkerLost(f"{text}. Run the same command again") from None
                log.error(text)
        steps, passes = divmod(taken, self.sampler.accumulate)
        return self.dataset[next(islice(self.sampler.batch_specs(position + steps), passes, None))]


class WorkerLost(ValueError):
    """A loader process was killed, so that the run cannot go on, but may be started again."""

    exit_code = REQUEUE


def _iterate(loader: DataLoader[Batch | ValueError]) -> Any:
    """Start the loader processes; if one is killed, `next` raises an error within seconds.

    torch's handler of their end would raise it anywhere, also in the middle of an update of the weights.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        return iter(loader)
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _how_one_ended(workers: Sequence[BaseProcess]) -> str | None:
    """Return how one of the processes ended, if one did."""
    ending = wait([worker.sentinel for worker in workers], timeout=1)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join()  # or it has no exit code yet
            code = worker.exitcode or 0
            return f"by {Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return None


def _kill(workers: Sequence[BaseProcess]) -> None:
    """End loader processes that wait for a server that does not answer."""
    for worker in workers:
        worker.kill()


def _init_worker(stops: Event, number: int) -> None:
    """Ignore signals sent to all processes of a run: the training process needs its loaders to save."""
    files.process_stops = stops
    if number:
        log.setLevel(logging.ERROR)  # one says that a server does not answer
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # Called only by the thread that hands batches over, each time the training process was killed meanwhile.
    sys.excepthook = lambda *_: None
    separate_stderr()  # a forked process has done so already


def _check_shared_memory(workers: int, batches_bytes: int) -> None:
    """Raise if prefetched batches do not fit; otherwise the system would kill loader processes later."""
    processes = local_world_size()
    stats = os.statvfs(SHARED)
    needed, available = workers * batches_bytes, stats.f_blocks * stats.f_frsize // processes
    if needed > available > 0:  # 0 means unlimited
        raise ValueError(
            f"workers={workers} needs {needed / 1e9:.2f} GB of shared memory for prefetched views, but "
            f"{SHARED} has {available / 1e9:.2f} GB for them: use at most "
            f"workers={available // batches_bytes}, or give the container more "
            f"(docker run --shm-size={ceil(needed * processes / 1e9) + 1}g, or --ipc=host)"
        )


class _Steps(Dataset[Batch | ValueError]):
    """Make the batch of a spec, in a loader process; return ValueErrors, which the DataLoader would wrap."""

    def __init__(
        self,
        source: Source,
        views: tuple[View, ...],
        pixels: Pixels,
        augment: nn.Module | None,
        masking: Masking | None,
        sampler: Sampler,
        scaled_decoding: bool,
    ) -> None:
        self.source, self.views, self.pixels, self.augment = source, views, pixels, augment
        self.masking, self.sampler, self.scaled_decoding = masking, sampler, scaled_decoding
        self.by_size: dict[Size, list[int]] = {}
        for index, view in enumerate(views):
            self.by_size.setdefault(view.size, []).append(index)
        kinds = {(view.size, view.interpolation) for view in views}
        assert len(kinds) == len(self.by_size), "views of one size must have the same interpolation"

    @property
    def bytes_of_a_batch(self) -> int:
        """Return the size of the views of a batch."""
        pixels = sum(len(indices) * height * width for (height, width), indices in self.by_size.items())
        dtype = self.pixels.dtype if self.augment is None else torch.float32
        return self.sampler.share * self.pixels.channels * pixels * dtype.itemsize

    def __getitem__(self, spec: BatchSpec) -> Batch | ValueError:
        try:
            return self._batch(spec)
        except ValueError as error:
            return error

    def _batch(self, spec: BatchSpec) -> Batch:
        unreadable: list[UnreadableImage] = []
        failure: Exception | None = None
        times = LoadTimes(images=len(spec.samples))
        channels, dtype = self.pixels.channels, self.pixels.dtype
        views = {
            size: torch.empty((len(indices), len(spec.samples), channels, *size), dtype=dtype)
            for size, indices in self.by_size.items()
        }
        keys: Any = {"seed": self.sampler.seed, "epoch": spec.epoch, "samples": spec.samples}
        tries = draw_tries(self.views, **keys)
        read = torch.from_numpy(spec.samples).clone()
        for position, sample in enumerate(spec.samples.tolist()):
            image, cut = self.pixels.blank(), Cut(self.views, tries[position])
            try:
                if not isinstance(failure, SourceLost):  # which took minutes to find out
                    read[position], image, cut = self._read(sample, tries[position], unreadable, times)
            except (ValueError, SourceLost) as error:
                failure = error
            with times.measure("cut"):
                image, boxes = interleave(image), cut.boxes(image)
                for size, indices in self.by_size.items():
                    interpolation = self.views[indices[0]].interpolation
                    out = views[size][:, position]
                    crop_views(image, boxes[indices], size, interpolation=interpolation, out=out)
        rows = draw_photometry([view.photometry for view in self.views], **keys)
        flat = {size: of_size.flatten(0, 1) for size, of_size in views.items()}
        photometry = {
            size: torch.from_numpy(rearrange(rows[:, indices], "b v f -> (v b) f"))
            for size, indices in self.by_size.items()
        }
        if self.augment is not None:
            with times.measure("colour"):
                flat, photometry = {s: self.augment(flat[s], photometry[s]) for s in flat}, {}
        return Batch(
            epoch=spec.epoch,
            step=spec.step,
            samples=torch.from_numpy(spec.samples),
            read=read,
            views=flat,
            photometry=photometry,
            unreadable=tuple(unreadable),
            failure=failure,
            masks=self._masks(spec),
            times=times,
        )

    def _masks(self, spec: BatchSpec) -> Masks | None:
        if self.masking is None:
            return None
        return self.masking.draw(spec.epoch, spec.step, spec.first, len(spec.samples))

    def _read(
        self,
        sample: int,
        tries: NDArray[np.float64],
        unreadable: list[UnreadableImage],
        times: LoadTimes,
    ) -> tuple[int, Tensor, Cut]:
        """Return index, pixels and boxes of a sample, or of its first readable replacement."""
        for index in chain([sample], self.sampler.others(sample, REPLACEMENTS)):
            cut = Cut(self.views, tries)
            reduction = cut.reduction if self.scaled_decoding else None
            try:
                with times.measure("read"):
                    item = read_item(self.source, index)
                with times.measure("decode"):
                    image = decode_item(item, self.source.name(index), self.pixels, reduction)
                return index, image, cut
            except UnreadableImage as error:
                unreadable.append(error)
        raise ValueError(
            f"{REPLACEMENTS + 1} randomly chosen images cannot be read, the last one is {unreadable[-1]}. "
            "Check that the source is complete and can be reached."
        )

"""Batches of views from any step on; the same bytes whatever the number of loader processes."""

import os
import signal
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.images.pixels import RGB, Pixels
from dino_vit.data.sources.open import Source
from dino_vit.views.geometry import (
    Size,
    View,
    choose_boxes,
    cut_views,
    draw_photometry,
    draw_tries,
    interleave,
)
from dino_vit.views.photometry import Augment
from dino_vit.views.sampler import BatchSpec, Sampler

# More unreadable images than this in a row are no accident: the set is broken, or out of reach.
REPLACEMENTS = 10
SHARED = Path("/dev/shm")  # where Linux has the memory that processes share: in a container often 64 MB


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One process's views of a step, by size, view-major: all images' first view, then all images' second."""

    epoch: int
    step: int  # within the epoch
    samples: Tensor  # (images,), as the order has them, whether or not one was replaced
    read: Tensor  # (images,), those whose views these are: the samples, or what replaced one
    views: dict[Size, Tensor]  # uint8, float32 in [0, 1] if deeper or `Augment`'s, (views · images, C, h, w)
    photometry: dict[Size, Tensor]  # float32 (views · images, columns), for `Augment`, unless it is done
    unreadable: tuple[UnreadableImage, ...]  # images that another one replaced
    failure: str | None = None  # why one could not be replaced, and is blank

    def pin_memory(self) -> "Batch":
        """Return a copy that CUDA can fetch while it computes (the DataLoader calls this)."""
        return replace(
            self,
            views={size: tensor.pin_memory() for size, tensor in self.views.items()},
            photometry={size: tensor.pin_memory() for size, tensor in self.photometry.items()},
        )


class Loader:
    """Read, decode and cut the images of each step, in `workers` processes that outlive epochs.

    With `augment` they do the photometry as well, and hand over float32 views: four times the memory.
    """

    def __init__(
        self,
        *,
        source: Source,
        views: Sequence[View],
        sampler: Sampler,
        pixels: Pixels = RGB,
        augment: Augment | None = None,
        in_step: bool = False,
        workers: int = 0,
        prefetch: int = 2,
        pin: bool = False,
    ) -> None:
        if len(source) != sampler.length:
            raise ValueError(f"The sampler orders {sampler.length} images, but the source has {len(source)}.")
        self.dataset = _Steps(source, tuple(views), pixels, augment, sampler)
        self.sampler, self.in_step = sampler, in_step
        self.workers, self.prefetch, self.pin = workers, prefetch, pin
        if workers and SHARED.exists():
            _check_shared_memory(workers, prefetch * self.dataset.bytes_of_a_batch)

    def make(self, spec: BatchSpec) -> Batch:
        """Make one batch, here and now."""
        batch = self.dataset[spec]
        if isinstance(batch, ValueError):
            raise batch
        return batch

    def batches(self, position: int = 0) -> Generator[Batch]:
        """Yield the batches from a position on, without end; closing the iterator ends its processes.

        When too many images in a row are unreadable this is an error, but with `in_step` a batch with a blank
        image and its `failure`, for the caller to end all processes after the same step.
        """
        loader: DataLoader[Batch | ValueError] = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=_Specs(self.sampler, position),
            num_workers=self.workers,
            prefetch_factor=self.prefetch if self.workers else None,
            pin_memory=self.pin,
            generator=torch.Generator(),  # or it would draw from, and so change, the global one
            worker_init_fn=_outlive_signals,
        )
        batches: Any = iter(loader)
        try:
            for batch in batches:
                if isinstance(batch, ValueError):
                    raise batch
                if batch.failure and not self.in_step:
                    raise ValueError(batch.failure)
                yield batch
        finally:
            if self.workers:  # now, not when the last traceback lets go of the iterator
                batches._shutdown_workers()


def _outlive_signals(_: int) -> None:
    """Leave signals to the run: they often go to all its processes, and it needs its loaders to save."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _check_shared_memory(workers: int, each: int) -> None:
    """Make sure that the batches on their way have room; without it the system ends processes in mid-run."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = os.statvfs(SHARED)
    needed, room = workers * each, found.f_blocks * found.f_frsize // processes
    if needed > room > 0:  # none at all means that there is no bound
        raise ValueError(
            f"{workers} loader processes hold up to {needed / 1e9:.2f} GB of views in shared memory, "
            f"where {SHARED} has {room / 1e9:.2f} GB for them: take at most {room // each} workers, "
            f"or give the container more (docker run --shm-size={ceil(needed * processes / 1e9) + 1}g, "
            "or --ipc=host)"
        )


def _failure(unreadable: Sequence[UnreadableImage]) -> str:
    return (
        f"{REPLACEMENTS + 1} images chosen at random cannot be read, the last is {unreadable[-1]}. "
        f"Check that the source is complete and within reach."
    )


@dataclass(frozen=True)
class _Specs:
    """The sampler's plans as a fresh iterable; the epoch travels in them, so workers outlive epochs."""

    sampler: Sampler
    position: int

    def __iter__(self) -> Iterator[BatchSpec]:
        return self.sampler.batch_specs(self.position)


class _Steps(Dataset[Batch | ValueError]):
    """Map a plan to its batch, in the workers; returns the user's errors, so that they arrive unwrapped."""

    def __init__(
        self,
        source: Source,
        views: tuple[View, ...],
        pixels: Pixels,
        augment: Augment | None,
        sampler: Sampler,
    ) -> None:
        self.source, self.views, self.pixels, self.augment = source, views, pixels, augment
        self.sampler, self.seed = sampler, sampler.seed
        self.by_size: dict[Size, list[int]] = {}
        for number, view in enumerate(views):
            self.by_size.setdefault(view.size, []).append(number)
        if len({(view.size, view.interpolation) for view in views}) > len(self.by_size):
            raise ValueError("Views of one size are cut together: give them the same interpolation.")

    @property
    def bytes_of_a_batch(self) -> int:
        """Return the size of its views."""
        pixels = sum(len(numbers) * height * width for (height, width), numbers in self.by_size.items())
        dtype = self.pixels.dtype if self.augment is None else torch.float32
        return self.sampler.share * self.pixels.channels * pixels * dtype.itemsize

    def __getitem__(self, spec: BatchSpec) -> Batch | ValueError:
        try:
            return self._batch(spec)
        except ValueError as error:
            return error

    def _batch(self, spec: BatchSpec) -> Batch:
        unreadable: list[UnreadableImage] = []
        failure: str | None = None
        channels, dtype = self.pixels.channels, self.pixels.dtype
        cut = {
            size: torch.empty((len(numbers), len(spec.samples), channels, *size), dtype=dtype)
            for size, numbers in self.by_size.items()
        }
        tries = draw_tries(self.views, seed=self.seed, epoch=spec.epoch, samples=spec.samples)
        read = torch.from_numpy(spec.samples).clone()
        for place, sample in enumerate(spec.samples.tolist()):
            found = self._read(sample, unreadable)
            if found is None:
                failure = _failure(unreadable)
                image = self.pixels.blank()
            else:
                read[place], image = found
            _, height, width = image.shape
            image = interleave(image)
            boxes = choose_boxes(self.views, tries[place], height=height, width=width)
            for size, numbers in self.by_size.items():
                interpolation = self.views[numbers[0]].interpolation
                out = cut[size][:, place]
                cut_views(image, boxes[numbers], size, interpolation=interpolation, out=out)
        rows = draw_photometry(self.views, seed=self.seed, epoch=spec.epoch, samples=spec.samples)
        flat = {size: views.flatten(0, 1) for size, views in cut.items()}
        photometry = {
            size: torch.from_numpy(rearrange(rows[:, numbers], "b v f -> (v b) f"))
            for size, numbers in self.by_size.items()
        }
        return Batch(
            epoch=spec.epoch,
            step=spec.step,
            samples=torch.from_numpy(spec.samples),
            read=read,
            views=flat if self.augment is None else {s: self.augment(flat[s], photometry[s]) for s in flat},
            photometry=photometry if self.augment is None else {},
            unreadable=tuple(unreadable),
            failure=failure,
        )

    def _read(self, sample: int, unreadable: list[UnreadableImage]) -> tuple[int, Tensor] | None:
        """Read a sample, or else the first readable one of a row of others that depends on it alone.

        Return which one it was, and its image.
        """
        for index in chain([sample], self.sampler.others(sample, REPLACEMENTS)):
            try:
                return index, read_image(self.source, index, self.pixels)
            except UnreadableImage as error:
                unreadable.append(error)
        return None

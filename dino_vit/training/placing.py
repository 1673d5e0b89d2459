"""Where photometry runs, in the loader's workers or on the device: where a short measurement finds it faster.

Cutting, colouring and training form a line of stations, and a line is as fast as its slowest station. Colours
changed by the workers cost them time; changed on the device, they cost it time that it could train in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dino_vit.config.auto import Choice
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.distributed import all_reduce_mean
from dino_vit.data.sources.open import Source
from dino_vit.training.feeding import build_augment, build_pixels, build_views
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler

Place = Literal["worker", "device"]
IMAGES, ROUNDS = 8, 3
# The workers must be this much faster than the device, whose views take a quarter of the memory on their way.
CLEARLY = 1.1


class Costs(NamedTuple):
    """Seconds an image takes: in a worker to cut, to colour; here to fetch and colour, or only to fetch."""

    cut: float
    colour: float
    fetch_and_colour: float
    fetch: float


def resolve_place(
    config: PretrainConfig, before: Place | None, source: Source, *, workers: int, device: torch.device
) -> tuple[PretrainConfig, list[Choice]]:
    """Fill in `data.photometry`: as the run began, or as measured, the same for all processes."""
    if config.data.photometry != "auto":
        return config, []
    if before is not None:
        place, reason = before, "as the run began"
    elif not workers:
        place, reason = "device", "there are no loader processes"
    else:
        mine = measure(config, source, device)
        costs = Costs(*all_reduce_mean(torch.tensor(mine, device=device)).tolist())
        place, reason = choose_place(costs, workers)
    return replace(config, {"data.photometry": place}), [Choice("data.photometry", place, reason)]


def choose_place(costs: Costs, workers: int) -> tuple[Place, str]:
    """Return the place where the slower of the workers and this process takes less, and the reason."""
    on_device = max(costs.cut / workers, costs.fetch_and_colour)
    in_worker = max((costs.cut + costs.colour) / workers, costs.fetch)
    reason = f"{1 / on_device:.0f} images/s on the device, {1 / in_worker:.0f} in {workers} workers"
    return "worker" if in_worker * CLEARLY < on_device else "device", reason


def measure(config: PretrainConfig, source: Source, device: torch.device) -> Costs:
    """Time the stations on a few images of the source."""
    sampler = Sampler(length=len(source), batch_size=min(IMAGES, len(source)), seed=config.seed)
    loader = Loader(
        source=source, views=build_views(config), sampler=sampler, pixels=build_pixels(config), in_step=True
    )
    batches = loader.batches()
    augment, there = build_augment(config), build_augment(config).to(device)
    batch = next(batches)
    rows = batch.photometry

    def colour() -> list[Tensor]:
        return [augment(cut, rows[size]).share_memory_() for size, cut in batch.views.items()]

    def fetch(views: list[Tensor]) -> list[Tensor]:
        return [view.to(device, non_blocking=True) for view in views]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # as a worker has
        cut_time, colour_time = _seconds(lambda: next(batches), device), _seconds(colour, device)
    finally:
        torch.set_num_threads(threads)
    # A device is as fast as it can be with what it trains on at once; a CPU is no faster with more.
    times = 1 if device.type == "cpu" else ceil(config.data.batch_size / sampler.batch_size)
    pin, own = device.type == "cuda", sampler.batch_size
    cut = [enlarged(view, times, pin=pin) for view in batch.views.values()]
    coloured = [enlarged(view, times, pin=pin) for view in colour()]
    many = [enlarged(rows[size], times) for size in batch.views]
    here = _seconds(lambda: [there(*pair) for pair in zip(fetch(cut), many, strict=True)], device) / times
    fetched = _seconds(lambda: fetch(coloured), device) / times
    return Costs(*(time / own for time in (cut_time, colour_time, here, fetched)))


def enlarged(images: Tensor, times: int, *, pin: bool = False) -> Tensor:
    """Repeat images, and put them where the loader leaves those that CUDA fetches."""
    images = images.repeat(times, *[1] * (images.ndim - 1)) if times > 1 else images
    return images.pin_memory() if pin else images


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of some calls, after one that is not counted."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])

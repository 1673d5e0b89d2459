"""What an image costs in a worker and on the device, and so where its colours should be changed."""

import time
from collections.abc import Callable, Sequence
from math import ceil, sqrt
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.progress import plural
from dino_vit.core.runtime import synchronise
from dino_vit.core.text import printable
from dino_vit.data.images.reducing import reduced_size
from dino_vit.data.sources.files import is_url
from dino_vit.data.sources.source import Source
from dino_vit.views.build import MOST_WORKERS, build_augment, build_pixels, build_views
from dino_vit.views.geometry import View
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler
from dino_vit.views.times import LoadTimes

TIMED_IMAGES, TIMED_ROUNDS = 8, 3
# The workers must be this much faster than the device, to which uint8 views are a quarter of the transfer.
CLEARLY = 1.1
# An image costs as much as decoding so many pixels besides its own, which cost this share where it is decoded
# at a smaller scale; advice must save this factor.
OVERHEAD, SCALED, LARGE = 90_000, 0.22, 2


class Costs(NamedTuple):
    """Seconds per image: in a worker to crop and to colour it; on the device to receive and colour it."""

    crop: float
    colour: float
    colour_on_device: float


def advice_on_size(
    sizes: Sequence[tuple[int, int]], views: Sequence[View], source: str, *, scaled_decoding: bool
) -> str | None:
    """Return what to do if images of these heights and widths are far larger than the views."""
    # The smallest box of a view, if it is square, then still has a pixel for each of the view's own.
    needed = max(max(view.size) / sqrt(view.scale[0]) for view in views)
    side = ceil(needed / 64) * 64
    whole, packed = (
        median(height * width for height, width in of)
        for of in (sizes, [reduced_size(*one, side) for one in sizes])
    )
    now = OVERHEAD + (SCALED * whole if scaled_decoding else whole)
    faster = now / (OVERHEAD + packed)
    if faster < LARGE:
        return None
    height, width = (median(lengths) for lengths in zip(*sizes, strict=True))
    text = (
        f"images of {height:g} × {width:g} pixels (median) are larger than their views need: "
        f"`dino-vit pack {source} packed size={side}` makes them about {faster:.0f} times faster to decode"
    )
    return text if scaled_decoding else f"{text}, data.scaled_decoding=true about {1 / SCALED:.0f} times"


def advice_on_waiting(
    config: PretrainConfig,
    times: LoadTimes,
    sizes: Sequence[tuple[int, int]],
    *,
    workers: int,
    cores: int,
) -> str:
    """Return what a run that waits for images takes for one, and what to do about the longest part.

    `sizes` are heights and widths of some images, `cores` those of this process and its workers.
    """
    seconds = {name: getattr(times, name) / times.images for name in ("read", "decode", "cut", "colour")}
    if not times.colour:
        del seconds["colour"]
    longest = max(seconds, key=lambda name: seconds[name])
    source, scaled = printable(config.data.source), config.data.scaled_decoding
    large = None
    if longest in ("decode", "cut"):
        large = advice_on_size(sizes, build_views(config), source, scaled_decoding=scaled)
    # Processes that wait for a disk or a network leave their cores to others.
    more = min(2 * cores if longest == "read" else cores - 1, MOST_WORKERS)
    remedies = [f"data.workers={more}"] if more > workers else []
    if longest == "colour":
        remedies.append("data.photometry=device")
    elif longest == "read" and is_url(config.data.source):
        remedies.append("a copy of the images on a local disk, as data.cache_gb makes of shards")
    elif longest == "read":
        remedies.append(f"a faster disk, or shards instead of many files (`dino-vit pack {source} packed`)")
    elif not large:
        remedies.append("more cores" if longest == "decode" else "more cores, or a lower views.local_count")
    *most, last = [f"{1000 * value:.3g} ms to {name}" for name, value in seconds.items()]
    who = plural(workers, "loader process", "loader processes") if workers else "this process alone"
    return (
        f"an image takes {', '.join(most)} and {last}, by {who} on {plural(cores, 'core')}."
        + (f" Try {', or '.join(remedies)}." if remedies else "")
        + (f" {large[0].upper()}{large[1:]}." if large else "")
    )


def faster_photometry(costs: Costs, workers: int) -> tuple[Literal["worker", "device"], str]:
    """Return where photometry should run, and why.

    Workers and this process form a pipeline, which is as fast as its slower stage.
    """
    on_device = max(costs.crop / workers, costs.colour_on_device)
    in_worker = (costs.crop + costs.colour) / workers
    reason = f"{1 / on_device:.0f} images/s on the device, {1 / in_worker:.0f} in {plural(workers, 'worker')}"
    return "worker" if in_worker * CLEARLY < on_device else "device", reason


def measure_costs(config: PretrainConfig, source: Source, device: torch.device) -> Costs:
    """Time both stages on a few images of the source."""
    sampler = Sampler(length=len(source), batch_size=min(TIMED_IMAGES, len(source)), seed=config.seed)
    loader = Loader(
        source=source,
        views=build_views(config),
        sampler=sampler,
        pixels=build_pixels(config),
        scaled_decoding=config.data.scaled_decoding,
        in_step=True,
    )
    batches = loader.batches()
    augment, augment_on_device = build_augment(config), build_augment(config).to(device)
    batch = next(batches)
    # An accelerator is timed on a full batch, where it is fastest; a CPU is no faster with more images.
    times = 1 if device.type == "cpu" else ceil(config.data.batch_size / sampler.batch_size)
    full = [repeat_images(views, times) for views in batch.views.values()]
    rows = [repeat_images(batch.photometry[size], times) for size in batch.views]

    def colour() -> list[Tensor]:
        return [augment(views, batch.photometry[size]) for size, views in batch.views.items()]

    def colour_on_device() -> list[Tensor]:
        on_device = [views.to(device, non_blocking=True) for views in full]
        return [augment_on_device(*pair) for pair in zip(on_device, rows, strict=True)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # as a worker has
        crop_time, colour_time = _seconds(lambda: next(batches), device), _seconds(colour, device)
    finally:
        torch.set_num_threads(threads)
    seconds = crop_time, colour_time, _seconds(colour_on_device, device) / times
    return Costs(*(one / sampler.batch_size for one in seconds))


def repeat_images(images: Tensor, times: int) -> Tensor:
    """Repeat images along the first axis, in pinned memory where there is CUDA, as the loader leaves them."""
    images = images.repeat(times, *[1] * (images.ndim - 1)) if times > 1 else images
    return images.pin_memory() if torch.cuda.is_available() else images


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a few calls, after one warm-up call."""
    times = []
    for _ in range(TIMED_ROUNDS + 1):
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])

"""Time the parts of a step on this device; `config/length.py` puts a step of any network together."""

import time
from collections.abc import Callable
from math import prod
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dino_vit.config.facts import BlockTimes, Speed
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.distributed import wait_for_device, world_size
from dino_vit.core.runtime import DTYPES, choose_precision, cores_of_a_process
from dino_vit.data.statistics import ImageSummary
from dino_vit.data.stores.calls import wrap
from dino_vit.method.terms.edges import AROUND, edge_loss, edges_around
from dino_vit.models.sequences import Sequences
from dino_vit.models.stems import ConvStem, PatchStem
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.build import build_augment, build_pixels, build_views, decoded_bytes
from dino_vit.views.loader import Loader, choose_workers
from dino_vit.views.sampler import BatchSpec, Sampler

CPU, REPEATS = torch.device("cpu"), 3
WIDTHS, HEAD = (96, 192, 384), 32  # of blocks, and of one of their heads
SHORT, LONG = 10, 128  # tokens of a sequence
PATCH, MAPS = 8, 12  # of a stem; channels of its first map
# Operations of a block forward and backward, pixels of views, numbers in memory; of FILL times as much on an
# accelerator, which it fills.
FLOPS, PIXELS, NUMBERS, FILL = 4e9, 400_000, 2**24, 50
LARGER = 3  # sides of an image than of its views, at most, where it is decoded no larger than they need it


def measure_speed(config: PretrainConfig, summary: ImageSummary, images: int, device: torch.device) -> Speed:
    """Return the speed of this process, with the views and the augmentation of a run."""
    is_cpu, workers = device.type == "cpu", choose_workers(config.data.workers, world_size())
    fill, precision = 1 if is_cpu else FILL, choose_precision(config.compute.precision, device)
    pixels, scaled = build_pixels(config), config.data.scaled_decoding
    memory = decoded_bytes(images, summary, pixels, scaled=scaled, workers=workers)
    numbers = torch.zeros(fill * NUMBERS, device=device)
    with torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision != "no"):
        return Speed(
            blocks=tuple(_block_times(width, device, fill * FLOPS) for width in WIDTHS),
            **_pixel_seconds(config, summary.image_size, device, fill * PIXELS),
            byte=_seconds(lambda: numbers.add_(numbers), device) / (8 * len(numbers)),
            launch=2 * SHORT * _token_seconds(WIDTHS[0], SHORT, device, flops=1.0)[1],
            cores=cores_of_a_process(world_size()),
            threads=torch.get_num_threads() if is_cpu else 1,
            workers=workers,
            keeps_images=config.data.keep_decoded and memory is not None,
        )


def _pixel_seconds(
    config: PretrainConfig, image_size: int, device: torch.device, pixels: int
) -> dict[str, float]:
    """Return what a pixel of a view takes: in a worker, in the augmentation, in a stem and as a target."""
    channels, views = config.data.channels, build_views(config)
    largest = max(max(view.size) for view in views)
    side = min(image_size, LARGER * largest) if config.data.scaled_decoding else image_size
    image = torch.zeros(channels, side, side, dtype=build_pixels(config).dtype)
    count = max(1, pixels // sum(prod(view.size) for view in views))
    sampler = Sampler(length=count, global_batch=count, seed=config.seed)
    loader = Loader(source=wrap([image] * count), views=views, sampler=sampler, pixels=build_pixels(config))
    batch, threads = loader.make(BatchSpec(0, 0, np.arange(count))), torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    crop = _seconds(lambda: loader.make(BatchSpec(0, 0, np.arange(count))), CPU)
    torch.set_num_threads(threads)

    augment = build_augment(config, ((0.5,) * channels, (0.25,) * channels)).to(device)
    on_device = [(views.to(device), batch.augment[size]) for size, views in batch.views.items()]
    augmented = _seconds(lambda: [augment(*views) for views in on_device], device)
    seen = augment(*on_device[0])
    seen = F.pad(seen, (0, max(0, PATCH - seen.shape[3]), 0, max(0, PATCH - seen.shape[2])))
    sizes: Any = {"patch_size": (PATCH, PATCH), "channels": channels, "width": WIDTHS[0]}
    rows, columns = (side // PATCH for side in seen.shape[-2:])
    seen = seen[:, :, : rows * PATCH, : columns * PATCH]
    stem, conv = PatchStem(**sizes).to(device), ConvStem(**sizes, conv_width=4 * MAPS).to(device)
    predicted = torch.zeros(len(seen), rows * columns, AROUND, device=device)
    return {
        "crop": crop / sum(views[:, 0].numel() for views, _ in on_device),
        "augment": augmented / sum(views[:, 0].numel() for views, _ in on_device),
        "stem": _seconds(lambda: stem(seen), device) / seen[:, 0].numel(),
        "conv": _seconds(lambda: conv(seen), device) / (MAPS * seen[:, 0].numel()),
        "edges": _seconds(lambda: edge_loss(predicted, edges_around(seen, (rows, columns))), device)
        / seen[:, 0].numel(),
    }


def _block_times(width: int, device: torch.device, flops: float) -> BlockTimes:
    """Return what a token takes, and how much of it by each token that it attends to."""
    times = [_token_seconds(width, tokens, device, flops) for tokens in (SHORT, LONG)]
    line = list[float]()
    for short, long in zip(*times, strict=True):
        pair = min(max(0.01, (long - short) / (LONG - SHORT) / short * SHORT), 0.5) * short / SHORT
        line += [short - SHORT * pair, pair]
    return BlockTimes(width, *line)


def _token_seconds(width: int, tokens: int, device: torch.device, flops: float) -> tuple[float, float]:
    """Return what a token of sequences takes in a block: forward, and forward and backward."""
    block = VisionTransformer(width=width, depth=1, heads=width // HEAD).to(device).blocks[0]
    count = max(1, round(flops / (144 * width**2 * tokens)))
    x = torch.randn(2 * count * tokens, width, device=device)
    one, two = Sequences([(2 * count, tokens)]), Sequences([(count, tokens)] * 2)  # sizes of views
    with torch.no_grad():
        forward = _seconds(lambda: block(x.view(2 * count, tokens, width), one), device)
    drop = torch.ones(2, len(x), 1, device=device)
    x.requires_grad_()
    trained = _seconds(lambda: block(x, two, drop).sum().backward(), device)
    return forward / len(x), trained / len(x)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of some calls, after one that loads libraries and kernels."""
    times = []
    for _ in range(1 + REPEATS):
        wait_for_device(device)
        start = time.perf_counter()
        work()
        wait_for_device(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])

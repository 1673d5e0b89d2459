"""Build the input from a configuration: views, augmentation, loader."""

import os
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.config.objects import find
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core import Size
from dino_vit.core.distributed import agree, in_all_processes
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decoded import DecodedImages, room_for
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.open import open_source
from dino_vit.data.shards import Prefetch, RemoteShards
from dino_vit.data.statistics import ImageSummary
from dino_vit.views.augment import Augment, CustomAugment, ViewAugment
from dino_vit.views.eval_transform import EvalTransform
from dino_vit.views.geometry import View
from dino_vit.views.loader import PREFETCH, Loader, choose_workers
from dino_vit.views.masks import Masking, PatchDrop
from dino_vit.views.sampler import (
    BatchSpec,
    Sampler,
    ShardUses,
    WindowOrder,
)

# As in iBOT and DINOv2: the share of the global views that is masked, and of the patches of such a view.
MASKED_VIEWS, MASKED_PATCHES = 0.5, (0.1, 0.5)
ROOM = 0.9  # of the disk of data.cache, at most: checkpoints may lie there too


def build_views(config: PretrainConfig) -> tuple[View, ...]:
    """Return the views of an image, global ones first."""
    views, augment = config.views, config.augment
    times = config.gram.scale if config.gram else 1  # an earlier teacher sees the global views larger
    common = augment.model_dump(exclude={"rotation", "blur", "blur_sigma", "solarise", "module"})
    narrow, wide = augment.blur_sigma
    first, other, local = (
        ViewAugment(**common, blur=blur, blur_sigma=(size * narrow, size * wide), solarise=solarise)
        for size, blur, solarise in zip((times, times, 1), augment.blur, augment.solarise, strict=True)
    )
    height, width = views.global_shape
    enlarged = times * height, times * width
    groups = (
        (1, enlarged, views.global_scale, first),
        (views.global_count - 1, enlarged, views.global_scale, other),
        (views.local_count, views.local_shape, views.local_scale, local),
    )
    return tuple(
        View(size=size, scale=scale, augment=rotated(settings, augment.rotation, size))
        for count, size, scale, settings in groups
        for _ in range(count)
    )


def rotated(augment: ViewAugment, degrees: float, size: Size) -> ViewAugment:
    """Add a rotation: by any angle, or by turns that keep the height and width of the view."""
    height, width = size
    if degrees != 90:
        return replace(augment, rotation=degrees)
    return replace(augment, turn=90 if height == width else 180)


def build_pixels(config: PretrainConfig) -> Pixels:
    """Return what images are converted to; 8 bits while `data.bits` is not resolved."""
    data = config.data
    return Pixels(channels=data.channels, bits=data.bits or 8, range=data.range, max_pixels=data.max_pixels)


def normalisation(config: PretrainConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and std of a completed configuration."""
    mean, std = config.data.mean, config.data.std
    assert mean is not None, "measured when the configuration is completed"
    assert std is not None
    return mean, std


def open_images(config: PretrainConfig) -> ImageSet:
    """Open the images of a run; all processes must see the same."""
    data = config.data
    with in_all_processes():
        return agree(
            "images",
            lambda: open_source(data.source or data.images, data.labels, several=data.several),
            ImageSet.describe,
        )


def build_augment(
    config: PretrainConfig, statistics: tuple[Sequence[float], Sequence[float]] | None = None
) -> Augment | CustomAugment:
    """Return the augmentation, on the host, with the mean and std of the configuration or others."""
    mean, std = statistics or normalisation(config)
    augment = config.augment
    if augment.module:
        module: Any = find(augment.module)
        return CustomAugment(module, mean=mean, std=std)
    sigma_max = (config.gram.scale if config.gram else 1) * augment.blur_sigma[1]
    return Augment(mean=mean, std=std, sigma_max=sigma_max, hue_max=augment.hue)


def build_eval_transform(config: PretrainConfig) -> EvalTransform:
    """Return the evaluation transform: the size of the network's images, the pixels of the views."""
    mean, std = normalisation(config)
    return EvalTransform(size=config.image_shape, mean=mean, std=std, pixels=build_pixels(config))


def build_masking(config: PretrainConfig, global_batch: int) -> Masking:
    """Return how the patches of global views are masked."""
    height, width = config.views.global_shape
    return Masking(
        seed=config.seed,
        grid=(height // config.model.patch_size, width // config.model.patch_size),
        views=config.views.global_count,
        batch=global_batch,
        probability=MASKED_VIEWS,
        ratio=MASKED_PATCHES,
    )


def build_patch_drop(config: PretrainConfig, global_batch: int) -> PatchDrop:
    """Return how the patches of global views that the student sees are drawn."""
    patches = prod(side // config.model.patch_size for side in config.views.global_shape)
    return PatchDrop(
        seed=config.seed,
        patches=patches,
        kept=max(1, round(patches * (1 - config.model.patch_drop))),
        views=config.views.global_count,
        batch=global_batch,
    )


def build_loader(
    config: PretrainConfig,
    source: ImageSet,
    *,
    global_batch: int,
    rank: int,
    world_size: int,
    pin: bool,
) -> Loader:
    """Return the loader of one process."""
    if config.data.order == "window" and not any(part.shards for part in source.parts):
        raise ValueError(
            "data.order=window walks through tar shards or zips, but "
            f"data.source={config.data.images} has none: give data.order=global, or write shards with "
            "`dino-vit pack`"
        )
    sampler = Sampler(
        length=len(source),
        global_batch=global_batch,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        accumulate=config.optim.accumulate,
        shard_starts=shard_starts(source.parts) if config.data.order == "window" else None,
        window=config.data.window,
    )
    remote = [n for n, part in enumerate(source.parts) if part.shards and part.shards.is_remote]
    prefetches = []
    for number in remote:
        first = len(shard_starts(source.parts[:number])) - 1
        prefetches.append(build_prefetch(config, source.parts[number], sampler, first, len(remote)))
    return Loader(
        source=source,
        views=build_views(config),
        sampler=sampler,
        pixels=build_pixels(config),
        prefetch=[prefetch for prefetch in prefetches if prefetch],
        masking=build_masking(config, global_batch) if config.loss.patch_weight else None,
        patch_drop=build_patch_drop(config, global_batch) if config.model.patch_drop else None,
        scaled_decoding=config.data.scaled_decoding,
        workers=choose_workers(config.data.workers, world_size),
        pin=pin,
    )


def decoded_bytes(
    images: int, summary: ImageSummary, pixels: Pixels, *, scaled: bool, workers: int
) -> int | None:
    """Return the memory that decoded images take; None where there is no room, or nothing to keep."""
    # Arrays are decoded already, and deeper images are four times as large.
    if pixels.bits != 8 or not any(image.file_bytes for image in summary.images):
        return None
    sizes = [(image.height, image.width) for image in summary.images]
    return room_for(images, sizes, pixels.channels, scaled=scaled, workers=workers)


def keep_decoded(loader: Loader, summary: ImageSummary) -> str | None:
    """Let a loader keep what it decodes, if there is room; return a note on it, if so."""
    images, scaled = len(loader.source), loader.scaled_decoding
    expected = decoded_bytes(images, summary, loader.pixels, scaled=scaled, workers=loader.workers)
    if expected is None:
        return None
    loader.decoded = DecodedImages(images, expected)
    text = f"decoded images stay in memory, about {expected / 1e6:,.0f} MB"
    return f"{text} (data.keep_decoded=false decodes them each time)"


def shard_starts(parts: Sequence[ImageSet]) -> NDArray[np.int64]:
    """Return where the images of each shard begin; other images are each a shard of its own."""
    sizes = [np.diff(part.shards.starts) if part.shards else np.ones(len(part), np.int64) for part in parts]
    return np.cumsum(np.concatenate([[0], *sizes]))


def build_prefetch(
    config: PretrainConfig,
    source: ImageSet,
    sampler: Sampler,
    first: int = 0,
    sources: int = 1,
) -> Prefetch | None:
    """Let one of several sources, by its first shard, read from copies; it may fill its part of the cache."""
    shards, data = source.shards, config.data
    assert isinstance(shards, RemoteShards), "others need no copies"
    if data.cache:
        shards.folder = Path(data.cache)
    if not data.cache_gb:
        return None
    shards.folder.mkdir(parents=True, exist_ok=True)
    room = disk_usage(shards.folder).free + shards.copied_bytes()
    shards.limit = min(data.cache_gb * 1e9, ROOM * room)
    limit = shards.limit / sources
    # One process of a host makes copies.
    order, is_other = sampler.build_order(), int(os.environ.get("LOCAL_RANK", "0")) > 0
    sizes = np.sort(shards.sizes)[::-1]
    if not isinstance(order, WindowOrder):
        fits = sizes.sum() <= limit  # or none: each may be needed at any time
        return Prefetch(shards, lambda _: np.zeros_like(sizes), 1, limit) if fits and not is_other else None
    needed = sizes[: data.window + 2].sum()
    if needed > limit:
        raise ValueError(
            f"data.window={data.window} mixes shards of {needed / 1e9:.2g} GB at a time, more than "
            f"data.cache_gb={data.cache_gb:g} and the disk of {shards.folder} allow: give a larger cache or "
            "a smaller window (or data.cache_gb=0, which requests each image by itself)"
        )
    # Half a window beyond what workers read ahead: a run that is stopped has fetched little in vain.
    batches = choose_workers(data.workers, sampler.world_size) * PREFETCH + 1
    ahead = order.span // 2 + ceil(batches / sampler.accumulate) * sampler.global_batch
    uses = ShardUses(sampler, order, len(shards.sizes), first)
    return None if is_other else Prefetch(shards, uses.next, ahead, limit)


def make_views(
    config: PretrainConfig, source: ImageSet, samples: Sequence[int], epoch: int
) -> list[list[Tensor]]:
    """Make the views of samples in an epoch again, as the networks get them but with values from 0 to 1.

    Returns the views of each sample, global ones first.
    """
    sampler = Sampler(length=len(source), global_batch=1, seed=config.seed)
    loader = Loader(
        source=source,
        views=build_views(config),
        sampler=sampler,
        pixels=build_pixels(config),
        scaled_decoding=config.data.scaled_decoding,
    )
    # The views of a sample depend on seed, epoch and sample alone, so any step of the epoch has them.
    batch = loader.make(BatchSpec(epoch, 0, np.asarray(samples, dtype=np.int64)))
    channels = config.data.channels
    # Mean 0 and standard deviation 1 leave the values from 0 to 1.
    augment = build_augment(config, ((0.0,) * channels, (1.0,) * channels))
    by_size = [
        rearrange(augment(views, batch.augment[size]), "(v b) c h w -> b v c h w", b=len(samples))
        for size, views in batch.views.items()
    ]
    return [[view for views in by_size for view in views[sample]] for sample in range(len(samples))]

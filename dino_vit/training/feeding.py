"""What a run is fed with: its views, and the loader that cuts them, as the config has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from accelerate import Accelerator
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.config.checks import Plan
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import cores_of_a_process
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.sources.open import Source
from dino_vit.views.geometry import View
from dino_vit.views.loader import Loader
from dino_vit.views.photometry import Augment, ViewPhotometry
from dino_vit.views.preparation import Preparation
from dino_vit.views.sampler import BatchSpec, Sampler


def build_loader(
    config: PretrainConfig,
    plan: Plan,
    source: Source,
    weights: NDArray[np.float64] | None,
    accelerator: Accelerator,
) -> Loader:
    sampler = Sampler(
        length=len(source),
        batch_size=plan.global_batch,
        seed=config.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        accumulate=config.optim.accumulate,
        weights=weights,
    )
    return Loader(
        source=source,
        views=build_views(config),
        sampler=sampler,
        pixels=build_pixels(config),
        in_step=True,
        augment=build_augment(config) if config.data.photometry == "worker" else None,
        workers=choose_workers(config, accelerator),
        pin=accelerator.device.type == "cuda",
    )


def choose_workers(config: PretrainConfig, accelerator: Accelerator) -> int:
    """Return the loader processes of this process: its share of the cores, less the one it needs itself."""
    if config.data.workers is not None:
        return config.data.workers
    return min(cores_of_a_process(accelerator.num_processes) - 1, 16)


def build_pixels(config: PretrainConfig) -> Pixels:
    """Return what images are converted to; as long as `data.bits` is open, 8 bits."""
    data = config.data
    return Pixels(channels=data.channels, bits=data.bits or 8, range=data.range, max_pixels=data.max_pixels)


def normalisation(config: PretrainConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std, which opening a run has measured if they were open."""
    mean, std = config.data.mean, config.data.std
    assert mean is not None, "it is measured when a run is opened"
    assert std is not None
    return mean, std


def build_augment(config: PretrainConfig) -> Augment:
    """Return the photometry of views, on the host."""
    mean, std = normalisation(config)
    photometry = config.photometry
    return Augment(mean=mean, std=std, sigma_max=photometry.blur_sigma[1], hue_max=photometry.hue)


def build_preparation(config: PretrainConfig) -> Preparation:
    """Return how images are brought to the networks for an evaluation: as they were to learn from."""
    mean, std = normalisation(config)
    return Preparation(size=config.views.global_shape, mean=mean, std=std, pixels=build_pixels(config))


def make_views(
    config: PretrainConfig,
    source: Source,
    samples: Sequence[int],
    epoch: int,
    weights: NDArray[np.float64] | None = None,
) -> list[list[Tensor]]:
    """Make the views of samples in an epoch again, as the networks see them but for normalisation.

    For each sample its views, global ones first, with values from 0 to 1.
    """
    sampler = Sampler(length=len(source), batch_size=1, seed=config.seed, weights=weights)
    loader = Loader(source=source, views=build_views(config), sampler=sampler, pixels=build_pixels(config))
    batch = loader.make(BatchSpec(epoch, 0, np.asarray(samples, dtype=np.int64)))
    channels = config.data.channels
    augment = Augment(mean=(0,) * channels, std=(1,) * channels, sigma_max=config.photometry.blur_sigma[1])
    made: list[list[Tensor]] = [[] for _ in samples]
    for size, cut in batch.views.items():
        coloured = augment(cut, batch.photometry[size])
        for of_samples in rearrange(coloured, "(v b) c h w -> v b c h w", b=len(samples)):
            for views, view in zip(made, of_samples, strict=True):
                views.append(view)
    return made


def build_views(config: PretrainConfig) -> tuple[View, ...]:
    """Return the views that the config asks for, global ones first."""
    views, p = config.views, config.photometry
    common = p.model_dump(exclude={"blur", "solarise"})
    first, other, local = (
        ViewPhotometry(**common, blur=blur, solarise=solarise)
        for blur, solarise in zip(p.blur, p.solarise, strict=True)
    )

    def whole(photometry: ViewPhotometry) -> View:
        shape, scale = views.global_shape, views.global_scale
        return View(size=shape, scale=scale, ratio=views.ratio, photometry=photometry)

    part = View(size=views.local_shape, scale=views.local_scale, ratio=views.ratio, photometry=local)
    return (whole(first), *[whole(other)] * (views.global_count - 1), *[part] * views.local_count)

"""Fill in the settings that were left open, from the images, from trained weights, or as the run began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dino_vit.config.auto import Choice, resolve_auto, resolve_init
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import ConfigError, Problem, get, given_keys
from dino_vit.core.checkpoint import Checkpoint
from dino_vit.core.distributed import all_gather, world_size
from dino_vit.core.sizes import height_width
from dino_vit.data.sources.open import Source
from dino_vit.data.statistics import INSPECTED, MEASURED, ImageSummary, inspect_images, measure, sample
from dino_vit.training.feeding import build_pixels


def resolve(
    config: PretrainConfig,
    source: Source,
    global_batch: int,
    trained: Mapping[str, Any] | None,
    found: Checkpoint | None,
    device: torch.device,
) -> tuple[PretrainConfig, list[Choice], list[str]]:
    """Fill in what the images, the recipe and trained weights decide; return also what the images are."""
    indices = sample(source, config.seed, INSPECTED)
    seen = inspect_images(source, indices, max_pixels=config.data.max_pixels)
    choices: list[Choice] = []
    if trained is not None:
        config, choices = _take_architecture(config, trained)
    config, for_init = resolve_init(config, given_keys(config))
    # Over several processes its statistics need the collectives that torch has on CUDA alone.
    batch_norm = device.type == "cuda" or world_size() == 1
    config, for_data = fit_to(seen, config, source, global_batch, batch_norm=batch_norm)
    if not any(image.fits(config.data.channels) for image in seen.images):
        said = f"not data.channels={config.data.channels}"
        text = f"the images of {config.data.source} have {seen.channels} channels, {said}"
        ways = "set it, data.mean and data.std (null: measured) accordingly"
        raise ConfigError([Problem(f"{text}; {ways}", ("data.channels",))])
    config, for_pixels = _resolve_pixels(config, seen, found)
    config, measured, range_ = _measure(config, source, device)
    said_of = {choice.key: choice for choice in (*choices, *for_init, *for_data, *for_pixels, *measured)}
    return config, list(said_of.values()), [seen.describe(build_pixels(config)), *range_]


def fit_to(
    seen: ImageSummary, config: PretrainConfig, source: Source, global_batch: int, *, batch_norm: bool = True
) -> tuple[PretrainConfig, list[Choice]]:
    """Fill in what `recipe: auto` decides from the images."""
    return resolve_auto(
        config,
        given_keys(config),
        image_size=seen.image_size,
        images=len(source),
        channels=seen.channels,
        global_batch=global_batch,
        batch_norm=batch_norm,
    )


def _resolve_pixels(
    config: PretrainConfig, seen: ImageSummary, found: Checkpoint | None
) -> tuple[PretrainConfig, list[Choice]]:
    """Settle the depth; a run that goes on keeps what it found out at its start."""
    if found:
        before = PretrainConfig.model_validate(found.metadata["config"], strict=False).data
        names = [name for name in ("bits", "mean", "std") if getattr(config.data, name) is None]
        return replace(config, {f"data.{name}": getattr(before, name) for name in names}), []
    if config.data.bits is not None:
        return config, []
    choice = Choice("data.bits", seen.bits, "as the images have")
    return replace(config, {choice.key: choice.value}), [choice] if seen.bits > 8 else []


def _measure(
    config: PretrainConfig, source: Source, device: torch.device
) -> tuple[PretrainConfig, list[Choice], list[str]]:
    """Measure mean and std where they are open, and check that images can be used as they are wanted."""
    wanted = [name for name in ("mean", "std") if getattr(config.data, name) is None]
    pixels = build_pixels(config)
    indices = sample(source, config.seed, MEASURED if wanted else INSPECTED)
    measured = measure(source, indices, pixels)
    # The first process's, lest others sum up in another order.
    figures = all_gather(torch.tensor([measured.mean, measured.std], device=device))[:2].tolist()
    choices = []
    for name, figure in zip(("mean", "std"), figures, strict=True):
        values = tuple(float(f"{value:.4g}") for value in figure)
        if name in wanted:
            choices.append(Choice(f"data.{name}", values, f"measured on {measured.images} images"))
            if name == "std" and min(values) <= 0:
                raise ValueError(
                    f"channel {values.index(min(values))} is the same everywhere in the {measured.images} "
                    "images measured, so it has no std; leave it out, or give data.std"
                )
    said = []
    if pixels.bits == 16 and measured.highest < 0.25:
        said.append(
            f"no value is above {measured.highest:.1%} of the scale, where brightness, contrast and solarise "
            "do little; data.range=[low, high] says which values are black and white"
        )
    return replace(config, {choice.key: choice.value for choice in choices}), choices, said


def _take_architecture(
    config: PretrainConfig, trained: Mapping[str, Any]
) -> tuple[PretrainConfig, list[Choice]]:
    """Set the model's knobs to what the trained weights are; the user's must not say otherwise."""
    height, width = patch = height_width(trained["patch_size"])
    if height != width:
        raise ValueError(f"{config.init and config.init.weights} has patches of {patch}, not square ones")
    facts = {"width": trained["width"], "depth": trained["depth"], "heads": trained["heads"]}
    known = {f"model.{name}": value for name, value in facts.items()}
    known |= {"model.patch_size": height, "model.registers": trained["registers"]}
    given = given_keys(config)
    wrong = [key for key in known if key in given and get(config, key) not in (None, known[key])]
    if "model.arch" in given and config.model.arch and config.model.shape != tuple(facts.values()):
        wrong.append("model.arch")
    if wrong:
        text = ", ".join(f"{key}={get(config, key)}" for key in wrong)
        raise ValueError(f"{text} is not what the weights of init.weights are; leave it out")
    return replace(config, known), [
        Choice(key, value, "as the trained weights are") for key, value in known.items()
    ]

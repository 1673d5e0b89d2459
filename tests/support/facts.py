"""Runs as values, from facts that a test makes up."""

from typing import Any

from dino_vit.config.complete import DecidedRun, complete
from dino_vit.config.facts import BlockTimes, ImageFacts, RunFacts, Speed
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import ChannelStatistics


def facts_of(
    *,
    images: int = 6400,
    size: int = 224,
    channels: int = 3,
    processes: int = 1,
    device: str = "cpu",
    likeness: float = 0.0,
    **more: Any,
) -> RunFacts:
    measured = ChannelStatistics((0.5,) * channels, (0.25,) * channels, 1.0, 64)
    described = ImageFacts(
        count=images,
        size=size,
        channels=channels,
        readable_channels=frozenset({channels}),
        likeness=likeness,
        measured=measured,
    )
    return RunFacts(images=described, processes=processes, device=device, **more)


def slowed(factor: float, **changes: Any) -> Speed:
    """Return the default speed, so many times as slow."""
    speed = Speed()
    blocks = tuple(BlockTimes(each.width, *(factor * value for value in each[1:])) for each in speed.blocks)
    names = "augment", "stem", "conv", "edges", "crop", "byte"
    return speed._replace(blocks=blocks, **{name: factor * getattr(speed, name) for name in names}, **changes)


def run_of(*overrides: str, **facts: Any) -> DecidedRun:
    """Complete a config with facts, as `facts_of` takes them."""
    return complete(load(PretrainConfig, None, ["data.source=photos", *overrides]), facts_of(**facts))

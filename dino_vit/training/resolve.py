"""Complete a configuration from the facts: what the images are, the launch, trained weights, the checkpoint.

This happens once, when a run is set up; nothing changes the configuration afterwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dino_vit.config.auto import ENOUGH_IMAGES, Choice, auto_choices, init_choices, network_ladder
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import AUTO_KEYS, FITTED_KEYS, PretrainConfig
from dino_vit.config.settings import get, given_keys, result_changes, settings_of
from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoint
from dino_vit.core.distributed import all_gather, all_reduce_mean
from dino_vit.core.progress import plural
from dino_vit.core.runtime import choose_precision
from dino_vit.core.sizes import height_width
from dino_vit.core.text import printable
from dino_vit.data.sampling_weights import sampling_fingerprint
from dino_vit.data.shards import copies_folder, shards_of
from dino_vit.data.sources.source import Source
from dino_vit.data.statistics import INSPECTED, MEASURED, ImageSummary, inspect_images, measure, sample
from dino_vit.views.build import build_pixels, build_views, choose_workers
from dino_vit.views.costs import Costs, advice_on_size, faster_photometry, measure_costs
from dino_vit.views.preparation import preparation_of
from dino_vit.weights.heads import HEADS, TrainedTeacher

Measure = Callable[[PretrainConfig], float]  # of the seconds of a step


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a configuration is completed from."""

    source: Source
    weights: NDArray[np.float64] | None  # how often images are drawn
    resumed: Checkpoint | None
    trained: Mapping[str, Any] | None  # the architecture of a run from trained weights
    processes: int
    device: torch.device
    measure: Measure | None = None
    frozen: TrainedTeacher | None = None  # of `teacher.weights`


class Completed(NamedTuple):
    """A config with every open setting filled in, and what led to it."""

    config: PretrainConfig
    choices: list[Choice]
    notes: list[str]  # on the images
    steps: int | None  # that fit into `budget.minutes`
    sizes: list[tuple[int, int]]  # heights and widths of the inspected images


def complete(config: PretrainConfig, facts: Facts) -> Completed:
    """Fill in every open setting; a run that resumes keeps what was chosen at its start."""
    source, resumed = facts.source, facts.resumed
    images = inspect_images(source, sample(source, config.seed, INSPECTED), max_pixels=config.data.max_pixels)
    made: dict[str, Choice] = {}

    def add(choices: Sequence[Choice]) -> None:
        """Put choices into the config; a later one for the same setting counts."""
        nonlocal config
        config = replace(config, {choice.key: choice.value for choice in choices})
        made.update({choice.key: choice for choice in choices})

    if facts.frozen is not None:
        add(_frozen_choices(config, facts.frozen))
    if facts.trained is not None:
        add(_architecture_choices(config, facts.trained))
    if resumed:
        add(kept_choices(config, resumed))
    add(init_choices(config))
    steps: int | None = resumed.metadata["total_steps"] if resumed and config.budget.minutes else None
    if config.budget.minutes and not steps:
        assert facts.measure, "a run of some minutes needs to measure its speed"
        if not resumed:
            add(_network_choices(config, images, facts.measure, facts.processes))
        steps = max(1, int(60 * config.budget.minutes / facts.measure(config)))
    add(_image_choices(config, images, facts, steps))
    if not any(image.fits(config.data.channels) for image in images.images):
        raise ValueError(
            f"data.channels={config.data.channels}, but the images of {config.data.source} have "
            f"{images.channels} channels; set data.channels, data.mean and data.std (null: measured)"
        )
    add(_pixel_choices(config, images, resumed))
    add(_order_choices(config, facts))
    measured, notes = _measure(config, source, facts.device)
    add(measured)
    add(_photometry_choices(config, facts))
    if resumed:
        _check_resumable(config, facts, resumed)
        global_batch = resumed.metadata["global_batch"]
        accumulate = global_batch // (config.data.batch_size * facts.processes)
        if accumulate and accumulate != config.optim.accumulate:
            log.info("the run keeps its global batch of %d: optim.accumulate=%d", global_batch, accumulate)
            config = replace(config, {"optim.accumulate": accumulate})
    notes.insert(0, images.describe(build_pixels(config)))
    sizes = [(image.height, image.width) for image in images.images]
    scaled = config.data.scaled_decoding
    name = printable(config.data.source)
    if advice := advice_on_size(sizes, build_views(config), name, scaled_decoding=scaled):
        notes.append(advice)
    return Completed(config, list(made.values()), notes, steps, sizes)


def _frozen_choices(config: PretrainConfig, frozen: TrainedTeacher) -> list[Choice]:
    """Take from a frozen teacher what its student must share; settings that the user gave must agree."""
    preparation, name = preparation_of(frozen.backbone), f"teacher.weights={config.teacher.weights}"
    pixels = preparation.pixels
    known: dict[str, object] = {"data.channels": pixels.channels, "data.bits": pixels.bits}
    known |= {"data.range": pixels.range, "data.mean": preparation.mean, "data.std": preparation.std}
    has_patches = False
    if frozen.network is not None:
        theirs = PretrainConfig.model_validate(frozen.config, strict=False)  # JSON has no tuples
        known |= {"head.prototypes": theirs.head.prototypes}
        known |= {"head.shared": theirs.head.shared} if config.loss.patch_weight else {}
        has_patches = theirs.loss.patch_weight > 0
    if config.loss.patch_weight and not has_patches:
        raise ValueError(f"{name} has no head that learned masked patches; set loss.patch_weight=0")
    given = given_keys(config)
    wrong = [key for key, value in known.items() if key in given and get(config, key) not in (None, value)]
    if wrong:
        text = ", ".join(f"{key}={get(config, key)} (there {known[key]})" for key in wrong)
        raise ValueError(f"{text} does not match {name}; leave it out")
    reason = "as the teacher of teacher.weights has"
    choices = [Choice(key, value, reason) for key, value in known.items() if value != get(config, key)]
    if "model.drop_path" not in given:
        choices.append(Choice("model.drop_path", 0.0, "none where a frozen teacher is learned from"))
    return choices


def _architecture_choices(config: PretrainConfig, trained: Mapping[str, Any]) -> list[Choice]:
    """Take the model settings from trained weights; settings that the user gave must agree."""
    given = given_keys(config)
    if "name" in trained:
        if "model.arch" in given and config.model.timm != trained["name"]:
            text = f"model.arch={config.model.arch} does not match the weights of init.weights"
            raise ValueError(f"{text} ({trained['name']} of timm); leave it out")
        return [Choice("model.arch", f"timm:{trained['name']}", "as the trained weights have")]
    height, width = patch = height_width(trained["patch_size"])
    if height != width:
        raise ValueError(
            f"{config.init and config.init.weights} has patches of {patch}, but they must be square"
        )
    shape = {"width": trained["width"], "depth": trained["depth"], "heads": trained["heads"]}
    known = {f"model.{name}": value for name, value in shape.items()}
    known |= {"model.patch_size": height, "model.registers": trained["registers"]}
    rotary = trained["positions"] == "rotary"
    if rotary or "model.positions" in given:
        known["model.positions"] = "rotary" if rotary else "learned"
    if config.recipe == "auto":  # which would take those of the images; grey is repeated to make 3
        known["data.channels"] = trained["channels"]
    wrong = [key for key in known if key in given and get(config, key) not in (None, known[key])]
    arch = config.model.arch if "model.arch" in given else None
    if arch and (config.model.timm or config.model.shape != tuple(shape.values())):
        wrong.append("model.arch")
    if wrong:
        text = ", ".join(f"{key}={get(config, key)}" for key in wrong)
        raise ValueError(f"{text} does not match the weights of init.weights; leave it out")
    return [Choice(key, value, "as the trained weights have") for key, value in known.items()]


def kept_choices(config: PretrainConfig, resumed: Checkpoint) -> list[Choice]:
    """Keep what `recipe=auto` chose at the start, which may have followed from a measured speed."""
    if config.recipe != "auto":
        return []
    before = PretrainConfig.model_validate(resumed.metadata["config"], strict=False)  # JSON has no tuples
    given = given_keys(config)
    kept = [
        key
        for key in (AUTO_KEYS | FITTED_KEYS) - given
        if get(before, key) is not None and not settings_of(PretrainConfig)[key].rivals & given
    ]
    return [Choice(key, get(before, key), "as the run started") for key in sorted(kept)]


def _network_choices(
    config: PretrainConfig, images: ImageSummary, measure: Measure, processes: int
) -> list[Choice]:
    """Choose the largest network and views that see enough images in the minutes of the run."""
    minutes = config.budget.minutes
    ladder = network_ladder(config, images.image_size)
    if not ladder or minutes is None:
        return []
    smallest = ladder[0]
    seconds = measure(replace(config, smallest.settings))
    batch = config.data.batch_size * config.optim.accumulate * processes
    seen = 60 * minutes / seconds * batch
    chosen = max(
        (one for one in ladder if seen * smallest.cost / one.cost >= ENOUGH_IMAGES),
        key=lambda one: one.cost,
        default=smallest,
    )
    count = seen * smallest.cost / chosen.cost
    reason = f"sees about {float(f'{count:.2g}'):,.0f} images in {minutes:g} minutes on this machine"
    return [Choice(key, value, reason) for key, value in chosen.settings.items()]


def _image_choices(
    config: PretrainConfig, images: ImageSummary, facts: Facts, steps: int | None
) -> list[Choice]:
    """Return what `recipe=auto` chooses from the images."""
    processes, resumed = facts.processes, facts.resumed
    batch = config.data.batch_size * config.optim.accumulate * processes
    return auto_choices(
        config,
        image_size=images.image_size,
        images=len(facts.source),
        channels=images.channels,
        global_batch=resumed.metadata["global_batch"] if resumed else batch,
        steps=steps,
    )


def _pixel_choices(config: PretrainConfig, images: ImageSummary, resumed: Checkpoint | None) -> list[Choice]:
    """Choose the depth; a run that resumes also keeps the mean and std measured at its start."""
    if resumed:
        before = resumed.metadata["config"]["data"]
        open_names = [name for name in ("bits", "mean", "std") if getattr(config.data, name) is None]
        values = {name: before[name] for name in open_names}
        return [
            Choice(f"data.{name}", tuple(v) if isinstance(v, list) else v, "as the run started")
            for name, v in values.items()
        ]
    if config.data.bits is not None:
        return []
    return [Choice("data.bits", images.bits, "as the images have")]


def _measure(config: PretrainConfig, source: Source, device: torch.device) -> tuple[list[Choice], list[str]]:
    """Measure mean and std where they are open, and check that images can be read as configured."""
    open_names = [name for name in ("mean", "std") if getattr(config.data, name) is None]
    pixels = build_pixels(config)
    measured = measure(source, sample(source, config.seed, MEASURED if open_names else INSPECTED), pixels)
    # Of rank 0, as others may sum in another order.
    mean, std = all_gather(torch.tensor([measured.mean, measured.std], device=device))[:2].tolist()
    figures = {"mean": mean, "std": std}
    choices = []
    for name in open_names:
        values = tuple(float(f"{value:.4g}") for value in figures[name])
        choices.append(Choice(f"data.{name}", values, f"measured on {measured.images} images"))
        if name == "std" and min(values) <= 0:
            raise ValueError(
                f"channel {values.index(min(values))} is constant in the {measured.images} images that were "
                "measured, so its std is 0; leave the channel out, or give data.std"
            )
    notes = []
    if pixels.bits == 16 and measured.highest < 0.25:
        notes.append(
            f"no value is above {measured.highest:.1%} of the scale, where brightness, contrast and solarise "
            "have little effect; data.range=[low, high] sets the values of black and white"
        )
    return choices, notes


def _check_resumable(config: PretrainConfig, facts: Facts, resumed: Checkpoint) -> None:
    """Check that a run resumes with the settings, images and precision that it started with."""
    before = PretrainConfig.model_validate(resumed.metadata["config"], strict=False)  # JSON has no tuples
    changes = [f"{key} was {old} and is {new}" for key, (old, new) in result_changes(config, before).items()]
    precision, wanted = choose_precision(config.run.precision, facts.device), config.run.precision
    if resumed.metadata["precision"] != precision and wanted == before.run.precision:
        changes.append(f"run.precision={wanted} was {resumed.metadata['precision']} and is {precision} here")
    if resumed.metadata["source"] != facts.source.fingerprint:
        changes.append(f"the images of {config.data.source} have changed")
    if resumed.metadata.get("weights") != sampling_fingerprint(facts.weights):
        changes.append(f"the sampling weights have changed (data.weights={config.data.weights})")
    if resumed.metadata.get("frozen") != (facts.frozen and facts.frozen.sha256):
        changes.append(
            f"the weights of teacher.weights={config.teacher.weights} have changed (of a run that goes on, "
            "give a checkpoint that is kept)"
        )
    batch, per_pass = resumed.metadata["global_batch"], config.data.batch_size * facts.processes
    if batch % per_pass:
        changes.append(
            f"its global batch was {batch}, which is not a multiple of {per_pass} "
            f"(data.batch_size={config.data.batch_size} on {facts.processes} processes)"
        )
    pass_before = batch // before.optim.accumulate
    norms = any(name.startswith("student.") and name.endswith(".running_mean") for name in resumed.tensors)
    for name, now, then in (
        ("BatchNorm", norms, norms),
        ("Sinkhorn-Knopp", *(one.loss.centring == "sinkhorn" for one in (config, before))),
        ("KoLeo", config.loss.koleo_weight, before.loss.koleo_weight),
    ):
        if now and then and pass_before != per_pass:
            changes.append(
                f"{name} used {plural(pass_before, 'image')} per forward pass and would now use {per_pass} "
                f"(data.batch_size={config.data.batch_size} on "
                f"{plural(facts.processes, 'process', 'processes')})"
            )
    if changes and config.run.resume != "changed":
        raise ValueError(
            f"{config.output} holds a run at step {resumed.step} with other settings: {'; '.join(changes)}. "
            "Give another output, or run.resume=changed to resume anyway"
        )
    _check_parts(config, facts, resumed, before)


def _check_parts(config: PretrainConfig, facts: Facts, resumed: Checkpoint, before: PretrainConfig) -> None:
    """Check that a run resumes with networks of the same parts."""
    imitates = facts.frozen is not None and facts.frozen.network is None
    patches = imitates and config.teacher.patch_weight > 0
    imitated, patches_before = (f"student.{head}.linear.weight" in resumed.tensors for head in HEADS)
    if (imitates, patches, bool(config.loss.patch_weight), config.head.shared) != (
        *(imitated, patches_before),
        *(bool(before.loss.patch_weight), before.head.shared),
    ):
        raise ValueError(
            f"{config.output} holds a run whose networks have other parts: loss.patch_weight adds a mask "
            "token, head.shared=false a head, teacher.weights without heads others, and none can come or go "
            f"halfway. Start another run from its weights: another output and init.weights={config.output}"
        )


def _order_choices(config: PretrainConfig, facts: Facts) -> list[Choice]:
    """Walk through remote shards one after another, as their copies on the disk do; keep what a run began."""
    if config.data.order is not None:
        return []
    if facts.resumed:
        order = facts.resumed.metadata["config"]["data"].get("order")
        return [Choice("data.order", order, "as the run started")] if order else []
    sharded = shards_of(facts.source)
    if sharded is None or not sharded[0].ranges.is_remote:
        return []
    shards = plural(len(sharded[0].ranges.paths), "remote shard")
    copied = f" and copied to {copies_folder(config.data.cache)}" if config.data.cache_gb else ""
    reason = f"of {shards}, {config.data.window} at a time are mixed (data.window){copied}"
    return [Choice("data.order", "window", reason)]


def _photometry_choices(config: PretrainConfig, facts: Facts) -> list[Choice]:
    """Choose where photometry runs: as the run started, or where a measurement finds it faster."""
    if config.data.photometry != "auto":
        return []
    key, workers = "data.photometry", choose_workers(config, facts.processes)
    if facts.resumed:
        return [Choice(key, facts.resumed.metadata["config"]["data"]["photometry"], "as the run started")]
    if not workers:
        return [Choice(key, "device", "there are no loader processes")]
    seconds = measure_costs(config, facts.source, facts.device)
    costs = Costs(*all_reduce_mean(torch.tensor(seconds, device=facts.device)).tolist())
    return [Choice(key, *faster_photometry(costs, workers))]

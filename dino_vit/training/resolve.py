"""Resolve a config: from the images, the launch, trained weights, the checkpoint.

This happens once, when a run is set up; nothing changes the config afterwards.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from dino_vit.config.auto import (
    Choice,
    auto_choices,
    channel_choices,
    init_choices,
    phase_choices,
)
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import AUTO_KEYS, PHASES, PretrainConfig
from dino_vit.config.sections import Model
from dino_vit.config.settings import flat, get, given_keys, result_changes, settings_of
from dino_vit.core import height_width
from dino_vit.core.checkpoint import Checkpoint
from dino_vit.core.distributed import from_rank_0, in_all_processes
from dino_vit.core.text import plural
from dino_vit.data.image_set import ImageSet, evenly_spaced
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.statistics import (
    INSPECTED_IMAGES,
    MEASURED_IMAGES,
    ChannelStatistics,
    ImageSummary,
    channel_statistics,
    inspect_images,
)
from dino_vit.models.backbone import Backbone
from dino_vit.training.plan import NO_ESTIMATE, BudgetEstimate
from dino_vit.views.build import advice_on_size, build_pixels
from dino_vit.views.eval_transform import eval_transform_of

if TYPE_CHECKING:
    from dino_vit.weights.loading import TrainedTeacher

T = TypeVar("T")
GLOBAL_ORDER = 2**26  # images: an order of all takes 16 bytes of each in every process


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a config is resolved from, and a run set up with."""

    source: ImageSet
    processes: int
    device: torch.device
    resumed: Checkpoint | None = None
    trained: Backbone | None = None  # of `init.weights`, in a new run
    architecture: Mapping[str, Any] | None = None  # of `init.weights`
    fixed_teacher: "TrainedTeacher | None" = None  # of `teacher.weights`
    gram_teacher: Backbone | None = None  # of `gram.weights`
    estimate: BudgetEstimate = NO_ESTIMATE
    measured: dict[object, Any] = field(default_factory=dict)  # on the images; copies of the context share it

    @property
    def feature_teacher(self) -> Backbone | None:
        """The frozen teacher, if it has no heads."""
        return (
            self.fixed_teacher.backbone if self.fixed_teacher and self.fixed_teacher.network is None else None
        )

    @property
    def weights_read(self) -> dict[str, str | None]:
        """Return the digests of the networks that stay as they are."""
        networks = {
            "fixed_teacher": self.fixed_teacher and self.fixed_teacher.backbone,
            "gram_teacher": self.gram_teacher,
        }
        return {name: network.provenance.sha256 if network else None for name, network in networks.items()}

    def inspected(self, config: PretrainConfig) -> ImageSummary:
        """Return what some images are."""
        indices = evenly_spaced(len(self.source), INSPECTED_IMAGES)
        inspect = partial(inspect_images, self.source, indices, max_pixels=config.data.max_pixels)
        return self._measure(INSPECTED_IMAGES, inspect)

    def statistics(self, images: int, pixels: Pixels) -> ChannelStatistics:
        """Return the mean and std of the channels of some images."""
        read = partial(channel_statistics, self.source, evenly_spaced(len(self.source), images), pixels)
        return self._measure((images, pixels), read)

    def _measure(self, key: object, work: Callable[[], T]) -> T:
        """Return what rank 0 measures, once: others may fail to read another image."""
        if key not in self.measured:
            with in_all_processes():
                self.measured[key] = from_rank_0(work)
        return cast(T, self.measured[key])


def with_choices(config: PretrainConfig, choices: Iterable[Choice]) -> PretrainConfig:
    """Return a config with some choices in it."""
    return replace(config, {choice.key: choice.value for choice in choices})


@dataclass(frozen=True)
class Resolution:
    """A config without open settings, the choices of this start, notes on the images, and what they are."""

    config: PretrainConfig
    choices: list[Choice]
    notes: list[str]
    summary: ImageSummary


def resolve(config: PretrainConfig, context: RunContext) -> Resolution:
    """Fill in every open setting; a run that resumes keeps what was chosen at its start."""
    images, resumed, summary = context.source.images_per_epoch, context.resumed, context.inspected(config)
    made: dict[str, Choice] = {}

    def add(choices: Sequence[Choice]) -> None:
        """Put choices into the config; a later one for the same setting counts."""
        nonlocal config
        config = with_choices(config, choices)
        made.update({choice.key: choice for choice in choices})

    add(start_choices(config, context))
    add(context.estimate.choices)
    batch = config.data.batch_size * config.optim.accumulate * context.processes
    add(
        auto_choices(
            config,
            image_size=summary.image_size,
            images=images,
            channels=summary.channels,
            likeness=summary.likeness,
            global_batch=resumed.metadata["global_batch"] if resumed else batch,
            steps=context.estimate.steps,
            evaluations=context.estimate.evaluations,
        )
    )
    global_batch = min(batch, images)  # more is refused by the plan
    steps = context.estimate.steps or config.budget.total_steps(images, global_batch)
    if not resumed:
        add(phase_choices(config, steps / (images // global_batch)))
        config.check_filled()
    if not any(image.fits(config.data.channels) for image in summary.images):
        raise ValueError(
            f"data.channels={config.data.channels}, but the images of {config.data.images} have "
            f"{summary.channels} channels; set data.channels, data.mean and data.std (null: measured)"
        )
    if config.data.bits is None:
        add([Choice("data.bits", summary.bits, "as the images have")])
    add(_order_choices(config, context))
    statistics, notes = _pixel_statistics(config, context)
    add(statistics)
    add(_batch_choices(config, context))
    notes.insert(0, summary.describe(build_pixels(config)))
    sizes = [(image.height, image.width) for image in summary.images]
    if advice := advice_on_size(config, sizes, config.data.sources):
        notes.append(advice)
    choices = list(made.values())
    return Resolution(config, _news(config, choices, resumed) if resumed else choices, notes, summary)


def _news(config: PretrainConfig, choices: Sequence[Choice], resumed: Checkpoint) -> list[Choice]:
    """Return what was chosen for a run that resumes, or given, and differs from its start."""
    started = started_config(resumed)
    news = [choice for choice in choices if get(started, choice.key) != choice.value]
    given = result_changes(config, started).keys() - {choice.key for choice in news}
    reason = f"changed at step {resumed.step:,}"
    return news + [Choice(key, get(config, key), reason) for key in sorted(given)]


def start_choices(config: PretrainConfig, context: RunContext) -> list[Choice]:
    """Return what follows from trained weights, a frozen teacher, and the start of a run that resumes."""
    choices: list[Choice] = []
    for choose in (_teacher_choices, _architecture_choices, kept_choices):
        made = choose(config, context)
        config = with_choices(config, made)
        choices += made
    return choices + init_choices(config)


def _batch_choices(config: PretrainConfig, context: RunContext) -> list[Choice]:
    """Keep the global batch of a run that resumes, in other micro-batches."""
    batch = context.resumed.metadata["global_batch"] if context.resumed else 0
    accumulate = batch // (config.data.batch_size * context.processes)
    if accumulate in (0, config.optim.accumulate):
        return []
    return [Choice("optim.accumulate", accumulate, f"keeps the global batch of {batch}")]


def _teacher_choices(config: PretrainConfig, context: RunContext) -> list[Choice]:
    """Take from a frozen teacher what its student must share; settings that the user gave must agree."""
    teacher = context.fixed_teacher
    if teacher is None:
        return []
    transform, name = eval_transform_of(teacher.backbone), f"teacher.weights={config.teacher.weights}"
    pixels = transform.pixels
    shared: dict[str, object] = {"data.channels": pixels.channels, "data.bits": pixels.bits}
    shared |= {"data.range": pixels.range, "data.mean": transform.mean, "data.std": transform.std}
    has_patches = False
    if teacher.network is not None:
        theirs = load(PretrainConfig, None, teacher.config)
        shared |= {"head.prototypes": theirs.head.prototypes}
        shared |= {"head.shared": theirs.head.shared} if config.loss.patch_weight else {}
        has_patches = theirs.loss.patch_weight > 0
    if config.loss.patch_weight and not has_patches:
        raise ValueError(f"{name} has no head that learned masked patches; set loss.patch_weight=0")
    _check_agreement(config, shared, name)
    reason = "as the teacher of teacher.weights has"
    given, is_auto = given_keys(config), config.recipe == "auto"  # which might choose other than the default
    choices = [
        Choice(key, value, reason)
        for key, value in shared.items()
        if value != get(config, key) or (is_auto and key not in given)
    ]
    if config.recipe == "auto" and teacher.backbone.has_patches:
        choices += _teacher_sizes(config, teacher.backbone)
    if "model.drop_path" not in given_keys(config):
        choices.append(Choice("model.drop_path", 0.0, "none where a frozen teacher is learned from"))
    return choices


def _teacher_sizes(config: PretrainConfig, teacher: Backbone) -> list[Choice]:
    """Let the student see what a frozen teacher was trained on, up to 224 pixels, in patches of its size."""
    patch = max(height_width(teacher.patch_size))
    side = max(min(224, *teacher.image_size) // patch, 2) * patch
    sizes = {"views.global_size": side} | ({} if config.model.timm else {"model.patch_size": patch})
    given = given_keys(config)
    return [Choice(key, size, "as teacher.weights have") for key, size in sizes.items() if key not in given]


def _architecture_choices(config: PretrainConfig, context: RunContext) -> list[Choice]:
    """Take the model settings from trained weights; settings that the user gave must agree."""
    trained, given = context.architecture, given_keys(config)
    if trained is None or config.init is None:
        return []
    weights = f"init.weights={config.init.weights}"
    settings: dict[str, Any] = {}
    if "name" in trained:
        settings["model.arch"] = f"timm:{trained['name']}"
    else:
        height, width = patch = height_width(trained["patch_size"])
        if height != width:
            raise ValueError(f"{weights} has patches of {patch}, but they must be square")
        shape = {name: trained[name] for name in ("width", "depth", "heads")}
        settings |= {f"model.{name}": value for name, value in shape.items()}
        settings |= {"model.patch_size": height, "model.registers": trained["registers"]}
        local = math.ceil(max(config.views.local_shape) / height) * height
        its_own = config.recipe == "auto" or "views.local_size" in given
        if not its_own and local not in config.views.local_shape:
            settings["views.local_size"] = local
        defaults = Model()
        for name in ("stem", "stem_width", "resnet_layers", "resnet_width", "positions", "qk_scale"):
            if trained[name] != getattr(defaults, name) or f"model.{name}" in given:
                settings[f"model.{name}"] = trained[name]
        if config.model.arch and (config.model.timm or config.model.shape != tuple(shape.values())):
            _check_agreement(config, {"model.arch": shape}, weights)
    _check_agreement(config, settings, weights)
    chosen = {"views.global_size", "model.image_size"} & given
    if config.recipe == "auto" and context.trained and not chosen:  # a run that resumes keeps its own
        its_config = flat(context.trained.provenance.config)
        height, width = height_width(trained["image_size"])
        if height == width and not its_config and "name" not in trained:  # DINOv2's grid is for 518 pixels
            patch = settings["model.patch_size"]
            height = width = min(height, 224 // patch * patch)
        settings["model.image_size"] = size = _side((height, width))
        settings["views.global_size"] = its_config.get("views.global_size", size)
    if context.trained and not context.fixed_teacher:  # a frozen teacher needs images as it was trained on
        origin = context.trained.provenance
        if origin.mean and origin.std:
            same = origin.range == config.data.range  # or they are measured again
            stated = {"data.mean": origin.mean if same else None, "data.std": origin.std if same else None}
            settings |= {key: value for key, value in stated.items() if key not in given}
    reason = "as the trained weights have"
    choices = {choice.key: choice for choice in channel_choices(config, trained["channels"], reason)}
    choices |= {key: Choice(key, value, reason) for key, value in settings.items()}
    return list(choices.values())


def _side(size: int | Sequence[int]) -> object:
    """Return a size as a setting: the side of a square, or height and width."""
    height, width = height_width(size)
    return height if height == width else (height, width)


def _check_agreement(config: PretrainConfig, values: Mapping[str, object], weights: str) -> None:
    """Check that the user gave no other values than those of weights."""
    given = given_keys(config)
    wrong = [key for key in values if key in given and get(config, key) not in (None, values[key])]
    if wrong:
        text = ", ".join(f"{key}={get(config, key)} (there {values[key]})" for key in wrong)
        raise ValueError(f"{text} does not match {weights}; leave it out")


def started_config(resumed: Checkpoint) -> PretrainConfig:
    """Return the config of a run when it wrote a checkpoint."""
    return load(PretrainConfig, None, flat(resumed.metadata["config"]))


def kept_choices(config: PretrainConfig, context: RunContext) -> list[Choice]:
    """Keep what was measured, or chosen by `recipe=auto`, when a run started that resumes."""
    if context.resumed is None:
        return []
    before, given = started_config(context.resumed), given_keys(config)
    keys = {f"data.{name}" for name in ("bits", "mean", "std") if getattr(config.data, name) is None}
    keys |= {"data.order"} if config.data.order is None and before.data.order else set()
    keys |= {key for key in PHASES if key not in given and get(before, key) != get(config, key)}
    keys |= {"data.mean", "data.std"} - given if config.init else set()
    if config.recipe == "auto":
        for key in (AUTO_KEYS | {"model.width", "model.depth", "model.heads"}) - given:
            rivals = settings_of(PretrainConfig)[key].rivals
            if not rivals & given and not (rivals and get(before, key) is None):  # null: it had another unit
                keys.add(key)
    return [Choice(key, get(before, key), "as the run started") for key in sorted(keys)]


def _pixel_statistics(config: PretrainConfig, context: RunContext) -> tuple[list[Choice], list[str]]:
    """Measure mean and std where they are open, and check that images can be read as configured."""
    open_names = [name for name in ("mean", "std") if getattr(config.data, name) is None]
    pixels = build_pixels(config)
    measured = context.statistics(MEASURED_IMAGES if open_names else INSPECTED_IMAGES, pixels)
    choices = []
    for name in open_names:
        values = tuple(float(f"{value:.4g}") for value in getattr(measured, name))
        choices.append(Choice(f"data.{name}", values, f"measured on {measured.images} images"))
        if name == "std" and min(values) <= 0:
            raise ValueError(
                f"channel {values.index(min(values))} is constant in the {measured.images} images that were "
                "measured, so its std is 0; leave the channel out, or give data.std"
            )
    notes = []
    if measured.highest < 0.25:
        notes.append(
            f"no value is above {measured.highest:.1%} of the scale, where brightness, contrast and solarise "
            "have little effect; data.range=[low, high] sets the values of black and white"
        )
    return choices, notes


def _order_choices(config: PretrainConfig, context: RunContext) -> list[Choice]:
    """Walk through remote shards one after another, as their copies on the disk do, and through very many."""
    sharded = [part.shards for part in context.source.parts if part.shards]
    is_remote = any(shards.is_remote for shards in sharded)
    if config.data.order is not None or context.resumed or not sharded:
        return []
    if not is_remote and len(context.source) <= GLOBAL_ORDER:
        return []
    count = sum(len(shards.ranges.paths) for shards in sharded)
    shards = plural(count, "remote shard" if is_remote else "local shard")
    reason = f"of {shards}, {config.data.window} at a time are mixed (data.window)"
    return [Choice("data.order", "window", reason)]

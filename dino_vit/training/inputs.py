"""Open what a run reads, and measure what its settings are decided by."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from dino_vit.config.complete import HOST_SETTINGS, decide
from dino_vit.config.facts import (
    CheckpointFacts,
    ImageFacts,
    RunFacts,
    TeacherFacts,
    WeightsFacts,
    check_images,
)
from dino_vit.config.loading import load, write_yaml
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import BASELINES
from dino_vit.config.settings import flat, get, values
from dino_vit.core import height_width
from dino_vit.core.checkpoint import Checkpoint
from dino_vit.core.distributed import agree, from_rank_0, in_all_processes, share_work, world_size
from dino_vit.core.runtime import choose_precision
from dino_vit.data.image_set import ImageSet, evenly_spaced
from dino_vit.data.statistics import (
    INSPECTED_IMAGES,
    MEASURED_IMAGES,
    ImageSummary,
    channel_statistics,
    inspect_images,
)
from dino_vit.models.backbone import Backbone
from dino_vit.views.build import build_pixels, open_images
from dino_vit.views.eval_transform import eval_transform_of

if TYPE_CHECKING:
    from dino_vit.training.frozen_networks import FrozenTeacher


@dataclass(kw_only=True)
class Inputs:
    """What a run reads, opened once."""

    source: ImageSet
    summary: ImageSummary  # of some images
    checkpoint: Checkpoint | None = None  # to resume from
    trained: Backbone | None = None  # of `init.weights`, in a new run
    weights: WeightsFacts | None = None  # on `init.weights`
    frozen_teacher: "FrozenTeacher | None" = None  # of `teacher.weights`
    gram_teacher: Backbone | None = None  # of `gram.weights`

    @property
    def feature_teacher(self) -> Backbone | None:
        """The frozen teacher, if it has no heads."""
        teacher = self.frozen_teacher
        return teacher.backbone if teacher and teacher.network is None else None

    @property
    def weights_read(self) -> dict[str, str | None]:
        """Return the digests of the networks that stay as they are."""
        teacher = self.frozen_teacher and self.frozen_teacher.backbone
        networks = {"frozen_teacher": teacher, "gram_teacher": self.gram_teacher}
        return {name: network.provenance.sha256 if network else None for name, network in networks.items()}


def open_inputs(config: PretrainConfig, checkpoint: Checkpoint | None) -> Inputs:
    """Open what a run depends on beside its settings; all ranks must have been given the same."""
    given = {key: write_yaml(value) for key, value in values(config).items() if key not in HOST_SETTINGS}
    check_alike(given)
    source = open_images(config)
    indices = evenly_spaced(len(source), INSPECTED_IMAGES)
    summary = _from_rank_0(lambda: inspect_images(source, indices, max_pixels=config.data.max_pixels))
    inputs = Inputs(source=source, summary=summary, checkpoint=checkpoint)
    if config.teacher.weights:
        from dino_vit.training.frozen_networks import open_teacher

        inputs.frozen_teacher = open_teacher(_load_given(config, "teacher.weights"))
    if config.gram:
        inputs.gram_teacher = _load_given(config, "gram.weights")
    if config.init and checkpoint:  # the file that the run started from may be gone
        saved = checkpoint.metadata["architecture"].items()
        architecture = {key: tuple(value) if isinstance(value, list) else value for key, value in saved}
        inputs.weights = WeightsFacts(architecture=architecture, is_read=False)
    elif config.init:
        trained = _load_trained(config, inputs.frozen_teacher and inputs.frozen_teacher.backbone)
        origin, inputs.trained = trained.provenance, trained
        inputs.weights = WeightsFacts(
            architecture=trained.architecture,
            settings=flat(origin.config),
            mean=origin.mean,
            std=origin.std,
            range=origin.range,
        )
    return inputs


def inspect(config: PretrainConfig, inputs: Inputs, device: torch.device) -> RunFacts:
    """Return the facts that `complete` needs."""
    source = inputs.source
    facts = RunFacts(
        images=image_facts(source, inputs.summary),
        processes=world_size(),
        device=device.type,
        precision=choose_precision("auto", device),
        checkpoint=checkpoint_facts(inputs.checkpoint) if inputs.checkpoint else None,
        weights=inputs.weights,
        teacher=_teacher_facts(inputs.frozen_teacher) if inputs.frozen_teacher else None,
    )
    draft = decide(config, facts)  # how images are read does not depend on what is measured here
    check_images(draft.config, facts.images)
    is_open = draft["data.mean"] is None or draft["data.std"] is None
    indices = evenly_spaced(len(source), MEASURED_IMAGES if is_open else INSPECTED_IMAGES)
    measured = _from_rank_0(lambda: channel_statistics(source, indices, build_pixels(draft.config)))
    facts = replace(facts, images=replace(facts.images, measured=measured))
    if config.budget.minutes is None or inputs.checkpoint:
        return facts
    from dino_vit.training.probe import measure_speed  # other runs measure nothing

    # On all ranks at the same time, as the run will compute.
    speed = measure_speed(draft.config, inputs.summary, len(source), device)
    return replace(facts, speed=_from_rank_0(lambda: speed))


def image_facts(source: ImageSet, summary: ImageSummary) -> ImageFacts:
    """Return what decides on the settings, of images some of which were inspected."""
    stores = [part.shards for part in source.parts if part.shards]
    return ImageFacts(
        count=len(source),
        size=summary.image_size,
        seconds=mean(image.seconds for image in summary.images),
        channels=summary.channels,
        readable_channels=frozenset(
            channels
            for channels in {3} | {image.channels + more for image in summary.images for more in (0, 1)}
            if any(image.fits(channels) for image in summary.images)
        ),
        bits=summary.bits,
        likeness=summary.likeness,
        shards=sum(len(shards.sizes) for shards in stores),
        is_remote=any(shards.is_remote for shards in stores),
    )


def checkpoint_facts(checkpoint: Checkpoint) -> CheckpointFacts:
    """Return what a checkpoint keeps for the run that resumes from it."""
    metadata = checkpoint.metadata
    return CheckpointFacts(
        step=checkpoint.step,
        settings=values(load(PretrainConfig, None, flat(metadata["config"]))),
        chosen=frozenset(metadata["chosen"]),
        **{name: metadata[name] for name in ("global_batch", "length", "seconds", "evaluated_images")},
    )


def _teacher_facts(teacher: "FrozenTeacher") -> TeacherFacts:
    transform, heads, config = eval_transform_of(teacher.backbone), dict[str, Any](), teacher.config
    pixels = transform.pixels
    if config is not None:
        heads = {"head.prototypes": config.head.prototypes, "head.shared": config.head.shared}
    read: dict[str, Any] = {"channels": pixels.channels, "bits": pixels.bits, "range": pixels.range}
    read |= {"mean": transform.mean, "std": transform.std}
    return TeacherFacts(
        pixels={f"data.{name}": value for name, value in read.items()},
        heads=heads,
        has_patch_head=config is not None and config.loss.patch_weight > 0,
        patch=max(height_width(teacher.backbone.patch_size)) if teacher.backbone.has_patches else 0,
        image_size=teacher.backbone.image_size,
    )


def _from_rank_0(work: Any) -> Any:
    """Return what rank 0 measures: others may fail to read another image."""
    with in_all_processes():
        return from_rank_0(work)


def check_alike(shared: Mapping[str, str]) -> None:
    """Check that all ranks have the same values; of a section that is null there are no names inside."""
    with in_all_processes():
        by_rank: list[Mapping[str, str]] = share_work(lambda _: [shared], range(world_size()))
    for name, (rank, each) in product(shared, enumerate(by_rank)):
        first, other = (given.get(name, "nothing") for given in (by_rank[0], each))
        if first != other:
            seen = f"{first} on rank 0 and {other} on rank {rank}"
            text = f"the ranks of this run differ: {name} is {seen}"
            raise ValueError(f"{text}. Give all of them the same settings and images")


def _load_given(config: PretrainConfig, key: str, **options: Any) -> Backbone:
    """Load the weights that a setting names: the same in all processes, and not those of the run itself."""
    from dino_vit.weights import load_backbone  # most runs read none

    weights = str(get(config, key))
    if Path(weights).resolve() == Path(config.output).resolve():
        raise ValueError(f"{key}={weights} is the run itself; give another, or a checkpoint that is kept")
    if weights in BASELINES:
        raise ValueError(f"{key}={weights} has no weights; give those of a network")
    # A run that goes on may write another checkpoint between two processes that read its newest one.
    return agree(
        f"weights of {key}",
        lambda: load_backbone(weights, **options),
        lambda backbone: f"sha256 {backbone.provenance.sha256[:12]}",
    )


def _load_trained(config: PretrainConfig, frozen_teacher: Backbone | None) -> Backbone:
    """Load the weights that `init` starts from; a frozen teacher sees the same images."""
    assert config.init is not None
    overrides: dict[str, Any] = {"heads": config.init.heads} if config.init.heads else {}
    overrides |= {"mask_token": True} if config.hides_patches else {}
    if "data.channels" in config.given:
        overrides["channels"] = config.data.channels
    elif frozen_teacher:
        overrides["channels"] = frozen_teacher.channels
    if config.recipe != "auto" or {"views.global_size", "model.image_size"} & config.given:
        overrides["image_size"] = config.image_shape  # auto takes the weights' size
    names = ("network", "format")
    options = overrides | {name: getattr(config.init, name) for name in names}
    backbone = _load_given(config, "init.weights", **options)
    stated = backbone.provenance.size
    if "image_size" in overrides or stated in (None, backbone.image_size):
        return backbone
    # That of DINOv2's positions is not that of its images.
    return _load_given(config, "init.weights", **options, image_size=stated)

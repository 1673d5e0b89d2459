"""Set up a run: open the images, complete the configuration, build the state, restore the checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator

from dino_vit.config.auto import Choice
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoint, Checkpoints
from dino_vit.core.distributed import all_equal, shard
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import DTYPES, choose_precision, launched_for_shards
from dino_vit.data.sampling_weights import describe_sampling, read_sampling_weights
from dino_vit.data.sources.open import open_source
from dino_vit.data.splits import choose_splits, describe_use
from dino_vit.eval.classification.online import OnlineEvaluation
from dino_vit.method.objective import Objective
from dino_vit.method.optim import build_optimizer, parameter_groups
from dino_vit.models.backbone import Backbone
from dino_vit.models.student_teacher import Network, build_networks
from dino_vit.models.vit import VisionTransformer
from dino_vit.training.measures import UnreadableImages
from dino_vit.training.plan import make_plan
from dino_vit.training.resolve import Facts, Measure, complete
from dino_vit.training.state import TrainingState, check_resumable
from dino_vit.views.build import build_augment, build_loader, build_preparation
from dino_vit.weights import load_backbone
from dino_vit.weights.heads import TrainedTeacher, open_teacher

# Settings that a student without prototypes has no use for, beside those of the head.
WITHOUT_HEADS = ("loss.centring", "loss.teacher_temp", "loss.warmup_teacher_temp", "optim.freeze_last_layer")


class ReadyRun(NamedTuple):
    """A run that is ready to train, what was chosen for it, and notes on its images."""

    state: TrainingState
    choices: list[Choice]
    notes: list[str]
    resumed: Path | None  # the checkpoint that it resumes from
    sizes: list[tuple[int, int]]  # heights and widths of some images


def set_up(config: PretrainConfig, accelerator: Accelerator, measure: Measure | None = None) -> ReadyRun:
    """Set up a new run, or one that resumes from the newest checkpoint in its output folder.

    `measure` returns the seconds of a step; a new run of some `budget.minutes` needs it.
    """
    output = Path(config.output)
    if output.resolve() == Path(config.data.source).resolve():
        raise ValueError(f"output={config.output} is the source of the images; give a folder of its own")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output={config.output} is a file; give a folder")
    source = open_source(config.data.source, config.data.labels)
    weights = read_sampling_weights(source, config.data.weights) if config.data.weights else None
    checkpoints = Checkpoints(Path(config.output), keep_every=config.run.keep_every)
    resumed = _find_checkpoint(checkpoints, config)
    # A run that resumes has its weights in the checkpoint; the file it started from may be gone.
    trained = None if resumed else _trained_backbone(config)
    architecture: Mapping[str, Any] | None = trained.architecture if trained else None
    if config.init and resumed:
        architecture = resumed.metadata["architecture"]
    frozen = _frozen_teacher(config)
    facts = Facts(
        frozen=frozen,
        source=source,
        weights=weights,
        resumed=resumed,
        trained=architecture,
        processes=int(accelerator.num_processes),
        device=accelerator.device,
        measure=measure,
    )
    config, choices, notes, steps, sizes = complete(config, facts)
    state = _build_state(config, facts, steps, accelerator, checkpoints, trained)
    if resumed:
        state.restore(resumed)
    if frozen and frozen.network is None:
        notes.append(
            f"the student imitates the features of {config.teacher.weights}, which has no head: settings of "
            "the head, the temperatures and the centre have no effect"
        )
        choices = [choice for choice in choices if not choice.key.startswith(("head.", *WITHOUT_HEADS))]
    if weights is not None:
        notes.append(describe_sampling(weights))
    if splits := choose_splits(source):
        use = describe_use(source, splits, config.data.source)
        notes.append(f"{use}; the run learns from all of them, without labels")
    return ReadyRun(state, choices, notes, resumed.path if resumed else None, sizes)


def _trained_backbone(config: PretrainConfig) -> Backbone | None:
    """Load the weights that `init` starts from."""
    if config.init is None:
        return None
    overrides: dict[str, Any] = {"heads": config.init.heads} if config.init.heads else {}
    overrides |= {"mask_token": True} if _hides_patches(config) else {}
    return load_backbone(
        config.init.weights,
        network=config.init.network,
        format=config.init.format,
        trained_size=config.init.trained_size,
        image_size=config.views.global_shape,
        channels=config.data.channels,
        **overrides,
    )


def _frozen_teacher(config: PretrainConfig) -> TrainedTeacher | None:
    """Load the network that `teacher.weights` names."""
    weights = config.teacher.weights
    if weights is None:
        return None
    if Path(weights).resolve() == Path(config.output).resolve():
        raise ValueError(f"teacher.weights={weights} is the run itself; give another run")
    found = open_teacher(weights)
    if not all_equal(int(found.sha256[:12], 16)):
        text = f"the processes read different weights from teacher.weights={weights}"
        raise ValueError(f"{text}; give a checkpoint that is kept")
    return found


def _find_checkpoint(checkpoints: Checkpoints, config: PretrainConfig) -> Checkpoint | None:
    """Return the checkpoint to resume from, which must be the same one in all processes."""
    if config.run.resume == "never" and checkpoints.paths():
        raise ValueError(
            f"{config.output} already holds a run, and run.resume=never does not overwrite it; "
            "give another output, or move that folder away"
        )
    newest = checkpoints.newest()
    resumed = newest and check_resumable(newest)
    if not all_equal(resumed.step if resumed else 0):
        raise ValueError(
            f"the processes found this run at different steps; {config.output} must be one folder that "
            "all nodes share"
        )
    return resumed


def build_untrained(
    config: PretrainConfig,
    architecture: Mapping[str, Any] | None = None,
    imitated: Backbone | None = None,
) -> tuple[Network, Network]:
    """Build student and teacher as at the start of a run, their parameters drawn from the seed.

    `architecture` is that of trained weights, which the settings may not fully describe; `imitated` is the
    backbone whose features the student imitates.
    """
    torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK))
    keywords = dict(architecture or _architecture(config))
    keywords.pop("drop_path", None)  # the student's is a setting of the run, the teacher has none
    if not config.model.timm:
        keywords["drop_path_schedule"] = config.model.drop_path_schedule
        rotary = keywords["positions"] == "rotary"
        keywords["rotary_rescale"] = config.model.rotary_rescale if rotary else None
        keywords["mask_token"] = _hides_patches(config)
    patch_head = bool(config.loss.patch_weight) and not config.head.shared
    if imitated is not None:
        patch_head = imitated.has_patches and config.teacher.patch_weight > 0
    return build_networks(
        backbone=keywords,
        drop_path=config.model.drop_path,
        head=config.head.model_dump(exclude={"shared"}),
        patch_head=patch_head,
        imitated=None if imitated is None else imitated.width,
    )


def _hides_patches(config: PretrainConfig) -> bool:
    """Tell whether the student has a mask token; that of a frozen teacher sees all patches."""
    return bool(config.loss.patch_weight) and config.teacher.weights is None


def _architecture(config: PretrainConfig) -> dict[str, Any]:
    """Return the arguments of the backbone that the settings describe."""
    arguments = {"image_size": config.views.global_shape, "channels": config.data.channels}
    if config.model.timm:
        return {"name": config.model.timm, **arguments}
    width, depth, heads = config.model.shape
    arguments |= {"patch_size": config.model.patch_size, "width": width, "depth": depth, "heads": heads}
    names = ("positions", "registers", "layer_scale")
    return arguments | {name: getattr(config.model, name) for name in names}


def _build_state(
    config: PretrainConfig,
    facts: Facts,
    steps: int | None,
    accelerator: Accelerator,
    checkpoints: Checkpoints,
    trained: Backbone | None,
) -> TrainingState:
    device, processes = accelerator.device, facts.processes
    plan = make_plan(config, len(facts.source), processes, steps)
    student, teacher = _student_and_teacher(config, facts, trained)
    sharded = processes > 1 and (config.run.sharded or launched_for_shards())
    if sharded:
        _shard(student, teacher, config, device)
    _to_device(student, teacher, config, device)
    precision = choose_precision(config.run.precision, device)
    groups = parameter_groups(
        student.backbone,
        *student.heads,
        layer_decay=config.optim.layer_decay,
        patch_embed_lr=config.optim.patch_embed_lr,
        head_weight_decay=config.optim.head_weight_decay,
    )
    loader = build_loader(
        config,
        facts.source,
        global_batch=plan.global_batch,
        weights=facts.weights,
        rank=accelerator.process_index,
        world_size=processes,
        pin=device.type == "cuda",
    )
    evaluation = OnlineEvaluation(
        source=facts.source,
        preparation=build_preparation(config),
        seed=config.seed,
        autocast=DTYPES[precision] if precision != "no" else None,
    )
    return TrainingState(
        config=config,
        plan=plan,
        accelerator=accelerator,
        precision=precision,
        source=facts.source,
        loader=loader,
        augment=build_augment(config).to(device),
        student=student,
        # DistributedDataParallel; the teacher has no gradients to exchange, so it is not wrapped.
        wrapped=accelerator.prepare_model(student) if processes > 1 and not sharded else student,
        sharded=sharded,
        teacher=teacher,
        objective=_build_objective(config, facts, student.backbone),
        optimizer=build_optimizer(config.optim.name, groups),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        evaluation=evaluation,
        checkpoints=checkpoints,
        frozen_sha256=facts.frozen and facts.frozen.sha256,
        unreadable=UnreadableImages(Path(config.output), limit=config.data.max_unreadable),
    )


def _student_and_teacher(
    config: PretrainConfig, facts: Facts, trained: Backbone | None
) -> tuple[Network, Network]:
    """Build student and teacher, and check that they take what the run gives them."""
    imitated = facts.frozen.backbone if facts.frozen and facts.frozen.network is None else None
    student, teacher = build_untrained(config, facts.trained, imitated)
    both = imitated and imitated.has_patches and student.backbone.has_patches
    if imitated and config.teacher.patch_weight and not both:
        raise ValueError("one of student and frozen teacher has no patches; set teacher.patch_weight=0")
    student.backbone.checkpoint_blocks = config.model.checkpoint_blocks
    for size in config.views.shapes:
        student.backbone.grid_of(*size)  # raises if the backbone does not take images of this size
    if trained:
        for network in (student, teacher):
            network.backbone.load_state_dict(trained.state_dict())
    return student, teacher


def _build_objective(config: PretrainConfig, facts: Facts, student: Backbone) -> Objective:
    """Build the objective with the networks that it compares the student with, beside its average."""
    objective = Objective(
        config,
        facts.device,
        grid=student.grid_of(*config.views.global_shape),
        earlier=_earlier_teacher(config, student),
        frozen=facts.frozen and (facts.frozen.network or facts.frozen.backbone),
    )
    if facts.frozen:
        _check_frozen(config, facts.frozen.backbone, student)
        for name, center in facts.frozen.centers.items():
            if (ours := objective.modules().get(name.removesuffix(".center"))) is not None:
                ours.center.copy_(center)
    return objective


def _check_frozen(config: PretrainConfig, frozen: Backbone, student: Backbone) -> None:
    """Check that a frozen teacher takes the global views, and sees the patches that the student sees."""
    name, size = f"teacher.weights={config.teacher.weights}", config.views.global_shape
    try:
        grid = frozen.grid_of(*size)
    except ValueError as error:
        raise ValueError(f"{name} does not take global views: {error}; change views.global_size") from error
    if config.loss.patch_weight and grid != student.grid_of(*size):
        rows, columns = student.grid_of(*size)
        raise ValueError(
            f"{name} sees {grid[0]} × {grid[1]} patches of a global view where the student sees {rows} × "
            f"{columns}; use the same model.patch_size, or loss.patch_weight=0"
        )


def _earlier_teacher(config: PretrainConfig, student: Backbone) -> Backbone | None:
    """Load the network that `anchor` holds the patches to."""
    if config.anchor is None:
        return None
    if Path(config.anchor.weights).resolve() == Path(config.output).resolve():
        raise ValueError(
            f"anchor.weights={config.anchor.weights} is the run itself, whose newest checkpoint changes; "
            "give one of its checkpoints that is kept (run.keep_every)"
        )
    earlier = load_backbone(config.anchor.weights)
    known = earlier.provenance
    if not (earlier.has_patches and student.has_patches):
        raise ValueError("anchor is about patches, which these networks do not have; leave it out")
    for what, theirs, ours in (
        ("patches", earlier.patch_size, student.patch_size),
        ("channels", earlier.channels, student.channels),
        ("data.mean", known and known.mean, config.data.mean),
        ("data.std", known and known.std, config.data.std),
    ):
        if theirs and ours and not np.allclose(theirs, ours):
            text = f"anchor.weights={config.anchor.weights} has {what} of {theirs}, the run of {ours}"
            raise ValueError(f"{text}; they must be the same")
    return earlier


def _shard(student: Network, teacher: Network, config: PretrainConfig, device: torch.device) -> None:
    """Share the parameters of both networks among the processes."""
    why = "sharded weights (run.sharded=true, or Accelerate's FSDP)"
    if not isinstance(student.backbone, VisionTransformer):
        raise ValueError(f"{why} need one of our vision transformers, but model.arch={config.model.arch}")
    for setting, given in (
        ("run.compile=true", config.run.compile),
        ("optim.name=lars", config.optim.name == "lars"),
    ):
        if given:
            raise ValueError(f"{setting} does not work with {why}; leave one of them out")
    for network in (student, teacher):
        assert isinstance(network.backbone, VisionTransformer)
        shard(network, network.backbone.blocks, ["use"], device)


def _to_device(student: Network, teacher: Network, config: PretrainConfig, device: torch.device) -> None:
    """Move both networks to the device, compiled where configured."""
    for network in (student, teacher):
        network.to(device)
        if config.run.compile:
            # A graph of its own for each size of the views.
            network.features = torch.compile(network.features, dynamic=False)  # type: ignore[method-assign]

"""Set up a run: open what it depends on, resolve the config, build the state, restore the checkpoint.

Other weights, and what reads them, are imported only by a run that names some.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from dino_vit.config.auto import Choice
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import STUDENT_TEMPERATURE
from dino_vit.config.settings import given_keys
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.distributed import apply_fsdp
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import DTYPES, choose_precision, launched_for_shards
from dino_vit.data.image_set import choose_splits, describe_use
from dino_vit.eval.online import OnlineEvaluation
from dino_vit.method.features import AROUND
from dino_vit.method.objective import Objective
from dino_vit.method.optim import build_optimizer, parameter_groups
from dino_vit.models.backbone import Backbone
from dino_vit.models.compiling import choose_compile, compile_networks, missing_for_compile
from dino_vit.models.student_teacher import Network, build_networks
from dino_vit.models.vit import VisionTransformer, ViTConfig
from dino_vit.training.plan import BudgetEstimate, make_plan, note_on_unseen
from dino_vit.training.resolve import RunContext, resolve
from dino_vit.training.resume import check_same_run, find_checkpoint, set_figures_aside
from dino_vit.training.state import TrainingState
from dino_vit.views.build import build_augment, build_eval_transform, build_loader, keep_decoded, open_images
from dino_vit.views.loader import UnreadableImages


class ReadyRun(NamedTuple):
    """A run that is ready to train, what was chosen for this start, and notes on its images."""

    state: TrainingState
    choices: list[Choice]
    notes: list[str]
    resumed: Path | None  # the checkpoint that it resumes from


def set_up(config: PretrainConfig, accelerator: Accelerator, context: RunContext | None = None) -> ReadyRun:
    """Set up a new run, or one that resumes from the newest checkpoint in its output folder.

    `context` is what it depends on, if that is open already.
    """
    context = context or open_context(config, accelerator)
    resolution = resolve(config, context)
    config, notes = resolution.config, resolution.notes
    if context.resumed:
        check_same_run(config, context, context.resumed)
    state = _build_state(config, context, accelerator)
    state.evaluation.warned = bool(resolution.summary.unreadable)  # which the notes name
    notes += _compile(state)
    if config.data.keep_decoded and (kept := keep_decoded(state.loader, resolution.summary)):
        notes.append(kept)
    state.seconds_before = context.estimate.seconds
    if context.resumed:
        state.restore(context.resumed)
    elif note := note_on_unseen(state.plan, context.estimate.step_seconds):
        notes.append(note)
    if context.feature_teacher:
        notes.append(
            f"the student imitates the features of {config.teacher.weights}, which has no head: settings of "
            "the head, the temperatures and the centre have no effect"
        )
    if epoch := context.source.describe_epoch():
        notes.append(epoch)
    before = state.evaluated_by
    if state.plan.steps_between_evaluations:
        notes += _describe_evaluation(config, state)
        state.evaluated_by = state.evaluation_digest()
    if before not in (None, state.evaluated_by) and state.step < state.plan.total_steps:
        set_figures_aside(state)
    return ReadyRun(state, resolution.choices, notes, context.resumed.path if context.resumed else None)


def _describe_evaluation(config: PretrainConfig, state: TrainingState) -> Iterator[str]:
    """Yield notes on what the run is evaluated by."""
    evaluated, name = state.source.evaluated_part()
    images = name or config.data.images
    if name:
        yield f"the run is evaluated on {name}, the first source with labels, or the first of all"
    if state.evaluation.has_labels and (splits := choose_splits(evaluated)):
        use = describe_use(evaluated, *splits, images)
        yield f"{use}; the run learns from all of them, without labels"
        if leak := state.evaluation.describe_leak():
            yield leak


def open_context(config: PretrainConfig, accelerator: Accelerator) -> RunContext:
    """Open what a run depends on beside its settings: images, checkpoint, trained weights, teacher."""
    source = open_images(config)
    resumed = find_checkpoint(config)
    planned = resumed.metadata["total_steps"] if resumed and config.budget.minutes else None
    trained, fixed_teacher, gram_teacher = None, None, None
    if config.teacher.weights is not None or config.gram:
        from dino_vit.weights.loading import load_fixed, open_teacher

        fixed_teacher = (
            open_teacher(load_fixed(config, "teacher.weights")) if config.teacher.weights else None
        )
        gram_teacher = load_fixed(config, "gram.weights") if config.gram else None
    if config.init and not resumed:  # the file that a resumed run started from may be gone
        trained = _load_trained(config, fixed_teacher and fixed_teacher.backbone)
    architecture = trained.architecture if trained else None
    if config.init and resumed:
        kept = resumed.metadata["architecture"].items()
        architecture = {key: tuple(value) if isinstance(value, list) else value for key, value in kept}
    return RunContext(
        source=source,
        resumed=resumed,
        trained=trained,
        architecture=architecture,
        processes=int(accelerator.num_processes),
        device=accelerator.device,
        fixed_teacher=fixed_teacher,
        gram_teacher=gram_teacher,
        estimate=BudgetEstimate(planned),
    )


def build_untrained(
    config: PretrainConfig,
    architecture: Mapping[str, Any] | None = None,
    feature_teacher: Backbone | None = None,
) -> tuple[Network, Network]:
    """Build student and teacher as at the start of a run, their parameters drawn from the seed.

    `architecture` is that of trained weights, which the settings may not fully describe; `feature_teacher` is
    the backbone whose features the student imitates.
    """
    torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK))
    keywords = dict(architecture or _architecture(config))
    keywords.pop("drop_path", None)  # the student's is a setting of the run, the teacher has none
    if not config.model.timm:
        for name in ("drop_path_schedule", "dropout", "attention_dropout"):
            keywords[name] = getattr(config.model, name)
        rotary = keywords["positions"] == "rotary"
        keywords["rotary_rescale"] = config.model.rotary_rescale if rotary else None
        keywords["mask_token"] = _hides_patches(config)
    patch_head = bool(config.loss.patch_weight) and not config.head.shared
    if feature_teacher is not None:
        patch_head = feature_teacher.has_patches and config.teacher.patch_weight > 0
    return build_networks(
        backbone=keywords,
        drop_path=config.model.drop_path,
        patch_drop=config.model.patch_drop,
        head=config.head.model_dump(exclude={"shared"}),
        patch_head=patch_head,
        feature_dim=None if feature_teacher is None else feature_teacher.width,
        gradients=AROUND if config.loss.gradient_weight else 0,
    )


def _hides_patches(config: PretrainConfig) -> bool:
    """Tell whether the student has a mask token; that of a frozen teacher sees all patches."""
    return bool(config.loss.patch_weight) and config.teacher.weights is None


def _architecture(config: PretrainConfig) -> dict[str, Any]:
    """Return the arguments of the backbone that the settings describe."""
    arguments = {"image_size": config.image_shape, "channels": config.data.channels}
    if config.model.timm:
        return {"name": config.model.timm, **arguments}
    width, depth, heads = config.model.shape
    own = config.model.model_dump(include={argument.name for argument in fields(ViTConfig)})
    return own | arguments | {"width": width, "depth": depth, "heads": heads}


def _build_state(config: PretrainConfig, context: RunContext, accelerator: Accelerator) -> TrainingState:
    device, processes = accelerator.device, context.processes
    images, resumed = context.source.images_per_epoch, context.resumed is not None
    plan = make_plan(config, images, processes, context.estimate.steps, resumed=resumed)
    student, teacher = _student_and_teacher(config, context)
    sharded = processes > 1 and (config.compute.sharded or launched_for_shards())
    precision = choose_precision(config.compute.precision, device)
    if sharded:
        _shard(student, teacher, config, device, DTYPES[precision])
    for network in (student, teacher):
        convolves = config.model.timm and device.type == "cuda"  # fastest with the channels last
        layout: Any = {"memory_format": torch.channels_last} if convolves else {}
        network.to(device, **layout)
    groups = parameter_groups(
        student.backbone,
        *student.heads,
        *([student.gradient_head] if student.gradient_head else []),
        layer_decay=config.optim.layer_decay,
        patch_embed_lr=config.optim.patch_embed_lr,
    )
    loader = build_loader(
        config,
        context.source,
        global_batch=plan.global_batch,
        rank=accelerator.process_index,
        world_size=processes,
        pin=device.type == "cuda",
    )
    augment = build_augment(config)  # the workers' is the same module, if it is an object of the user's
    evaluation = OnlineEvaluation(
        source=context.source.evaluated_part()[0],
        transform=build_eval_transform(config),
        seed=config.seed,
        autocast=DTYPES[precision] if precision != "no" else None,
    )
    return TrainingState(
        config=config,
        plan=plan,
        accelerator=accelerator,
        precision=precision,
        source=context.source,
        loader=loader,
        augment=augment.to(device) if config.data.augment_on == "device" else augment,
        student=student,
        # DistributedDataParallel; the teacher has no gradients to exchange, so it is not wrapped.
        wrapped=accelerator.prepare_model(student) if processes > 1 and not sharded else student,
        sharded=sharded,
        teacher=teacher,
        objective=_build_objective(config, context, student.backbone),
        optimizer=build_optimizer(config.optim.name, groups),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        evaluation=evaluation,
        checkpoints=Checkpoints(Path(config.output), keep_every=config.compute.keep_every),
        weights_read=context.weights_read,
        unreadable=UnreadableImages(Path(config.output), limit=config.data.max_unreadable),
    )


def _compile(state: TrainingState) -> Iterator[str]:
    """Compile networks and losses as `compute.compile` says; yield a note on it."""
    wanted, auto = state.config.compute.compile, state.config.compute.compile == "auto"
    if not choose_compile(wanted, state.device, state.plan.total_steps):
        return
    if auto and not isinstance(state.student.backbone, VisionTransformer):
        return
    if auto and (missing := missing_for_compile()):
        yield f"blocks are not compiled (compute.compile=auto), which would make steps faster: {missing}"
        return
    if auto:
        yield "the first step compiles the blocks, so that others are faster (compute.compile=false: not)"
    # FSDP gathers the weights of a block outside of its graph.
    compile_networks((state.student, state.teacher), whole=not auto and not state.sharded)
    state.objective.compiled = state.device.type == "cuda"  # a CPU computes them part by part, in its cache


def _student_and_teacher(config: PretrainConfig, context: RunContext) -> tuple[Network, Network]:
    """Build student and teacher, and check that they take what the run gives them."""
    feature_teacher = context.feature_teacher
    student, teacher = build_untrained(config, context.architecture, feature_teacher)
    have_patches = student.backbone.has_patches and (feature_teacher is None or feature_teacher.has_patches)
    if feature_teacher and config.teacher.patch_weight and not have_patches:
        raise ValueError("one of student and frozen teacher has no patches; set teacher.patch_weight=0")
    student.backbone.grad_checkpointing = config.model.grad_checkpointing
    views = config.views
    for size in [views.global_shape, *([views.local_shape] if views.local_count else [])]:
        student.backbone.grid_of(*size)  # raises if the backbone does not take images of this size
    if context.trained:
        tensors = context.trained.state_dict()
        if not _hides_patches(config):
            tensors.pop("mask_token", None)
        for network in (student, teacher):
            network.backbone.load_state_dict(tensors)
    return student, teacher


def _build_objective(config: PretrainConfig, context: RunContext, student: Backbone) -> Objective:
    """Build the objective with the networks that it compares the student with, beside its average."""
    views, loss = config.views, config.loss
    if context.fixed_teacher or context.gram_teacher:
        from dino_vit.weights.loading import check_fixed_teacher, check_gram_teacher

        if context.gram_teacher:
            check_gram_teacher(config, context.gram_teacher, student)
        if context.fixed_teacher:
            check_fixed_teacher(config, context.fixed_teacher.backbone, student)
    teacher = context.fixed_teacher
    has_heads = teacher is None or teacher.network is not None
    objective = Objective(
        context.device,
        prototypes=config.head.prototypes,
        views=views.global_count + views.local_count,
        global_views=views.global_count,
        global_size=views.global_shape,
        grid=student.grid_of(*views.global_shape),
        student_temperature=STUDENT_TEMPERATURE,
        centering=loss.centering,
        patch_weight=loss.patch_weight if has_heads else config.teacher.patch_weight,
        koleo_weight=loss.koleo_weight,
        gram_weight=config.gram.weight if config.gram else 0.0,
        gradient_weight=loss.gradient_weight,
        gram_teacher=context.gram_teacher,
        fixed_teacher=context.fixed_teacher
        and (context.fixed_teacher.network or context.fixed_teacher.backbone),
    )
    if context.fixed_teacher:
        for name, center in context.fixed_teacher.centers.items():
            if (own := objective.centers.get(name.removesuffix(".center"))) is not None:
                own.center.copy_(center)
    return objective


def _shard(
    student: Network, teacher: Network, config: PretrainConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Share the parameters of both networks among the processes."""
    refused = {
        f"model.arch={config.model.arch}": not isinstance(student.backbone, VisionTransformer),
        f"optim.name={config.optim.name}": config.optim.name != "adamw",
    }
    if wrong := [setting for setting, given in refused.items() if given]:
        why = "sharded weights (compute.sharded=true, or Accelerate's FSDP)"
        raise ValueError(f"{', '.join(wrong)} does not work with {why}; leave one of them out")
    for network in (student, teacher):
        assert isinstance(network.backbone, VisionTransformer)
        apply_fsdp(network, network.backbone.blocks, ["run_unsharded"], device, dtype)


def _load_trained(config: PretrainConfig, fixed_teacher: Backbone | None) -> Backbone:
    """Load the weights that `init` starts from; a frozen teacher sees the same images."""
    from dino_vit.weights.loading import load_fixed

    assert config.init is not None
    overrides: dict[str, Any] = {"heads": config.init.heads} if config.init.heads else {}
    overrides |= {"mask_token": True} if _hides_patches(config) else {}
    given = given_keys(config)
    if "data.channels" in given:
        overrides["channels"] = config.data.channels
    elif fixed_teacher:
        overrides["channels"] = fixed_teacher.channels
    if config.recipe != "auto" or {"views.global_size", "model.image_size"} & given:
        overrides["image_size"] = config.image_shape  # auto takes the weights' size
    names = ("network", "format")
    options = overrides | {name: getattr(config.init, name) for name in names}
    backbone = load_fixed(config, "init.weights", **options)
    stated = backbone.provenance.size
    if "image_size" in overrides or stated in (None, backbone.image_size):
        return backbone
    # That of DINOv2's positions is not that of its images.
    return load_fixed(config, "init.weights", **options, image_size=stated)

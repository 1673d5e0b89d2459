"""Pretraining from beginning to end: its processes, its folder, its setup, its loop."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from dino_vit.config.complete import DecidedRun, complete
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.cache import SHARDS, bound_caches, cache_folder
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.distributed import SETUP_TIMEOUT, limit_waits
from dino_vit.core.process import Interruption, locked
from dino_vit.core.runtime import DTYPES, launched_for_fsdp, start_processes
from dino_vit.core.text import shows_parts
from dino_vit.data.remote import retrying
from dino_vit.eval.online import OnlineEvaluation
from dino_vit.eval.sets import choose_splits, describe_use
from dino_vit.method.optim import build_optimizer, parameter_groups
from dino_vit.reports.metrics import MetricsRecord
from dino_vit.training.evaluations import Evaluations
from dino_vit.training.inputs import Inputs, check_alike, inspect, open_inputs
from dino_vit.training.loop import train
from dino_vit.training.networks import (
    build_objective,
    build_untrained,
    compile_run,
    make_sharded,
    student_and_teacher,
)
from dino_vit.training.plan import Clock, Plan
from dino_vit.training.reporter import Reporter
from dino_vit.training.resume import check_same_run, set_figures_aside
from dino_vit.training.state import TrainingState
from dino_vit.views.build import (
    build_augment,
    build_eval_transform,
    build_loader,
    build_pixels,
    keep_decoded,
)
from dino_vit.views.loader import UnreadableImages


def pretrain(
    config: PretrainConfig,
    *,
    on_metrics: Callable[[MetricsRecord], object] | None = None,
    on_checkpoint: Callable[[Path], object] | None = None,
) -> None:
    """Train as configured, resuming where the output folder has a run.

    On rank 0 `on_metrics` is called with each record and `on_checkpoint` with the path of each checkpoint.
    """
    if Path(config.output).resolve() in map(Path.resolve, map(Path, config.data.sources)):
        raise ValueError(f"output={config.output} is the source of the images; give a folder of its own")
    with Interruption() as interruption, retrying(config.data.timeout):
        accelerator = start_processes(trackers=config.compute.trackers, folder=Path(config.output))
        with locked(Path(config.output)):
            state = set_up(config, accelerator)
            if config.data.cache_gb and accelerator.is_main_process:
                bound_caches(config.data.cache_gb, Path(config.data.cache or cache_folder() / SHARDS))
            with Reporter(state, on_metrics=on_metrics, on_checkpoint=on_checkpoint) as reporter:
                with shows_parts(reporter.progress.refresh):
                    finished = train(state, reporter, interruption)
                accelerator.wait_for_everyone()
                limit_waits(SETUP_TIMEOUT)  # of what comes next in this process
        if not finished:
            interruption.leave()


def set_up(config: PretrainConfig, accelerator: Accelerator) -> TrainingState:
    """Set up a new run, or one that resumes from the newest checkpoint in its output folder."""
    checkpoint = Checkpoints(Path(config.output)).newest_of_rank_0()
    if checkpoint and "architecture" not in checkpoint.metadata:  # as in the folder of a fine-tuning
        text = f"{checkpoint.path} is not a checkpoint of a pretraining"
        raise ValueError(f"{text}; give another output, or move that folder away")
    inputs = open_inputs(config, checkpoint)
    facts = inspect(config, inputs, accelerator.device)
    run = complete(config, facts)
    check_alike(run.shared)
    if facts.checkpoint and inputs.checkpoint:
        check_same_run(run, facts.checkpoint, inputs)
    state = build_state(run, inputs, accelerator)
    state.run = replace(run, notes=(*run.notes, *_prepare(state, inputs)))
    return state


def build_state(run: DecidedRun, inputs: Inputs, accelerator: Accelerator) -> TrainingState:
    """Build the state of a run before its first step."""
    config, device, processes = run.config, accelerator.device, int(accelerator.num_processes)
    student, teacher = student_and_teacher(config, inputs)
    sharded = processes > 1 and (config.compute.sharded or launched_for_fsdp())
    if sharded:
        make_sharded(student, teacher, config, device, DTYPES[run.precision])
    for network in (student, teacher):
        convolves = config.model.timm and device.type == "cuda"  # fastest with the channels last
        layout: Any = {"memory_format": torch.channels_last} if convolves else {}
        network.to(device, **layout)
    groups = parameter_groups(
        student.backbone,
        *student.heads,
        layer_decay=config.optim.layer_decay,
        patch_embed_lr=config.optim.patch_embed_lr,
    )
    loader = build_loader(
        config,
        inputs.source,
        global_batch=run.global_batch,
        rank=accelerator.process_index,
        world_size=processes,
        pin=device.type == "cuda",
    )
    online = OnlineEvaluation(
        source=inputs.source,
        transform=build_eval_transform(config),
        seed=config.seed,
        images=run.evaluated_images,
        autocast=DTYPES[run.precision] if run.precision != "no" else None,
    )
    minutes, compute = config.budget.minutes, config.compute
    return TrainingState(
        run=run,
        plan=Plan(run),
        clock=Clock(None if minutes is None else 60 * minutes),
        accelerator=accelerator,
        source=inputs.source,
        loader=loader,
        augment=build_augment(config).to(device),
        student=student,
        # DistributedDataParallel; the teacher has no gradients to exchange, so it is not wrapped.
        wrapped=accelerator.prepare_model(student) if processes > 1 and not sharded else student,
        sharded=sharded,
        teacher=teacher,
        objective=build_objective(config, inputs, student.backbone, device),
        optimizer=build_optimizer(config.optim.name, groups),
        scaler=torch.amp.GradScaler(device.type, enabled=run.precision == "fp16"),
        evaluations=Evaluations(online),
        checkpoints=Checkpoints(Path(config.output), keep_every=compute.keep_every),
        weights_read=inputs.weights_read,
        unreadable=UnreadableImages(Path(config.output), limit=config.data.max_unreadable),
    )


def _prepare(state: TrainingState, inputs: Inputs) -> Iterator[str]:
    """Compile networks, restore a checkpoint, and yield notes on the run."""
    config, summary = state.config, inputs.summary
    state.evaluations.online.warned = bool(summary.unreadable)  # which the notes name
    yield summary.describe(build_pixels(config))
    yield from compile_run(state)
    if config.data.keep_decoded and (note := keep_decoded(state.loader, summary)):
        yield note
    if inputs.checkpoint:
        state.restore(inputs.checkpoint)
    if inputs.feature_teacher:
        yield f"the student imitates the features of {config.teacher.weights}, which has no head"
    if state.plan.steps_between_evaluations:
        yield from _prepare_evaluations(state, inputs)


def _prepare_evaluations(state: TrainingState, inputs: Inputs) -> Iterator[str]:
    """Note what is to be evaluated before the next step; yield notes on what the run is evaluated by."""
    config, evaluations = state.config, state.evaluations
    if evaluations.online.has_labels and (splits := choose_splits(state.source)):
        use = describe_use(state.source, *splits, config.data.images)
        yield f"{use}; the run learns from all of them, without labels"
    before, evaluations.measured_on = evaluations.measured_on, evaluations.digest()
    if evaluations.measured_on == before or state.is_done:
        return
    if before is not None:
        set_figures_aside(state)
    if inputs.checkpoint is None:
        evaluations.initial = state.teacher
    elif not config.init:  # whose file may be gone
        untrained = build_untrained(config, feature_teacher=inputs.feature_teacher)[1]
        evaluations.initial = untrained.to(state.device)

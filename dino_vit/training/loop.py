"""Pretraining: set up, steps in the order of the paper's pseudo-code, evaluate, save."""

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from dino_vit.config.auto import ENOUGH_IMAGES, EVALUATIONS, SHORT, Choice, network_ladder
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PHASES, PretrainConfig
from dino_vit.config.settings import get
from dino_vit.core import log
from dino_vit.core.cache import bound_caches
from dino_vit.core.checkpoint import Checkpoints, NotFinite
from dino_vit.core.distributed import (
    SETUP_TIMEOUT,
    all_reduce_mean,
    any_process,
    broadcast_int,
    from_rank_0,
    in_all_processes,
    limit_waits,
)
from dino_vit.core.process import Interruption, locked
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import start_processes, wait_for_device
from dino_vit.core.storage import StorageError
from dino_vit.core.text import progress
from dino_vit.data.image_set import spread
from dino_vit.data.sources.files import retrying
from dino_vit.data.statistics import INSPECTED, inspect_images
from dino_vit.method.objective import output_statistics
from dino_vit.method.optim import (
    clip_gradients,
    ema_update,
    reduce_loss,
    revert_if_nonfinite,
    set_rates,
    snapshot,
    step_if_finite,
)
from dino_vit.models.head import DINOHead
from dino_vit.reports.metrics import MetricsRecord
from dino_vit.training.plan import ScheduleValues
from dino_vit.training.reporter import Reporter
from dino_vit.training.resolve import NO_ESTIMATE, BudgetEstimate, start_choices, with_choices
from dino_vit.training.setup import open_context, set_up
from dino_vit.training.state import ADVICE, WARM_UP, TrainingState
from dino_vit.views.loader import Batch
from dino_vit.views.workers import NoBatch

TIMED = 4  # steps, at least, to measure the speed
MEASURED = 0.03  # of the minutes, at most, for the steps before those, and for more of them
TIMED_IMAGES = 100  # evaluated for the same
EVALUATED = 0.1  # share of the time of a run of some minutes


def pretrain(
    config: PretrainConfig,
    *,
    on_metrics: Callable[[MetricsRecord], object] | None = None,
    on_checkpoint: Callable[[Path], object] | None = None,
) -> None:
    """Train as configured, resuming where the output folder has a run.

    On rank 0 `on_metrics` is called with each record and `on_checkpoint` with the path of each checkpoint.
    """
    config.check_ready()
    with Interruption() as interruption, retrying(config.data.timeout):
        accelerator = start_processes(trackers=config.run.trackers, folder=Path(config.output))
        with locked(Path(config.output)):
            run = set_up(config, accelerator, fit_to_minutes(config))
            if config.data.cache_gb and accelerator.is_main_process:
                bound_caches(config.data.cache_gb)
            with Reporter(run, on_metrics=on_metrics, on_checkpoint=on_checkpoint) as reporter:
                finished = train(run.state, reporter, interruption)
                accelerator.wait_for_everyone()
                limit_waits(SETUP_TIMEOUT)  # of what comes next in this process
        if not finished:
            interruption.leave()


def train(state: TrainingState, reporter: Reporter, interruption: Interruption) -> bool:
    """Take the remaining steps; return whether all were taken, and not stopped before."""
    reporter.start()
    state.began = time.monotonic()
    if state.saved_step is None and state.plan.steps_between_evaluations:
        reporter.log_baseline(state.evaluate_baseline())
        state.interval.restart()
    state.begin_pace()
    interruption.in_steps, first = True, state.step
    batches = state.loader.batches(state.step, lambda: interruption.received is not None)
    with contextlib.closing(batches), state.writer:
        while state.step < state.plan.total_steps:
            try:
                take_step(state, batches)
            except NoBatch:
                stop_without_batch(state, reporter)
                interruption.leave()
            # All processes must leave the loop after the same step, or the others wait in a collective.
            stops = any_process(interruption.received is not None or state.interval.seems_stuck)
            if state.step == first + 1:  # the hosts are set up, and the networks compiled
                limit_waits(timedelta(minutes=state.config.run.peer_timeout))

            finish_save(state, reporter)
            reporter.progress.advance(state.step, state.plan.total_steps)
            if state.plan.is_logged(state.step):
                log_step(state, reporter)
            else:
                state.refit()
            if stops:
                state.check_skipped()
                save(state, reporter, wait=True)
                reporter.stop()
                return False
            if state.is_best or state.step % state.config.run.checkpoint_every == 0:
                save(state, reporter)
        save(state, reporter, last=True)
    reporter.finish()
    return True


def stop_without_batch(state: TrainingState, reporter: Reporter) -> None:
    """Save what can be saved when a run that was asked to stop would wait for images first."""
    # Others may be in the middle of the step, and so is this process after a micro-batch.
    if state.accelerator.num_processes == 1 and state.config.optim.accumulate == 1:
        save(state, reporter, wait=True)
        reporter.stop()
    else:
        finish_save(state, reporter, wait=True)
    reporter.warn(f"step {state.step:,}: stopped while no images came")


def take_step(state: TrainingState, batches: Iterator[Batch]) -> None:
    """Take one optimiser step, and update the teacher."""
    config = state.config
    state.rates = rates = state.plan.rates(state.step)
    set_rates(state.optimizer, lr=rates.lr, weight_decay=rates.weight_decay)
    state.student.patch_drop = state.plan.patch_drop(state.step)

    # The running statistics of BatchNorm, which a forward pass changes.
    before = snapshot(state.statistics)
    loss = torch.zeros((), device=state.device)
    for micro in range(config.optim.accumulate):
        batch = state.interval.next_batch(batches)
        state.unreadable.count(batch)
        # What networks draw is a function of (seed, step, part of the batch), so that a resumed run draws the
        # same: patches and stochastic depth from a generator of their own, the rest from PyTorch's.
        # Seeded when the images are there: code of the user's own that reads them may draw, too.
        part = state.accelerator.process_index + state.accelerator.num_processes * micro
        seed = derive_seed(config.seed, RngPurpose.NETWORK, state.step, part)
        torch.default_generator.manual_seed(seed)
        if state.device.type != "cpu":
            torch.get_device_module(state.device).manual_seed(seed)
        state.student.generator = torch.Generator().manual_seed(seed)
        loss += forward_backward(state, batch, rates, last=micro == config.optim.accumulate - 1)

    state.scaler.unscale_(state.optimizer)  # does nothing except in float16, like `scale` and `update`
    norm = clip_gradients(state.parameters, mode=config.optim.clip_mode, max_norm=config.optim.clip)
    freeze(state)
    loss, finite = reduce_loss(loss, norm)
    step_if_finite(state.optimizer, finite)
    revert_if_nonfinite(finite, state.statistics, before)
    scale = state.scaler.scale(torch.ones((), device=state.device)) if state.scaler.is_enabled() else None
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    # After a skipped step too: the student is as it was, so the teacher moves towards it.
    ema_update(*state.ema_pairs, rates.momentum)
    state.objective.update()

    state.step += 1
    state.interval.add(loss, norm, finite, state.plan.global_batch, scale)


def forward_backward(state: TrainingState, batch: Batch, rates: ScheduleValues, *, last: bool) -> Tensor:
    """Add the gradients of a micro-batch to the student's; return its part of the loss of CLS tokens."""
    accumulate = state.config.optim.accumulate
    # Outside of autocast: augmentation of the user's own is in float32 here as it is in workers.
    views, masks = state.views_of(batch), state.masks_of(batch)
    # Processes exchange gradients once per step, in its last backward pass; sharded ones in each.
    with contextlib.nullcontext() if last or state.sharded else state.accelerator.no_sync(state.wrapped):
        with state.autocast():
            terms, teacher_out = state.objective(
                state.wrapped,
                state.teacher,
                views,
                masks,
                images=len(batch.samples),
                teacher_temperature=rates.teacher_temp,
            )
        torch.autograd.backward(state.scaler.scale(terms.loss / accumulate))
    if last and state.plan.is_logged(state.step + 1):
        state.outputs = output_statistics(terms, teacher_out, rates.teacher_temp)
    return terms.cls.detach() / accumulate


def freeze(state: TrainingState) -> None:
    """Drop the gradients of what does not learn yet: prototypes, or a trained backbone before its heads."""
    frozen: list[nn.Module] = []
    if state.step < state.plan.freeze_steps:
        frozen += [head.last_layer for head in state.student.heads if isinstance(head, DINOHead)]
    if state.step < state.plan.head_steps:
        frozen.append(state.student.backbone)
    for module in frozen:
        module.zero_grad(set_to_none=True)  # the optimiser skips parameters without a gradient


def log_step(state: TrainingState, reporter: Reporter) -> None:
    """Log what was summed since the last log line, with an evaluation where one is due."""
    state.refit(logged=True)
    metrics = state.read_interval()
    if state.plan.is_evaluated(state.step):
        metrics = dataclasses.replace(metrics, **dataclasses.asdict(state.evaluate()))
    reporter.log(metrics)
    state.check_skipped()
    state.interval.restart()  # so that the evaluation does not count as training time


def save(state: TrainingState, reporter: Reporter, *, wait: bool = False, last: bool = False) -> None:
    """Begin to write a checkpoint, after the one before; `wait` until it is on the disk."""
    finish_save(state, reporter, wait=True)
    # Rank 0 decides: it alone knows whether the one before was written, and all give their parts of shards.
    if broadcast_int(state.saved_step == state.step):
        return
    state.begin_save()
    if wait or last:
        finish_save(state, reporter, wait=True, last=last)


def finish_save(state: TrainingState, reporter: Reporter, *, wait: bool = False, last: bool = False) -> None:
    """Report a checkpoint that is written; if that failed, say so, or raise at the end of a run."""
    try:
        path = state.writer.finish(wait=wait)
    except (NotFinite, StorageError) as error:
        if last:
            full = "Free disk space for it and run the same command again"
            advice = full if isinstance(error, StorageError) else ADVICE
            text = f"the run is complete, but its last checkpoint could not be written: {error}. {advice}"
            raise type(error)(text) from error
        reporter.warn(f"step {state.writer.step:,}: no checkpoint was written. {error}")
        if state.best and state.best["step"] == state.writer.step:
            state.best = state.best_written
    else:
        if path is not None:
            state.saved_step = state.writer.step
            state.best_written = state.writer.metadata["best"]
            reporter.saved(path)


def fit_to_minutes(config: PretrainConfig) -> BudgetEstimate:
    """Measure what fits into `budget.minutes`; nothing for another budget, and for a run that resumes.

    Measuring and evaluations are part of the minutes; those of `recipe=auto` take a tenth, six at most.
    """
    minutes, start = config.budget.minutes, time.monotonic()
    if minutes is None or Checkpoints(Path(config.output)).exist_on_rank_0():
        return NO_ESTIMATE
    context = open_context(config, start_processes())
    log.info("measuring how long a step and an evaluation take ...")
    config = with_choices(config, start_choices(config, context))
    choices, least = list[Choice](), 1
    samples = spread(len(context.source), INSPECTED)
    inspect = partial(inspect_images, context.source, samples, max_pixels=config.data.max_pixels)
    with in_all_processes():
        images = from_rank_0(inspect)
    ladder = network_ladder(config, images.image_size)
    step, evaluation = measured_seconds(replace(config, ladder[0].settings) if ladder else config)
    if ladder:
        smallest = ladder[0]
        batch = config.data.batch_size * config.optim.accumulate * context.processes
        seen = 60 * minutes / step * batch  # images, with the smallest network
        affordable = [rung for rung in ladder if seen * (smallest.cost / rung.cost) ** 2 >= ENOUGH_IMAGES]
        chosen = max(affordable, key=lambda rung: rung.cost, default=smallest)
        count = float(f"{seen * smallest.cost / chosen.cost:.2g}")
        reason = f"sees about {count:,.0f} images in {minutes:g} minutes on this machine"
        choices = [Choice(key, value, reason) for key, value in chosen.settings.items()]
        if chosen is not smallest:
            step, evaluation = measured_seconds(replace(config, chosen.settings))
    count = max(1, min(EVALUATIONS, int(EVALUATED * 60 * minutes / max(evaluation, 1e-6)) - 1))
    evaluating = (count + 1) * evaluation  # one is before the first step
    if config.recipe == "auto" and 60 * minutes - evaluating >= SHORT * step:
        # A step of a long run takes longer.
        least, (step, _) = SHORT - 1, measured_seconds(with_choices(config, choices), SHORT)
    seconds = float(all_reduce_mean(torch.tensor(time.monotonic() - start, device=context.device)))
    steps = max(least, int((60 * minutes - seconds - evaluating) / step))
    return BudgetEstimate(steps, choices, count, step, seconds)


def measured_seconds(config: PretrainConfig, steps: int = 1000) -> tuple[float, float]:
    """Measure how long a step of a run of some length and an evaluation take; leave nothing behind."""
    limit = MEASURED * 60 * (config.budget.minutes or math.inf)
    with TemporaryDirectory() as folder:
        changes: dict[str, object] = {"output": folder, "run.trackers": (), "budget.steps": steps}
        changes |= {"data.max_unreadable": 1.0}  # the run itself names such images
        changes |= {key: 0 for key in PHASES if get(config, key)}  # which no length of a run fits for sure
        state = set_up(replace(config, changes), start_processes()).state
        with contextlib.closing(state.loader.batches()) as batches:
            step_seconds = seconds_per_step(state, partial(take_step, state, batches), limit)
        seconds = torch.tensor([step_seconds, evaluation_seconds(state)], device=state.device)
        mean_step, mean_evaluation = all_reduce_mean(seconds).tolist()
        return mean_step, mean_evaluation


def seconds_per_step(state: TrainingState, take: Callable[[], object], limit: float) -> float:
    """Time steps beyond the images that workers have made ahead, as these hide how long images take.

    Workers finish at about the same time: each of them gives its part of the steps that are timed.
    """
    # Rank 0 decides, since all must take as many steps.
    before = WARM_UP + broadcast_int(state.steps_ahead)
    timed = max(TIMED, broadcast_int(math.ceil(state.loader.workers / state.config.optim.accumulate)))
    with progress("measuring, steps", before + timed) as advance:

        def take_steps(least: int, most: int) -> tuple[int, float]:
            """Take `most` steps, or at least `least` and as many as fit into the limit; return their time."""
            start, taken = time.perf_counter(), 0
            while taken < least or (taken < most and broadcast_int(time.perf_counter() - start < limit)):
                take()
                taken += 1
                advance(1)
            wait_for_device(state.device)
            return taken, time.perf_counter() - start

        take_steps(WARM_UP, before)
        taken, seconds = take_steps(TIMED, timed)
    return seconds / taken


def evaluation_seconds(state: TrainingState) -> float:
    """Return the time that an evaluation takes, by one of a few of its images."""
    if state.plan.steps_between_evaluations is None:
        return 0.0
    evaluation = state.evaluation
    few = copy.copy(evaluation)
    few.indices = evaluation.indices[:TIMED_IMAGES]
    with torch.compiler.set_stance("force_eager"):
        state.teacher.run_unsharded(few)  # the first one loads libraries and kernels
        start = time.perf_counter()
        state.teacher.run_unsharded(few)
    seconds = time.perf_counter() - start
    return seconds * len(evaluation.indices) / len(few.indices)

"""Pretraining: the loop of the paper's pseudo-code, and what happens between two of its steps."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from dino_vit.config.loading import replace as replace_settings
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core import log
from dino_vit.core.checkpoint import NotFinite
from dino_vit.core.distributed import all_reduce_mean, any_process, limit_waits
from dino_vit.core.lock import locked
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import start_processes, synchronise
from dino_vit.core.signals import Interruption
from dino_vit.core.storage import StorageError
from dino_vit.method.objective import measure
from dino_vit.method.optim import (
    clip_gradients,
    ema_update,
    freeze_last_layer,
    reduce_loss,
    restore_unless,
    set_rates,
    snapshot,
    step_if_finite,
)
from dino_vit.models.head import DINOHead
from dino_vit.training.plan import Rates
from dino_vit.training.readings import Reading
from dino_vit.training.reporter import Reporter
from dino_vit.training.setup import set_up
from dino_vit.training.state import TrainingState
from dino_vit.views.loader import Batch

WARM_UP, TIMED = 2, 4  # steps taken to measure the speed


def pretrain(
    config: PretrainConfig,
    *,
    on_reading: Callable[[Reading], object] | None = None,
    on_checkpoint: Callable[[Path], object] | None = None,
) -> None:
    """Train as configured, resuming where the output folder has a run.

    On rank 0 `on_reading` is called with each reading and `on_checkpoint` with the path of each checkpoint.
    """
    with Interruption() as interruption:
        accelerator = start_processes(trackers=config.run.trackers, folder=Path(config.output))
        with locked(Path(config.output)):
            run = set_up(config, accelerator, measure=seconds_per_step)
            with Reporter(run, on_reading=on_reading, on_checkpoint=on_checkpoint) as reporter:
                finished = train(run.state, reporter, interruption)
                accelerator.wait_for_everyone()
        if not finished:
            interruption.leave()


def train(state: TrainingState, reporter: Reporter, interruption: Interruption) -> bool:
    """Take the remaining steps; return whether all were taken, and not stopped before."""
    reporter.start()
    state.start_clock()
    if state.saved_step is None and state.plan.steps_between_evaluations:
        reporter.log_baseline(state.evaluate_baseline())
        state.interval.restart()
    state.start_clock()
    interruption.in_steps, first = True, state.step
    with contextlib.closing(state.loader.batches(state.step)) as loaded, state.writer:
        batches = interruption.until_asked(loaded)
        while state.step < state.plan.total_steps:
            if not take_step(state, batches):
                return stop(state, reporter)
            # All processes must leave the loop after the same step, or the others wait in a collective.
            stopped = interruption.asked or state.loader.lost_worker
            ends = any_process(stopped or state.unreadable.too_many)
            if state.step == first + 1:  # the hosts are set up, and the networks compiled
                limit_waits(state.config.run.peer_timeout)
            if ends:
                state.unreadable.check(state.device)  # before a step with blank images is saved
            after_step(state, reporter)
            if ends and any_process(stopped):
                return stop(state, reporter)
        save(state, reporter, last=True)
    reporter.finish()
    return True


def stop(state: TrainingState, reporter: Reporter) -> bool:
    """Save a run that is not finished."""
    save(state, reporter, wait=True)
    reporter.stop()
    return False


def seconds_per_step(config: PretrainConfig) -> float:
    """Take a few steps of a run that leaves nothing behind, and return the mean time of one."""
    log.info("measuring how long a step takes ...")
    with TemporaryDirectory() as folder:
        # As a short run under auto, which fits the phases to it; otherwise none may be longer than the run.
        steps = 1000 if config.recipe == "auto" else 10**12
        changes = {"output": folder, "run.trackers": (), "budget.steps": steps}
        state = set_up(replace_settings(config, changes), start_processes()).state
        with contextlib.closing(state.loader.batches()) as batches:
            for step in range(WARM_UP + TIMED):
                if step == WARM_UP:
                    synchronise(state.device)
                    start = time.perf_counter()
                take_step(state, batches)
        synchronise(state.device)
        seconds = torch.tensor((time.perf_counter() - start) / TIMED, device=state.device)
        return float(all_reduce_mean(seconds))


def take_step(state: TrainingState, batches: Iterator[Batch | None]) -> bool:
    """Take one optimiser step, and update the teacher; return False, both as before, if a batch is None."""
    config, student = state.config, state.student
    # Stochastic depth is a function of (seed, step, rank), so that a resumed run draws the same.
    rank = state.accelerator.process_index
    torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK, state.step, rank))
    rates = state.plan.rates(state.step)
    set_rates(state.optimizer, lr=rates.lr, weight_decay=rates.weight_decay)

    # The running statistics of BatchNorm, which a forward pass changes.
    buffers = [*student.buffers(), *state.teacher.buffers()]
    before = snapshot(buffers)
    loss = torch.zeros((), device=state.device)
    for micro in range(config.optim.accumulate):
        batch = state.interval.wait(batches)
        if any_process(batch is None) or batch is None:  # a pass that not all can take
            restore_unless(torch.zeros((), dtype=torch.bool, device=state.device), buffers, before)
            return False
        state.unreadable.count(batch)
        loss += forward_backward(state, batch, rates, last=micro == config.optim.accumulate - 1)

    state.scaler.unscale_(state.optimizer)  # does nothing except in float16, like `scale` and `update`
    parts = list(student.children())
    norm = clip_gradients(parts, mode=config.optim.clip_mode, max_norm=config.optim.clip)
    freeze(state)
    loss, finite = reduce_loss(loss, norm)
    step_if_finite(state.optimizer, finite)
    restore_unless(finite, buffers, before)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    # After a skipped step too: the student is as it was, so the teacher moves towards it.
    frozen = state.objective.frozen is not None
    ema_update(state.teacher, student, rates.momentum, statistics=frozen)
    state.objective.update()

    state.step += 1
    state.interval.add(loss, norm, finite, state.plan.global_batch)
    return True


def forward_backward(state: TrainingState, batch: Batch, rates: Rates, *, last: bool) -> Tensor:
    """Add the gradients of one forward pass to the student's; return its part of the loss of CLS tokens."""
    accumulate = state.config.optim.accumulate
    # Processes exchange gradients once per step, in its last pass; sharded ones have no room for whole ones.
    with contextlib.nullcontext() if last or state.sharded else state.accelerator.no_sync(state.wrapped):
        with state.autocast():
            out = state.objective(
                state.wrapped,
                state.teacher,
                state.views_of(batch),
                state.masks_of(batch),
                images=len(batch.samples),
                teacher_temperature=rates.teacher_temp,
            )
        torch.autograd.backward(state.scaler.scale(out.loss / accumulate))
    loss_of_cls = out.cls.detach()
    if last and state.plan.is_logged(state.step + 1):
        state.outputs = measure(out, rates.teacher_temp)
    state.objective.accumulate(out)
    return loss_of_cls / accumulate


def freeze(state: TrainingState) -> None:
    """Drop the gradients of what does not learn yet: prototypes, or a trained backbone before its heads."""
    if state.step < state.plan.freeze_steps:
        for head in state.student.heads:
            if isinstance(head, DINOHead):
                freeze_last_layer(head.last_layer)
    if state.step < state.plan.head_steps:
        for parameter in state.student.backbone.parameters():
            parameter.grad = None


def after_step(state: TrainingState, reporter: Reporter) -> None:
    """Log, evaluate and save what is due after a step."""
    finish_save(state, reporter)
    reporter.progress.advance(state.step)
    if state.plan.is_logged(state.step):
        state.refit()
        reading = state.read_interval()
        if state.plan.is_evaluated(state.step):
            reading = replace(reading, **state.evaluate()._asdict())
        reporter.log(reading)
        state.check_skipped()
        state.interval.restart()  # so that the evaluation does not count as training time
    is_best = state.best is not None and state.best["step"] == state.step
    if is_best or state.step % state.config.run.checkpoint_every == 0:
        save(state, reporter)


def save(state: TrainingState, reporter: Reporter, *, wait: bool = False, last: bool = False) -> None:
    """Begin to write a checkpoint, after the one before; `wait` until it is on the disk."""
    finish_save(state, reporter, wait=True)
    if state.saved_step == state.step:
        return
    state.begin_save()
    if wait or last:
        finish_save(state, reporter, wait=True, last=last)


def finish_save(state: TrainingState, reporter: Reporter, *, wait: bool = False, last: bool = False) -> None:
    """Report a checkpoint that is written; if that failed, say so, or raise at the end of a run."""
    try:
        path = state.finish_save(wait=wait)
    except (NotFinite, StorageError) as error:
        if last:
            full = "Free disk space for it and run the same command again"
            advice = full if isinstance(error, StorageError) else state.advice
            text = f"the run is complete, but its last checkpoint could not be written: {error}. {advice}"
            raise type(error)(text) from error
        reporter.progress.notice(f"step {state.writer.step:,}: no checkpoint was written. {error}")
    else:
        if path is not None:
            reporter.saved(path)

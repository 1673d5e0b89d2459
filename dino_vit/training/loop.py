"""The loop: steps in the order of the paper's pseudo-code, logged, evaluated, saved."""

import contextlib
import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from dino_vit.config.length import EVALUATED
from dino_vit.core import log
from dino_vit.core.checkpoint import NotFinite
from dino_vit.core.distributed import DelayedVote, broadcast_int, limit_waits
from dino_vit.core.process import Interruption
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.storage import StorageError
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
from dino_vit.training.state import TrainingState
from dino_vit.views.loader import Batch

# What to do about a state that is not finite.
RESUME_ADVICE = (
    "Run it again with compute.resume=changed, and compute.precision=no or a lower optim.lr, optim.clip or "
    "loss.teacher_temp; it goes on from its last good checkpoint"
)


def train(state: TrainingState, reporter: Reporter, interruption: Interruption) -> bool:
    """Take the remaining steps; return whether all were taken, and not stopped before."""
    reporter.start()
    state.clock.start()
    evaluations, clock = state.evaluations, state.clock
    if evaluations.initial is not None:
        reporter.log_baseline(evaluations.evaluate_baseline(evaluations.initial))
        evaluations.initial = None
        # The first one, which opens files, may take as long as all minutes.
        clock.reserve = min(evaluations.seconds, EVALUATED * (clock.budget or 0.0))
        clock.skip_evaluation()
    state.interval.start_timing()
    interruption.in_steps, first, vote = True, state.step, DelayedVote()
    # At their end a checkpoint that is being written is on the disk, whatever else has failed.
    with contextlib.closing(state.loader.batches(state.step)) as batches, state.writer.thread:
        while not state.is_done:
            take_step(state, batches)
            # All processes must leave the loop after the same step, or the others wait in a collective.
            stops, seconds = vote(
                interruption.received is not None or state.interval.seems_stuck, clock.seconds
            )
            clock.agree(seconds)
            if state.step == first + 1:  # the hosts are set up, and the networks compiled
                limit_waits(timedelta(minutes=state.config.compute.peer_timeout))

            finish_save(state, reporter)
            reporter.progress.advance(state.step, state.total_steps)
            if state.planned.is_logged:
                log_step(state, reporter)
            else:
                reporter.progress.refresh()
            if stops:
                vote.result()  # of this step, which decides nothing any more
                check_skipped(state)
                save(state, reporter, wait=True)
                reporter.stop()
                return False
            intervals = state.config.compute.checkpoint_every, state.config.compute.keep_every
            is_due = any(every and state.step % every == 0 for every in intervals)
            if is_due or clock.is_save_due or evaluations.is_best(state.step):
                save(state, reporter)
        vote.result()
        save(state, reporter, last=True)
    reporter.finish()
    return True


def take_step(state: TrainingState, batches: Iterator[Batch]) -> None:
    """Take one optimiser step, and update the teacher."""
    config = state.config
    state.begin_step()
    rates = state.rates
    set_rates(state.optimizer, lr=rates.lr, weight_decay=rates.weight_decay)

    # The running statistics of BatchNorm, which a forward pass changes.
    before = snapshot(state.statistics)
    loss = torch.zeros((), device=state.device)
    for micro in range(config.optim.accumulate):
        batch = state.interval.next_batch(batches)
        state.unreadable.count(batch)
        # What networks draw is a function of (seed, step, part of the batch), so that a resumed run draws the
        # same: stochastic depth from a generator of its own, the rest from PyTorch's.
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
    drop_unlearned_gradients(state)
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
    state.interval.add(loss, norm, finite, state.run.global_batch, scale)


def forward_backward(state: TrainingState, batch: Batch, rates: ScheduleValues, *, last: bool) -> Tensor:
    """Add the gradients of a micro-batch to the student's; return its part of the loss of CLS tokens."""
    accumulate = state.config.optim.accumulate
    # Outside of autocast: augmentation is in float32, the user's own too.
    views, masks = state.views_of(batch), batch.masks and batch.masks.to(state.device)
    kept = None if batch.kept is None else batch.kept.to(state.device, non_blocking=True)
    # Processes exchange gradients once per step, in its last backward pass; sharded ones in each.
    with contextlib.nullcontext() if last or state.sharded else state.accelerator.no_sync(state.wrapped):
        with state.autocast():
            losses = state.objective(
                state.wrapped,
                state.teacher,
                views,
                masks,
                images=len(batch.samples),
                teacher_temperature=rates.teacher_temp,
                kept=kept,
            )
        torch.autograd.backward(state.scaler.scale(losses.total / accumulate))
    if state.planned.is_logged:
        state.objective.note(losses)
    return losses.main.detach() / accumulate


def drop_unlearned_gradients(state: TrainingState) -> None:
    """Drop the gradients of what does not learn yet: prototypes, or a trained backbone before its heads.

    After clipping, as in the 2021 code, whose norm includes them.
    """
    unlearned: list[nn.Module] = []
    if state.planned.at < state.plan.freeze_steps:
        unlearned += [head.last_layer for head in state.student.heads if isinstance(head, DINOHead)]
    if state.planned.at < state.plan.head_steps:
        unlearned.append(state.student.backbone)
    for module in unlearned:
        module.zero_grad(set_to_none=True)  # the optimiser skips parameters without a gradient


def log_step(state: TrainingState, reporter: Reporter) -> None:
    """Log what was summed since the last log line, with an evaluation where one is due."""
    metrics = read_interval(state)
    if state.planned.is_evaluated:
        figures = state.evaluations.evaluate(state.teacher, state.step)
        state.clock.reserve = state.evaluations.seconds
        state.clock.skip_evaluation()
        metrics = dataclasses.replace(metrics, **dataclasses.asdict(figures))
    reporter.log(metrics)
    check_skipped(state)
    state.interval.restart()  # so that the evaluation does not count as training time


def read_interval(state: TrainingState) -> MetricsRecord:
    """Return the numbers of a log line; the host waits for the device here."""
    figures: dict[str, Any] = {name: value.item() for name, value in state.objective.figures().items()}
    fields = {name: figures.pop(name) for name in figures.keys() & MetricsRecord.__annotations__.keys()}
    return MetricsRecord(
        step=state.step,
        total_steps=state.total_steps,
        epoch=state.step / state.plan.steps_per_epoch,
        **state.interval.read(),
        **state.rates._asdict(),
        **fields,
        terms={name: float(value) for name, value in figures.items()},
    )


def check_skipped(state: TrainingState) -> None:
    """End the run after too many skipped steps in a row; the host waits for the device here.

    Going back to a checkpoint would not help: the batch and the state are functions of the step, so the
    same steps would fail again.
    """
    if most := state.interval.too_many_skipped():
        raise NotFinite(
            f"by step {state.step}, {most} steps in a row were not finite and were skipped. "
            f"{RESUME_ADVICE}. See unreadable.txt for damaged images"
        )


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
            advice = full if isinstance(error, StorageError) else RESUME_ADVICE
            text = f"the run is complete, but its last checkpoint could not be written: {error}. {advice}"
            raise type(error)(text) from error
        log.warning("step %s: no checkpoint was written. %s", f"{state.writer.step:,}", error)
        if state.evaluations.is_best(state.writer.step):
            state.evaluations.best = state.evaluations.best_written
    else:
        if path is not None:
            state.saved_step = state.writer.step
            state.evaluations.best_written = state.writer.metadata["best"]
            reporter.saved(path)

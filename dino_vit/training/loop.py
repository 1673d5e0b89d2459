"""Pretraining: the loop of the paper's pseudo-code, and what happens between two of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import NotFinite
from dino_vit.core.distributed import any_process
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import Interruption, start_processes
from dino_vit.method.loss import dino_loss
from dino_vit.method.optim import (
    all_finite,
    clip_gradients,
    ema_update,
    freeze_last_layer,
    set_rates,
    step_if_finite,
)
from dino_vit.models.pair import first_rows
from dino_vit.training.opening import open_session
from dino_vit.training.reporter import Reporter
from dino_vit.training.state import Session
from dino_vit.views.loader import Batch


def pretrain(config: PretrainConfig) -> int:
    """Train as the config says, going on where the output folder stands; return the exit code."""
    accelerator = start_processes(trackers=config.run.trackers, folder=Path(config.output))
    opened = open_session(config, accelerator)
    with Interruption() as interruption, Reporter(opened) as reporter:
        code = train(opened.session, reporter, interruption)
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return code


def train(session: Session, reporter: Reporter, interruption: Interruption) -> int:
    """Take the remaining steps of a session; return 0, or the code to leave with when asked to."""
    reporter.start()
    while session.step < session.plan.total_steps:
        with contextlib.closing(session.loader.batches(session.step)) as batches:
            outcome = take_steps(session, reporter, interruption, batches)
        if outcome == "asked to leave":
            return interruption.exit_code
        if outcome == "not finite":
            roll_back(session, reporter)
    reporter.finish()
    return 0


def take_steps(
    session: Session, reporter: Reporter, interruption: Interruption, batches: Iterator[Batch]
) -> Literal["done", "asked to leave", "not finite"]:
    """Take steps until the last one, or until something else comes first."""
    while session.step < session.plan.total_steps:
        take_step(session, reporter, batches)
        reporter.report()
        if reporter.nonfinite_in_a_row >= session.config.run.max_nonfinite_steps:
            return "not finite"
        if any_process(interruption.asked or reporter.unreadable.many):
            reporter.unreadable.check(session.device)
            if any_process(interruption.asked):
                reporter.leave()
                return "asked to leave"
    return "done"


def take_step(session: Session, reporter: Reporter, batches: Iterator[Batch]) -> None:
    """Take one step of the optimiser, and let the teacher follow."""
    config, student, teacher = session.config, session.student, session.teacher
    # Stochastic depth is a function of (seed, step, rank), so that a resumed run draws the same.
    rank = session.accelerator.process_index
    torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK, session.step, rank))
    rates = session.rates(session.step)
    set_rates(session.optimizer, lr=rates.lr, weight_decay=rates.weight_decay)

    loss = torch.zeros((), device=session.device)
    for micro in range(config.optim.accumulate):
        last = micro == config.optim.accumulate - 1
        loss += forward_backward(session, reporter, reporter.wait(batches), last=last)

    session.scaler.unscale_(session.optimizer)
    parts = [student.backbone, student.head]
    norm = clip_gradients(parts, mode=config.optim.clip_mode, max_norm=config.optim.clip)
    freeze(session)
    finite = all_finite(loss, norm)
    step_if_finite(session.optimizer, finite)
    session.scaler.update()
    session.optimizer.zero_grad(set_to_none=True)
    ema_update(teacher, student, rates.momentum)
    session.center.update()

    session.step += 1
    reporter.observe_step(loss, norm, finite)


def forward_backward(session: Session, reporter: Reporter, batch: Batch, *, last: bool) -> Tensor:
    """Add the gradients of one pass to the student's; return its part of the step's loss."""
    config, accelerator = session.config, session.accelerator
    # Processes exchange gradients once a step, in the last of its passes.
    with contextlib.nullcontext() if last else accelerator.no_sync(session.wrapped):
        loss, cls, teacher_logits = forward(session, batch)
        torch.autograd.backward(session.scaler.scale(loss / config.optim.accumulate))
    loss = loss.detach()
    if last:
        reporter.observe_outputs(loss, cls, teacher_logits, session.rates(session.step).teacher_temp)
    session.center.accumulate(teacher_logits)
    return loss / config.optim.accumulate


def forward(session: Session, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of a pass, and the teacher's CLS features and logits; backward needs nothing more."""
    config, globals_ = session.config, session.config.views.global_count
    views = session.views_of(batch)
    with session.autocast():
        with torch.no_grad():
            seen = session.teacher(first_rows(views, globals_ * len(batch.samples)))
            cls, teacher_logits = seen.cls, seen.logits()
            del seen  # its prototypes are as large as the student's, who needs the room now
        said = session.wrapped(views)
        loss = dino_loss(
            said.features,
            said.prototypes,
            teacher_logits,
            session.center.center,
            views=session.views,
            global_views=globals_,
            student_temperature=config.loss.student_temp,
            teacher_temperature=session.rates(session.step).teacher_temp,
        )
    return loss, cls, teacher_logits


def freeze(session: Session) -> None:
    """Drop the gradients of what does not learn yet: prototypes, or a trained backbone before its heads."""
    if session.step < session.plan.freeze_steps:
        freeze_last_layer(session.student.head.last_layer)
    if session.step < session.plan.head_steps:
        for parameter in session.student.backbone.parameters():
            parameter.grad = None


def roll_back(session: Session, reporter: Reporter) -> None:
    """Go back to the last checkpoint after too many steps that were not finite, but not twice to the same."""
    session.accelerator.wait_for_everyone()  # the first process may be writing
    # A checkpoint written while steps were lost may hold what loses them.
    checkpoint = session.checkpoints.newest(up_to=session.step - reporter.nonfinite_in_a_row)
    if checkpoint is None or checkpoint.step == reporter.rolled_back_to:
        raise NotFinite(
            f"{reporter.nonfinite_in_a_row} steps in a row up to step {session.step} were not finite, and "
            "there is no checkpoint that helps. Try run.precision=no, a lower optim.lr, optim.clip or "
            "loss.teacher_temp, and see unreadable.txt for damaged images"
        )
    session.restore(checkpoint)
    reporter.rolled_back(checkpoint.step)

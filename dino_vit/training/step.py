"""One optimiser step of DINO, in the order of the paper's pseudo-code; nothing here makes a GPU wait."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.method.objective import output_statistics
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
from dino_vit.training.plan import ScheduleValues
from dino_vit.training.state import TrainingState
from dino_vit.views.loader import Batch


def take_step(state: TrainingState, batches: Iterator[Batch]) -> None:
    """Take one optimiser step, and update the teacher."""
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


def forward_backward(state: TrainingState, batch: Batch, rates: ScheduleValues, *, last: bool) -> Tensor:
    """Add the gradients of a micro-batch to the student's; return its part of the loss of CLS tokens."""
    accumulate = state.config.optim.accumulate
    # Processes exchange gradients once per step, in its last backward pass; sharded ones in each.
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
    if last and state.plan.is_logged(state.step + 1):
        state.outputs = output_statistics(out, rates.teacher_temp)
    state.objective.accumulate(out)
    return out.cls.detach() / accumulate


def freeze(state: TrainingState) -> None:
    """Drop the gradients of what does not learn yet: prototypes, or a trained backbone before its heads."""
    if state.step < state.plan.freeze_steps:
        for head in state.student.heads:
            if isinstance(head, DINOHead):
                freeze_last_layer(head.last_layer)
    if state.step < state.plan.head_steps:
        for parameter in state.student.backbone.parameters():
            parameter.grad = None

"""What follows from a run: lengths, intervals and rates, and where each step is in the schedules.

With `budget.minutes` the clock is the schedule: the share of the time that has passed says where a step is.
"""

import time
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import NamedTuple

from dino_vit.config.complete import DecidedRun
from dino_vit.config.pretrain import in_steps, scaled_lr
from dino_vit.config.sections import START_TEACHER_TEMPERATURE
from dino_vit.core.distributed import broadcast_int
from dino_vit.method.optim import warmup_constant, warmup_cosine

LOG_LINES = 20  # at least, of a run of some minutes
SAVE_SECONDS = 300.0  # between checkpoints of such a run, at most


class ScheduleValues(NamedTuple):
    """The values of all schedules at one step."""

    lr: float
    weight_decay: float
    momentum: float
    teacher_temp: float


class PlannedStep(NamedTuple):
    """Where a step is in the schedules, in steps of the plan, and what is due after it."""

    at: float = 0.0
    is_logged: bool = False
    is_evaluated: bool = False
    is_last: bool = False


@dataclass
class Clock:
    """Seconds of training and evaluations, in all starts of a run."""

    budget: float | None = None  # of a run of some minutes
    before: float = 0.0  # seconds of earlier starts
    began: float | None = None  # when this start began to train
    elapsed: float = 0.0  # as all ranks know it
    steps: tuple[float, float] = (0.0, 0.0)  # seconds of the last two
    reserve: float = 0.0  # for the evaluation at the end: as long as the last one took
    saved: float = 0.0  # the time of the last checkpoint

    @property
    def seconds(self) -> float:
        """The seconds so far, by the clock of this rank."""
        return self.before + (0.0 if self.began is None else time.monotonic() - self.began)

    @property
    def left(self) -> float | None:
        """The seconds that are left of the minutes."""
        return None if self.budget is None else self.budget - self.seconds

    @property
    def share(self) -> float | None:
        """The share of the time that has passed, the same on all ranks."""
        if self.budget is None:
            return None
        return min(1.0, self.elapsed / max(self.budget - self.reserve, 1e-6))

    @property
    def is_last(self) -> bool:
        """Whether the next step is the last one: the time would be over after it."""
        # The shorter of two, as one may have waited for images or for an evaluation.
        return self.budget is not None and self.elapsed + min(self.steps) >= self.budget - self.reserve

    @property
    def is_save_due(self) -> bool:
        """Whether a run of some minutes saves now, the same on all ranks: the next step might be too late."""
        return self.budget is not None and self.elapsed + self.steps[1] - self.saved > SAVE_SECONDS

    def start(self) -> None:
        """Begin to train."""
        self.began = time.monotonic()

    def agree(self, seconds: float) -> None:
        """Go to a time of rank 0, after a step; one from before an evaluation says nothing new."""
        if seconds > self.elapsed:
            self.steps, self.elapsed = (self.steps[1], seconds - self.elapsed), seconds

    def skip_evaluation(self) -> None:
        """Go to the time of rank 0 after an evaluation, for which all ranks wait; it is no step."""
        self.elapsed = max(self.elapsed, broadcast_int(round(1e6 * self.seconds)) / 1e6)


class Plan:
    """Lengths in optimiser steps; with `budget.minutes` they are shares of the expected length of the run."""

    def __init__(self, run: DecidedRun) -> None:
        config, optim = run.config, run.config.optim
        self.config, self.steps_per_epoch, self.length = config, run.steps_per_epoch, run.length
        head_epochs = config.init.head_epochs if config.init else 0.0
        phases = optim.warmup_epochs, optim.freeze_last_layer_epochs, head_epochs
        lengths = (round(in_steps(epochs, run.steps_per_epoch)) for epochs in phases)
        self.warmup_steps, self.freeze_steps, self.head_steps = lengths
        self.lr = scaled_lr(optim.lr, run.global_batch, optim.lr_scaling)

    @property
    def steps_between_evaluations(self) -> Fraction | None:
        every = self.config.compute.eval_every
        return in_steps(every, self.steps_per_epoch) if every else None

    def by_step(self, step: int) -> PlannedStep:
        """Return what is planned for a step, counted from 0, of a run whose length is in steps."""
        taken = step + 1
        is_last = taken == self.length
        interval = self.steps_between_evaluations
        is_evaluated = False
        if interval is not None:
            count = round(taken / interval)  # of intervals, which need not be whole numbers of steps
            is_evaluated = (count > 0 and taken == round(count * interval)) or is_last
        # The figures of an evaluation are part of a log line.
        is_logged = taken % self.config.compute.log_every == 0 or is_last or is_evaluated
        return PlannedStep(step, is_logged, is_evaluated, is_last)

    def by_clock(self, share: float, before: float, *, is_last: bool) -> PlannedStep:
        """Return what is planned for the next step, at a share of the minutes, after a step at `before`.

        The last step has the rates of the end.
        """
        at = float(self.length) if is_last else max(before, share * self.length)
        interval = self.steps_between_evaluations

        def passes(every: Fraction | int) -> bool:
            return floor(at / every) > floor(before / every)

        # A little before the end is no time for one: the last step has one, too.
        is_evaluated = interval is not None and (
            is_last or (passes(interval) and at + interval / 2 < self.length)
        )
        every = min(self.config.compute.log_every, max(1, self.length // LOG_LINES))
        return PlannedStep(at, is_last or is_evaluated or passes(every), is_evaluated, is_last)

    def rates(self, at: float) -> ScheduleValues:
        """Return the values of the schedules after so many steps of the plan."""
        optim, teacher, loss, total = self.config.optim, self.config.teacher, self.config.loss, self.length
        # One temperature for a whole epoch in 2021, for a step in DINOv2.
        unit = self.steps_per_epoch if self.config.method == "dino" else 1
        return ScheduleValues(
            lr=warmup_cosine(at, base=self.lr, final=optim.min_lr, total=total, warmup=self.warmup_steps),
            weight_decay=warmup_cosine(
                at, base=optim.weight_decay, final=optim.weight_decay_end, total=total
            ),
            momentum=warmup_cosine(at, base=teacher.momentum, final=1.0, total=total),
            teacher_temp=warmup_constant(
                int(at) // unit,
                start=START_TEACHER_TEMPERATURE,
                final=loss.teacher_temp,
                warmup=loss.warmup_teacher_temp_epochs * (self.steps_per_epoch // unit),
            ),
        )

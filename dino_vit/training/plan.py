"""What follows from a completed configuration: batches, lengths, intervals and rates; the pace of steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from dino_vit.config.auto import EVALUATIONS, Choice
from dino_vit.config.pretrain import PretrainConfig, check_phases, check_scaled_lr, in_steps, scaled_lr
from dino_vit.config.sections import START_TEACHER_TEMPERATURE
from dino_vit.config.settings import ConfigError
from dino_vit.core.text import plural
from dino_vit.method.optim import warmup_constant, warmup_cosine

LOG_LINES = 20  # at least, of a run of some minutes
# Standard deviations, in natural logarithms: of the planned pace, and of the mean pace of steps that took all
# the time; that of steps that took a hundredth of it is ten times as large.
PLANNED_ERROR, PACE_ERROR = 0.25, 0.05
UNTIMED = 0.1  # of the time, at most, before steps are timed


class ScheduleValues(NamedTuple):
    """The values of all schedules at one step."""

    lr: float
    weight_decay: float
    momentum: float
    teacher_temp: float


class BudgetEstimate(NamedTuple):
    """What fits into `budget.minutes`: steps and evaluations, and the network and views chosen for them."""

    steps: int | None = None
    choices: Sequence[Choice] = ()
    evaluations: int = EVALUATIONS
    step_seconds: float = 0.0
    seconds: float = 0.0  # that measuring took


NO_ESTIMATE = BudgetEstimate()  # of a run whose budget is not in minutes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration on a number of images and processes; all lengths are optimiser steps."""

    config: PretrainConfig
    global_batch: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    freeze_steps: int
    head_steps: int
    lr: float
    # The schedules have `length` steps. Where the length of the run was changed, after the step `since`, they
    # were at `position`, and go on from there at another speed.
    length: int
    since: int = 0
    position: float = 0.0

    @property
    def epochs(self) -> float:
        return self.total_steps / self.steps_per_epoch

    @property
    def steps_between_evaluations(self) -> Fraction | None:
        compute = self.config.compute
        if compute.eval_every_steps:
            return Fraction(compute.eval_every_steps)
        return in_steps(compute.eval_every, self.steps_per_epoch) if compute.eval_every else None

    def with_total(self, total: int, step: int) -> "Plan":
        """Return the plan of a run whose length is changed after `step` steps."""
        if total == self.total_steps:
            return self
        if step <= self.warmup_steps:  # where only the weight decay and the momentum depend on it, and little
            return replace(self, total_steps=total, length=total)
        return replace(self, total_steps=total, since=step, position=self.position_at(step))

    def position_at(self, step: int) -> float:
        """Return the position of a step in the schedules."""
        left = max(self.total_steps - self.since, 1)
        return self.position + (self.length - self.position) * (step - self.since) / left

    def rates(self, step: int) -> ScheduleValues:
        """Return the values of the schedules at a step."""
        optim, teacher, loss = self.config.optim, self.config.teacher, self.config.loss
        at, total = self.position_at(step), self.length
        # One temperature for a whole epoch in 2021, for a step in DINOv2.
        unit = self.steps_per_epoch if self.config.method == "dino" else 1
        return ScheduleValues(
            lr=warmup_cosine(at, base=self.lr, final=optim.min_lr, total=total, warmup=self.warmup_steps),
            weight_decay=warmup_cosine(
                at, base=optim.weight_decay, final=optim.weight_decay_end, total=total
            ),
            momentum=warmup_cosine(at, base=teacher.momentum, final=1.0, total=total),
            teacher_temp=warmup_constant(
                step // unit,
                start=START_TEACHER_TEMPERATURE,
                final=loss.teacher_temp,
                warmup=loss.warmup_teacher_temp_epochs * (self.steps_per_epoch // unit),
            ),
        )

    def patch_drop(self, step: int) -> float:
        """Return the share of patches that the student does not see at a step.

        In the last part of a run it may see all, as features are read from all patches.
        """
        model = self.config.model
        return model.patch_drop if self.position_at(step) < model.patch_drop_until * self.length else 0.0

    def is_logged(self, step: int) -> bool:
        """Tell whether a log line is due after `step` steps."""
        # The figures of an evaluation are part of a log line.
        every = self.config.compute.log_every
        if self.config.budget.minutes:  # there the length is fitted, however slow a step is
            every = min(every, max(1, self.total_steps // LOG_LINES))
        return step % every == 0 or step == self.total_steps or self.is_evaluated(step)

    def is_evaluated(self, step: int) -> bool:
        """Tell whether an online evaluation is due after `step` steps."""
        interval = self.steps_between_evaluations
        if interval is None:
            return False
        count = round(step / interval)  # of intervals, which need not be whole numbers of steps
        return (count > 0 and step == round(count * interval)) or step == self.total_steps


def make_plan(
    config: PretrainConfig, images: int, world_size: int, steps: int | None = None, *, resumed: bool = False
) -> Plan:
    """Plan the run; refuse a configuration that does not fit the number of images and processes.

    `steps` are those that fit into `budget.minutes`; of a run that resumes they may have become fewer.
    """
    optim = config.optim
    batch = config.data.batch_size * optim.accumulate * world_size
    if batch > images:
        raise ValueError(
            f"{images} images do not fill a global batch of {batch} (data.batch_size="
            f"{config.data.batch_size} x optim.accumulate={optim.accumulate} x "
            f"{plural(world_size, 'process', 'processes')}); lower one of them"
        )
    per_epoch, total = images // batch, steps or config.budget.total_steps(images, batch)
    # Again, as only here the numbers of steps and of processes are known.
    problems = list(check_scaled_lr(optim, batch))
    if not (steps and resumed):
        problems += check_phases(config, total / per_epoch, steps_per_epoch=per_epoch)
    lr = scaled_lr(optim.lr, batch, optim.lr_scaling)
    if optim.min_lr > lr:
        text = f"optim.min_lr={optim.min_lr:g} is above the peak of {lr:.3g} at a global batch of {batch}"
        problems.append(f"{text}; lower it")
    if config.loss.koleo_weight and config.data.batch_size * world_size == 1:
        text = f"loss.koleo_weight={config.loss.koleo_weight:g} keeps the images of a forward pass apart"
        problems.append(f"{text}, but data.batch_size=1 is one image; raise it, or set loss.koleo_weight=0")
    if problems:
        raise ConfigError(problems)
    head_epochs = config.init.head_epochs if config.init else 0.0
    lengths = (optim.warmup_epochs, optim.freeze_last_layer_epochs, head_epochs)
    warmup, freeze, head = (round(in_steps(length, per_epoch)) for length in lengths)
    return Plan(
        config=config,
        global_batch=batch,
        steps_per_epoch=per_epoch,
        total_steps=total,
        length=total,
        warmup_steps=warmup,
        freeze_steps=freeze,
        head_steps=head,
        lr=lr,
    )


class Pace:
    """Between the planned seconds per step and their mean so far: the steadier the steps, the closer to it.

    A mean of all steps, since what a source or another program takes now and then belongs to it. The first
    ones do not count: networks are compiled, and workers have made their images ahead.
    """

    def __init__(self, planned: float, *, budget: float, untimed: int) -> None:
        """`budget` is the time of the whole run in seconds, and `untimed` the steps that do not count."""
        self.planned, self.budget, self.untimed = planned, budget, untimed
        self.taken = self.timed = 0
        self.sum = self.sum_of_squares = 0.0
        self.start: float | None = None
        self.last: float | None = None  # step that was timed, or before the first

    def count(self, now: float) -> None:
        """Count a step that ended at `now`, a time without evaluations."""
        self.taken += 1
        self.start = now if self.start is None else self.start
        if self.last is not None:
            self.timed += 1
            self.sum += now - self.last
            self.sum_of_squares += (now - self.last) ** 2
        if self.timed or self.taken >= self.untimed or now - self.start >= UNTIMED * self.budget:
            self.last = now

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        if self.sum <= 0:
            return self.planned
        mean = self.sum / self.timed
        spread = self.sum_of_squares / self.timed / mean**2 - 1  # variance of the steps, relative to the mean
        doubt = max(spread, 0.0) / self.timed + PACE_ERROR**2 * self.budget / self.sum
        return float(self.planned * (mean / self.planned) ** (PLANNED_ERROR**2 / (PLANNED_ERROR**2 + doubt)))


def note_on_unseen(plan: Plan, step_seconds: float) -> str | None:
    """Say how long an epoch takes if `budget.minutes` are too short for one."""
    minutes, missing = plan.config.budget.minutes, plan.steps_per_epoch - plan.total_steps
    if not minutes or missing <= 0:
        return None
    needed = float(f"{minutes + missing * step_seconds / 60:.2g}")
    return (
        f"budget.minutes={minutes:g} has time for about {plural(plan.total_steps, 'step')} of the "
        f"{plan.steps_per_epoch:,} in an epoch, so not every image is seen; budget.minutes={needed:g} would "
        "be an epoch"
    )

"""What fits into `budget.minutes`: steps, evaluations and the network, by the time that they take here."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory

import torch

# Not first with an optimiser: this import leaves a cycle of frames, those of its callers with their networks.
import torch._dynamo

from dino_vit.config.auto import ENOUGH_IMAGES, EVALUATIONS, SHORT, Choice, Rung, network_ladder
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PHASES, PretrainConfig
from dino_vit.config.settings import get
from dino_vit.core import log
from dino_vit.core.distributed import all_reduce_mean, broadcast_int
from dino_vit.core.runtime import start_processes, wait_for_device
from dino_vit.core.text import progress
from dino_vit.training.loop import take_step
from dino_vit.training.plan import BudgetEstimate
from dino_vit.training.resolve import RunContext, start_choices, with_choices
from dino_vit.training.setup import set_up
from dino_vit.training.state import SLOW_STEPS, TrainingState

TIMED = 4  # steps, at least, to measure the speed
MEASURED_SHARE = 0.03  # of the minutes, at most, for the steps before the timed ones, and for more of these
TIMED_IMAGES = 100  # evaluated for the same
EVALUATED = 0.1  # share of the time of a run of some minutes


def estimate_budget(config: PretrainConfig, context: RunContext) -> BudgetEstimate:
    """Measure what a new run has time for.

    Measuring and evaluations are part of the minutes; those of `recipe=auto` take a tenth, six at most.
    """
    minutes, start = config.budget.minutes, time.monotonic()
    assert minutes is not None
    log.info("measuring how long a step and an evaluation take ...")
    config = with_choices(config, start_choices(config, context))
    choices: Sequence[Choice] = ()
    ladder = network_ladder(config, context.inspected(config).image_size)
    smallest = replace(config, ladder[0].settings) if ladder else config
    step, evaluation = measured_seconds(smallest, context)
    if ladder:
        batch = config.data.batch_size * config.optim.accumulate * context.processes
        chosen, choices = choose_network(ladder, 60 * minutes / step * batch, minutes)
        if chosen is not ladder[0]:
            step, evaluation = measured_seconds(with_choices(config, choices), context)
    count = max(1, min(EVALUATIONS, int(EVALUATED * 60 * minutes / max(evaluation, 1e-6)) - 1))
    evaluating = (count + 1) * evaluation  # one is before the first step
    least = 1
    if config.recipe == "auto" and 60 * minutes - evaluating >= SHORT * step:
        # A step of a long run takes longer.
        least, (step, _) = SHORT - 1, measured_seconds(with_choices(config, choices), context, SHORT)
    seconds = float(all_reduce_mean(torch.tensor(time.monotonic() - start, device=context.device)))
    steps = max(least, int((60 * minutes - seconds - evaluating) / step))
    return BudgetEstimate(steps, choices, count, step, seconds)


def choose_network(ladder: Sequence[Rung], images: float, minutes: float) -> tuple[Rung, list[Choice]]:
    """Return the largest network that sees enough images, where the smallest sees so many, as choices too."""
    smallest = ladder[0]
    affordable = [rung for rung in ladder if images * (smallest.cost / rung.cost) ** 2 >= ENOUGH_IMAGES]
    chosen = max(affordable, key=lambda rung: rung.cost, default=smallest)
    count = float(f"{images * smallest.cost / chosen.cost:.2g}")
    reason = f"sees about {count:,.0f} images in {minutes:g} minutes on this machine"
    return chosen, [Choice(key, value, reason) for key, value in chosen.settings.items()]


def measured_seconds(config: PretrainConfig, context: RunContext, steps: int = 1000) -> tuple[float, float]:
    """Measure how long a step of a run of some length and an evaluation take; leave nothing behind."""
    limit = MEASURED_SHARE * 60 * (config.budget.minutes or math.inf)
    with TemporaryDirectory() as folder:
        changes: dict[str, object] = {"output": folder, "budget.steps": steps}
        changes |= {"data.max_unreadable": 1.0}  # the run itself names such images
        changes |= {key: 0 for key in PHASES if get(config, key)}  # which no length of a run fits for sure
        if config.compute.compile == "auto":
            changes["compute.compile"] = False  # the pace of the run itself tells how much faster it is
        state = set_up(replace(config, changes), start_processes(), context).state
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
    before = SLOW_STEPS + broadcast_int(state.steps_ahead)
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

        take_steps(SLOW_STEPS, before)
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

"""Time a step and an evaluation of the smallest network that a run of some minutes may have."""

import contextlib
import copy
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch

# Not first with an optimiser: this import leaves a cycle of frames, those of its callers with their networks.
import torch._dynamo

from dino_vit.config.complete import DecidedRun, sketch
from dino_vit.config.facts import Facts, StepTime
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core import log
from dino_vit.core.device import wait_for_device
from dino_vit.core.distributed import from_rank_0, in_all_processes
from dino_vit.training.loop import take_step
from dino_vit.training.state import TrainingState
from dino_vit.views.workers import choose_workers

TIMED_IMAGES = 100  # of an evaluation


def time_step(config: PretrainConfig, facts: Facts, build: Callable[[DecidedRun], TrainingState]) -> StepTime:
    """Take two steps of which the second is timed, as rank 0 measures it; leave nothing behind."""
    start = time.monotonic()
    log.info("measuring how long a step and an evaluation take ...")
    with TemporaryDirectory() as folder:
        # The run itself names damaged images, and its own pace tells how much faster compiled blocks are.
        changes: dict[str, object] = {"output": folder, "data.workers": 0, "data.max_unreadable": 1.0}
        if config.compute.compile == "auto":
            changes["compute.compile"] = False
        state = build(sketch(config, facts, changes))
        step = _step_seconds(state, choose_workers(config.data.workers, facts.launch.processes))
        evaluation, images = _evaluation_seconds(state), len(state.evaluations.online.indices)
    with in_all_processes():
        return from_rank_0(lambda: StepTime(step, evaluation, time.monotonic() - start, images))


def _step_seconds(state: TrainingState, workers: int) -> float:
    """Return how long a step takes when workers make its images."""
    with contextlib.closing(state.loader.batches()) as batches:
        take_step(state, batches)  # the first one loads libraries and kernels
        before, start = sum(state.interval.loading.values()), time.perf_counter()
        take_step(state, batches)
        wait_for_device(state.device)
        seconds = time.perf_counter() - start
    loading = sum(state.interval.loading.values()) - before  # here, in this process
    if not workers:
        return seconds
    if state.device.type == "cpu":  # which workers and networks share
        return seconds - loading + loading / (workers + 1)
    return max(seconds - loading, loading / workers)


def _evaluation_seconds(state: TrainingState) -> float:
    """Return the time that an evaluation takes, by one of a few of its images."""
    if state.plan.steps_between_evaluations is None:
        return 0.0
    online = state.evaluations.online
    few: Any = copy.copy(online)
    few.indices = online.indices[:TIMED_IMAGES]
    with torch.compiler.set_stance("force_eager"):
        state.teacher.run_unsharded(few)  # the first one loads libraries and kernels
        start = time.perf_counter()
        state.teacher.run_unsharded(few)
    return (time.perf_counter() - start) * len(online.indices) / len(few.indices)

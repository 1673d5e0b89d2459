"""What the training loop spends its time on: one epoch of small images, from the first step to the last file.

    python -m benchmarks.loop

The demo's recipe on generated images without the evaluation, by `dino_vit.training.loop.train` itself. Its
functions are wrapped from outside: what is in none of them (schedules, centre, meter, diagnosis, log lines,
checkpoint) counts as the rest, to stay within 3 %. On the CPU, a call is over when it returns.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

import dino_vit.training.loop
from benchmarks.measure import Table, arguments, report
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.process import Interruption
from dino_vit.core.runtime import start_processes
from dino_vit.method.objective import Objective
from dino_vit.training.reporter import Reporter
from dino_vit.training.setup import set_up
from dino_vit.training.state import TrainingState

DEMO = Path(__file__).parents[1] / "dino_vit" / "commands" / "demo_runs" / "textures.yaml"
REST = "the rest"


class Stopwatch:
    """Give every moment to the innermost part that runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.running = [REST]
        self.since = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time within to a part."""
        self._switch()
        self.running.append(name)
        try:
            yield
        finally:
            self._switch()
            self.running.pop()

    def wrap(self, name: str, owner: Any, attribute: str) -> Any:
        """Return a patch under which a function counts to a part."""
        function: Callable[..., Any] = getattr(owner, attribute)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.part(name):
                return function(*arguments, **keywords)

        return patch.object(owner, attribute, timed)

    def _switch(self) -> None:
        now = time.perf_counter()
        self.seconds[self.running[-1]] += now - self.since
        self.since = now


def shares(changes: dict[str, Any]) -> dict[str, float]:
    """Run the demo's recipe with some changes; return the share of each part in the time of the loop."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        config = replace(load(PretrainConfig, DEMO), {**changes, "output": folder})
        accelerator = start_processes(trackers=config.run.trackers, folder=Path(folder))
        run_ = set_up(config, accelerator)
        interruption = stack.enter_context(Interruption())
        reporter = stack.enter_context(Reporter(run_))
        watch = Stopwatch()
        for name, owner, attribute in parts(run_.state):
            stack.enter_context(watch.wrap(name, owner, attribute))
        with watch.part(REST):
            dino_vit.training.loop.train(run_.state, reporter, interruption)
    whole = sum(watch.seconds.values())
    return {name: seconds / whole for name, seconds in watch.seconds.items()}


def parts(state: TrainingState) -> Iterator[tuple[str, Any, str]]:
    """Name the functions of a step that are its work."""
    yield "loading", state.interval, "next_batch"
    yield "loading", state.augment, "forward"
    yield "forward", Objective, "__call__"
    yield "backward", torch.autograd, "backward"
    for function in (
        "set_rates",
        "clip_gradients",
        "drop_frozen_gradients",
        "reduce_loss",
        "step_if_finite",
        "ema_update",
    ):
        yield "optimiser", dino_vit.training.loop, function
    yield "optimiser", state.optimizer, "zero_grad"


def run(*, threads: int) -> list[Table]:
    """Measure one epoch."""
    torch.set_num_threads(threads)
    print("one epoch ...", file=sys.stderr, flush=True)
    whole = {"budget.steps": None, "budget.epochs": 1, "optim.freeze_last_layer_epochs": 0.3}
    found = shares({**whole, "run.eval_every": None, "run.trackers": ()})
    said = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
    return [Table(f"One epoch of 32 px images, CPU, {threads} threads", "share of the time", [], f"{said}.")]


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    options.repeats = 0  # a single epoch is long enough
    report(run(threads=options.threads), options)

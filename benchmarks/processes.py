"""One process and two of one thread each: images a second, and what of a step is spent on each other.

    python -m benchmarks.processes --repeats 5

The demo's network and recipe, without batch norm (gloo has none over processes); the processes are started
by `accelerate launch` and talk by gloo. The exchange of gradients is timed apart from a step, where a part
of it hides behind the backward pass; the other collectives and the parts of a step are timed by a stopwatch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import dino_vit.training.loop
from benchmarks.loop import DEMO, REST, Stopwatch
from benchmarks.measure import Row, Table, arguments, report
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.distributed import all_reduce_mean
from dino_vit.core.runtime import start_processes
from dino_vit.training.setup import set_up
from dino_vit.training.state import TrainingState

LAUNCH = DEMO.parents[3] / "launch" / "accelerate_configs" / "cpu.yaml"
IMAGES = 64  # of a process in a step
STEPS, ROUNDS = 40, 3  # of a round, and of a launch
COLLECTIVES = ("all_reduce", "all_gather", "broadcast")
Found = dict[str, Any]


def child(out: Path) -> None:
    """Measure in one of the processes; the first writes what was found."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        changes = {
            "output": folder,
            "data.workers": 0,
            "data.augment_on": "device",
            "run.trackers": (),
            "head.batch_norm": False,
        }
        # A length in steps: recipe=auto chooses the views by it, which epochs of two processes would halve.
        phases = {"budget.epochs": None, "budget.steps": 20_000, "data.batch_size": IMAGES}
        config = replace(load(PretrainConfig, DEMO), {**changes, **phases})
        accelerator = start_processes()
        run_ = set_up(config, accelerator)
        state = run_.state
        batches = stack.enter_context(closing(state.loader.batches()))
        rounds = [round_of(state, batches) for _ in range(ROUNDS + 1)][1:]
        found = taken_apart(state, batches)
        found["seconds"] = median(rounds)
        if accelerator.num_processes > 1:
            found["gradients"] = exchange(state) * STEPS / found["seconds"]
        began = time.perf_counter()
        state.evaluation(state.teacher.backbone)
        found["evaluation"] = time.perf_counter() - began
        if accelerator.is_main_process:
            out.write_text(json.dumps(found))


def round_of(state: TrainingState, batches: Iterator[Any]) -> float:
    """Return the seconds of some steps, on average over the processes."""
    state.accelerator.wait_for_everyone()
    began = time.perf_counter()
    for _ in range(STEPS):
        dino_vit.training.loop.take_step(state, batches)
    return float(all_reduce_mean(torch.tensor(time.perf_counter() - began)))


def exchange(state: TrainingState) -> float:
    """Return the seconds in which the processes add up as many numbers as the student has gradients."""
    gradients = torch.zeros(sum(p.numel() for p in state.wrapped.parameters() if p.requires_grad))
    seconds = []
    for _ in range(STEPS):
        state.accelerator.wait_for_everyone()
        began = time.perf_counter()
        dist.all_reduce(gradients)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def taken_apart(state: TrainingState, batches: Iterator[Any]) -> Found:
    """Return the shares of a step that are the teacher's average, the centre, and collectives."""
    watch = Stopwatch()
    with ExitStack() as stack:
        for name, owner, attribute in (
            ("average", dino_vit.training.loop, "ema_update"),
            ("centre", state.objective.centers["loss"], "update"),
            *(("collectives", dist, one) for one in COLLECTIVES),
        ):
            stack.enter_context(watch.wrap(name, owner, attribute))
        with watch.part(REST):
            for _ in range(STEPS):
                dino_vit.training.loop.take_step(state, batches)
    whole = sum(watch.seconds.values())
    return {name: watch.seconds[name] / whole for name in ("average", "centre", "collectives")}


def launch(processes: int, module: str = "benchmarks.processes", *extra: str) -> Found:
    """Start processes of a benchmark, and return what they found."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH)]
        command += ["--num_processes", str(processes), "--module", module]
        command += ["--child", str(out), *extra]
        with patch.dict("os.environ", {"OMP_NUM_THREADS": "1"}):
            subprocess.run(command, check=True)
        found: Found = json.loads(out.read_text())
        return found


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure one process and two, in turn."""
    del threads
    pairs = [(launch(1), launch(2)) for _ in range(repeats)]
    gain = median(2 * one["seconds"] / two["seconds"] for one, two in pairs)
    one, two = (
        {name: median(found[name] for found in of) for name in of[0]} for of in zip(*pairs, strict=True)
    )
    done = IMAGES * STEPS
    speeds = {"1 process": done / one["seconds"], "2 processes": 2 * done / two["seconds"]}
    row = Row(f"{IMAGES} images each", speeds, gain)
    note = (
        f"Two processes do {gain:.2f} times the work of one: {gain / 2:.0%} of what two could. In a step of "
        f"two the exchange of gradients takes at most {two['gradients']:.1%}, the other collectives "
        f"{two['collectives']:.1%}; the teacher's average takes {two['average']:.1%} (one process: "
        f"{one['average']:.1%}), the centre without its collective {two['centre']:.1%} "
        f"({one['centre']:.1%}). "
        f"The evaluation (k-NN of 5,000 images) takes {two['evaluation']:.1f} s, in one process "
        f"{one['evaluation']:.1f} s."
    )
    return [Table("Processes of one thread, CPU, gloo", "images a second", [row], note, ratio="gain")]


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--child", type=Path, help="for the processes that are started: where to write")
    options = parser.parse_args()
    if options.child:
        child(options.child)
    else:
        report(run(repeats=options.repeats, threads=options.threads), options)

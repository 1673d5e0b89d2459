"""Two processes that share the weights (run.sharded=true) beside two that hold all: memory and time.

    python -m benchmarks.sharding --repeats 3

ViT-B/16 with the head of the published recipe (65,536 prototypes), one image for each process; the
processes have one thread and talk by gloo. The memory is the largest resident set of a process in the steps
after the first, program and libraries included.
"""

from __future__ import annotations

import ctypes
import json
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.measure import CLEAR_REFS, Row, Table, arguments, report, resident
from benchmarks.processes import launch
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import start_processes
from dino_vit.training.loop import take_step
from dino_vit.training.setup import set_up

STEPS = 5
SETTINGS = (
    *("data.source=synthetic:64:224", "data.batch_size=1", "data.workers=0", "data.augment_on=device"),
    *("model.arch=vit_base", "views.local_count=2", "run.trackers=[]", "run.precision=no"),
    *("optim.warmup_epochs=0", "optim.freeze_last_layer_epochs=0", "budget.epochs=null", "budget.steps=100"),
)


def child(out: Path, sharded: str) -> None:
    """Measure in one of the processes; the first writes what was found."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        config = load(PretrainConfig, None, [*SETTINGS, f"run.sharded={sharded}", f"output={folder}"])
        accelerator = start_processes()
        state = set_up(config, accelerator).state
        with closing(state.loader.batches()) as batches:
            take_step(state, batches)
            ctypes.CDLL(None).malloc_trim(0)  # give back what building the networks took
            CLEAR_REFS.write_text("5")  # begin a new maximum
            began = time.perf_counter()
            for _ in range(STEPS):
                take_step(state, batches)
            seconds = time.perf_counter() - began
        if accelerator.is_main_process:
            out.write_text(json.dumps({"seconds": seconds / STEPS, "memory": resident("VmHWM") / 2**10}))


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure both ways in turn."""
    del threads
    ways = [["--sharded", "true"], ["--sharded", "false"]]
    pairs = [[launch(2, "benchmarks.sharding", *way) for way in ways] for _ in range(repeats)]
    shared, whole = (
        {name: median(found[name] for found in of) for name in of[0]} for of in zip(*pairs, strict=True)
    )
    names = "weights shared", "weights in each"
    speed = dict(zip(names, (60 / shared["seconds"], 60 / whole["seconds"]), strict=True))
    memory = dict(zip(names, (shared["memory"], whole["memory"]), strict=True))
    gain = median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)
    share = shared["memory"] / whole["memory"]
    note = f"A process with a half of the weights takes {share:.2f} times the memory."
    row = Row("ViT-B/16, 1 image each", speed, gain, memory)
    return [Table("Two processes of one thread, CPU, gloo", "steps a minute", [row], note, ratio="speed")]


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--child", type=Path, help="for the processes that are started: where to write")
    parser.add_argument("--sharded", default="true", help="for the processes that are started")
    options = parser.parse_args()
    if options.child:
        child(options.child, options.sharded)
    else:
        report(run(repeats=options.repeats, threads=options.threads), options)

"""How long the training steps of a ViT-B stand still for a checkpoint, and what memory that takes.

    python -m benchmarks.checkpoint --repeats 3

ViT-B/16 with the head of the published recipe (65,536 prototypes): student, teacher and AdamW's averages in
float32. "by a thread" is what a run does: it stands still while the state is copied to the host, and a thread
writes the copy. "in the loop" writes the state itself, and the next step begins when it is on the disk.
Memory is what a checkpoint takes at most on top of a run that has written none.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import closing
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.measure import CLEAR_REFS, Row, Table, arguments, report, resident, where
from benchmarks.sharding import SETTINGS
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import collect
from dino_vit.core.runtime import start_processes, wait_for_device
from dino_vit.training.loop import take_step
from dino_vit.training.setup import set_up
from dino_vit.training.state import TrainingState

STEPS = 3  # alone and beside a checkpoint that is written
ON_CUDA = "the same, with the copy from the device"


def run(*, repeats: int, threads: int, settings: tuple[str, ...] = SETTINGS) -> list[Table]:
    """Measure both ways in turn, then steps beside a checkpoint that is written."""
    with TemporaryDirectory() as folder:
        config = load(PretrainConfig, None, [*settings, f"output={folder}"])
        state = set_up(config, start_processes()).state
        with closing(state.loader.batches()) as batches, state.writer:
            take_step(state, batches)  # which makes AdamW's averages
            # In this order: the copy stays.
            memory = {"in the loop": grown(lambda: in_the_loop(state))}
            memory["by a thread"] = grown(lambda: by_a_thread(state))
            rounds = [(by_a_thread(state), in_the_loop(state)) for _ in range(repeats)]
            pairs = [beside(state, lambda: take_step(state, batches)) for _ in range(repeats)]
        size = sum(path.stat().st_size for path in state.checkpoints.paths()[:1])
        name = config.model.title
    stalls, written = zip(*rounds, strict=True)
    row = Row(
        f"{name}, {size / 2**20:,.0f} MiB",
        {"by a thread": 1000 * median(stalls), "in the loop": 1000 * median(written)},
        median(loop / thread for thread, loop in rounds),
        {name: memory[name] for name in ("by a thread", "in the loop")},
    )
    slower = median(busy / alone for busy, alone in pairs)
    note = f"Steps of one image that run beside the thread take {slower:.2f} times as long as others."
    title = f"A checkpoint, {where(threads)}"
    return [Table(title, "ms without a step", [row], note, ratio="in the loop / by a thread")]


def by_a_thread(state: TrainingState) -> float:
    """Return the seconds until the next step may begin; then wait until the checkpoint is on the disk."""
    seconds = timed(state, state.begin_save)
    state.writer.finish(wait=True)
    return seconds


def in_the_loop(state: TrainingState) -> float:
    """Return the seconds that writing the state takes."""

    def write() -> None:
        tensors = collect(state._modules(), state.optimizer)
        state.checkpoints.save(state.step, tensors, state._metadata())

    return timed(state, write)


def beside(state: TrainingState, step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of steps while a checkpoint is written, and of as many alone."""

    def steps() -> None:
        for _ in range(STEPS):
            step()

    state.begin_save()
    busy = timed(state, steps)
    state.writer.finish(wait=True)
    return busy, timed(state, steps)


def timed(state: TrainingState, work: Callable[[], None]) -> float:
    """Return the seconds of some work, and of the device with it."""
    wait_for_device(state.device)
    began = time.perf_counter()
    work()
    wait_for_device(state.device)
    return time.perf_counter() - began


def grown(work: Callable[[], object]) -> float | None:
    """Return by how many MiB the process grows at most."""
    if not CLEAR_REFS.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # give back what would be used again unseen
    CLEAR_REFS.write_text("5")  # the peak starts again from what is resident now
    before = resident("VmRSS")
    work()
    return (resident("VmHWM") - before) / 2**10


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)

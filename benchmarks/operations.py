"""Which operations a training step spends its time on: the largest first.

    python -m benchmarks.operations

The step of `benchmarks/step.py` in bf16 under PyTorch's profiler: kernels on CUDA, operations of the
processor elsewhere, each without what it calls. A share is one of all of them; what is small is one row.

Where there is no GPU, its steps are rehearsed (`benchmarks/rehearsal.py`): kernels of each part, the most
memory that tensors take meanwhile, the bytes that kernels move, by part and by kind, and the time that these
or their multiplications take at least. The batch is of uint8 views, whose augmentation is part of the step.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernels import BANDWIDTH, PEAK, Kernels
from benchmarks.measure import Row, Table, arguments, here, report, where
from benchmarks.rehearsal import rehearsed_run
from benchmarks.step import FIXED, Ours, usual_cases
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import choose_precision
from dino_vit.training.loop import take_step

ON_CUDA = "ViT-S/16 and ViT-B/16 with 64 images"
STEPS, SHOWN, NAMED = 3, 12, 60  # profiled steps, rows, characters of a name

IMAGES = 64  # of a step that is rehearsed
REHEARSED: dict[str, dict[str, Any]] = {
    "ViT-S/16, DINO": {},
    "ViT-S/16, DINOv2": {"method": "dinov2"},
    "ViT-B/16, DINO": {"model.arch": "vit_base"},
    "ViT-B/16, blocks recomputed": {"model.arch": "vit_base", "model.grad_checkpointing": True},
}


class Operation(NamedTuple):
    """What one operation takes in a step."""

    name: str
    milliseconds: float
    calls: float


def spent(event: FunctionEventAvg, device: str) -> float:
    """Return the microseconds of an operation by itself."""
    if device == "cpu":
        return float(event.self_cpu_time_total)
    # The processor's operations are charged for the kernels that they start: count the kernels themselves.
    counts = event.device_type.name == "CUDA" and not event.is_user_annotation
    return float(event.self_device_time_total) if counts else 0.0


def operations(step: Ours) -> tuple[list[Operation], float]:
    """Return the operations of a step, the largest first, and the milliseconds of the whole by the clock."""
    device = step.state.device.type
    step()
    step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        clock = time.perf_counter() - start
    found = [
        Operation(event.key, spent(event, device) / 1e3 / STEPS, event.count / STEPS)
        for event in profiler.key_averages()
        if spent(event, device) > 0
    ]
    if not found:
        raise RuntimeError(f"the profiler saw nothing on {device}: is it allowed to look?")
    return sorted(found, key=lambda one: one.milliseconds, reverse=True), clock * 1e3 / STEPS


def shortened(name: str) -> str:
    """Cut a name in its middle; a kernel's begins with what it is of and ends with what it does."""
    name = re.sub(r"\bvoid |\bat::native::|\(anonymous namespace\)::", "", name).replace("|", "/")
    half = NAMED // 2
    return name if len(name) <= NAMED else f"{name[:half]} … {name[-half:]}"


def table(title: str, found: Sequence[Operation], clock: float) -> Table:
    """Set the largest beside all of them."""
    whole = sum(one.milliseconds for one in found)
    small = found[SHOWN:]
    rest = Operation(
        f"{len(small)} others", sum(one.milliseconds for one in small), sum(one.calls for one in small)
    )
    rows = [
        Row(
            shortened(one.name),
            {"milliseconds": one.milliseconds, "calls": one.calls},
            one.milliseconds / whole,
        )
        for one in [*found[:SHOWN], *([rest] if small else [])]
    ]
    note = f"{whole:.0f} ms of operations in a step of {clock:.0f} ms by the clock, under the profiler."
    if here().type == "cpu" and choose_precision("auto", here()) == "no":
        note += " This processor has no instructions for bf16, which a run would not choose here."
    return Table(title, "in a step", rows, note, ratio="share")


def rehearse(changes: Mapping[str, Any], images: int = IMAGES) -> Kernels:
    """Return what a second step takes on a GPU that is not here."""
    settings = {**FIXED, "data.source": f"synthetic:{images}:256", "data.batch_size": images, **changes}
    settings |= {"data.augment_on": "device", "data.mean": (0.5,) * 3, "data.std": (0.2,) * 3}
    with TemporaryDirectory() as output:
        config = replace(PretrainConfig(), {**settings, "run.precision": "bf16", "output": output})
        with rehearsed_run(config) as (rehearsal, state):
            batches = state.loader.batches()
            take_step(state, batches)
            rehearsal.restart()
            take_step(state, batches)
    return rehearsal


def kernel_table(found: Mapping[str, Kernels]) -> Table:
    """Set the parts of each step one below the other, and all of it last."""
    first = next(iter(found.values()))
    parts = dict.fromkeys(part for one in found.values() for part in one.by_part)

    def row(part: str, share: float) -> Row:
        kernels = {name: float(one.by_part[part]) for name, one in found.items()}
        memory = {name: one.peaks[part] / 2**20 if part in one.peaks else None for name, one in found.items()}
        return Row(part, kernels, share, memory)

    rows = [row(part, first.by_part[part] / first.kernels.total()) for part in parts]
    whole = {name: float(one.kernels.total()) for name, one in found.items()}
    rows.append(Row("the whole step", whole, 1.0, {name: one.peak / 2**20 for name, one in found.items()}))
    note = "Operators that launch kernels, those on lists of tensors counted once; memory of tensors alone."
    title = f"A GPU rehearsed: kernels of a step, bf16, {IMAGES} images"
    return Table(title, "kernels", rows, note, ratio="share of the first")


def traffic_table(found: Mapping[str, Kernels]) -> Table:
    """Set the GB that each part of a step, and each kind of operator, moves one below the other."""
    first, rows = next(iter(found.values())), []
    for place in (0, 1):
        moved = {name: one.traffic_by(place) for name, one in found.items()}
        parts = dict.fromkeys(part for one in moved.values() for part, _ in one.most_common())
        for part in parts:
            speed = {name: one[part] / 1e9 for name, one in moved.items()}
            rows.append(Row(part, speed, first.traffic_by(place)[part] / first.traffic.total()))
    rows.append(Row("the whole step", {name: one.traffic.total() / 1e9 for name, one in found.items()}, 1.0))
    least = ", ".join(f"{name} {sum(one.seconds.values()) * 1e3:.1f} ms" for name, one in found.items())
    note = (
        "Bytes that kernels read and write at least, by part and then by kind. At "
        f"{BANDWIDTH / 1e12:g} TB/s, or {PEAK / 1e12:g} TFLOP/s where a kernel's multiplications take longer "
        f"(an H100's data sheet), a step takes at least: {least}. A compiled function (`core/fused.py`) "
        "is one kernel that reads its arguments once and writes its results once; layers take them in steps "
        "that are large enough, as of 91 images and more of a ViT-S. Three or four passes of the losses over "
        "a row of 65,536 prototypes count as one. `run.compile` would move less."
    )
    title = f"A GPU rehearsed: traffic of a step, bf16, {IMAGES} images"
    return Table(title, "GB", rows, note, ratio="share of the first")


def run(*, threads: int) -> list[Table]:
    """Profile every case."""
    torch.set_num_threads(threads)
    tables = []
    for case in usual_cases(here().type):
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        tables.append(table(f"{case.name}, {where(threads)}", *operations(Ours(case))))
    if here().type == "cpu":
        rehearsed = {name: rehearse(changes) for name, changes in REHEARSED.items()}
        tables += [kernel_table(rehearsed), traffic_table(rehearsed)]
    return tables


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    options.repeats = 0  # the profiler sums over its steps
    report(run(threads=options.threads), options)

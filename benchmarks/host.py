"""What a step costs the host alone: its milliseconds where arithmetic is negligible, and of what they are.

    python -m benchmarks host [--compiled]

12 blocks of width 12, 2 global and 8 local views of two images, few prototypes, one thread: nearly all the
time goes into calling operators, which a GPU would wait for. It is the processor's time of that thread. A
step of DINO is set beside that of the 2021 code (`benchmarks/reference.py`), whose views are ready, and
beside lightly's modules where they are installed. The other tables say what part of our step takes how many
operators and how long, augmentation included.
"""

from __future__ import annotations

import pkgutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.util import find_spec
from itertools import repeat
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import Row, Table, Work, arguments, report
from benchmarks.step import FIXED, Reference, make_batch
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import start_processes
from dino_vit.training.loop import take_step
from dino_vit.training.setup import set_up
from tests.support.kernels import ELSEWHERE, Kernels

STEPS = 20  # timed together
COMPILED = "dino_vit, compiled"
TINY: dict[str, Any] = {
    "data.source": "synthetic:64:40",
    "data.batch_size": 2,
    "data.augment_on": "device",
    "data.mean": (0.5,) * 3,
    "data.std": (0.2,) * 3,
    "model.arch": None,
    "model.width": 12,
    "model.depth": 12,
    "model.heads": 3,
    "model.patch_size": 8,
    "views.global_size": 32,
    "views.local_size": 16,
    "head.hidden_dim": 16,
    "head.bottleneck_dim": 8,
    "head.prototypes": 64,
    "run.precision": "no",
}
METHODS: dict[str, dict[str, Any]] = {"DINO": {}, "DINOv2": {"method": "dinov2"}}
# The functions that are timed, and the part of the step that each is; of nested ones the outermost counts.
PARTS = {
    "dino_vit.training.state.TrainingState.views_of": "augmentation",
    "dino_vit.training.state.TrainingState.masks_of": "masks",
    "dino_vit.method.objective.Objective._targets": "teacher",
    "dino_vit.models.student_teacher.Network.forward": "student",
    "dino_vit.method.objective.Objective._cross_entropies": "loss",
    "dino_vit.method.objective.koleo_loss": "loss",
    "torch.autograd.backward": "backward",
    "dino_vit.training.loop.clip_gradients": "clipping",
    "dino_vit.training.loop.step_if_finite": "optimiser",
    "dino_vit.training.loop.ema_update": "average",
    "dino_vit.method.objective.Objective.update": "centre",
}


class Ours:
    """A run, and its step on the same images again and again."""

    def __init__(self, changes: Mapping[str, Any]) -> None:
        with TemporaryDirectory() as folder:
            config = replace(PretrainConfig(), {**FIXED, **TINY, **changes, "output": folder})
            self.state = set_up(config, start_processes()).state
            self.batches = repeat(next(self.state.loader.batches()))

    def __call__(self) -> None:
        take_step(self.state, self.batches)


def peer(config: PretrainConfig) -> Work:
    """Return the step of lightly's modules on views that are ready."""
    from benchmarks.peer import MaskedPeer, Peer

    batch, device = make_batch(config, torch.device("cpu")), torch.device("cpu")
    views = [
        part for of_a_size in batch.views.values() for part in torch.split(of_a_size, config.data.batch_size)
    ]
    step = Peer(config, device) if batch.masks is None else MaskedPeer(config, batch.masks, device)
    return lambda: step.step(views)


def processor_time(step: Work) -> float:
    """Return the milliseconds of this thread in a step, which other programs do not count to."""
    start = time.thread_time()
    for _ in range(STEPS):
        step()
    return 1000 * (time.thread_time() - start) / STEPS


def measure(method: str, repeats: int, *, compiled: bool) -> Row:
    """Set our step beside others', in milliseconds."""
    print(f"{method} ...", file=sys.stderr, flush=True)
    ours = Ours(METHODS[method])
    config = ours.state.config
    steps: dict[str, Work] = {"dino_vit": ours}
    if compiled:
        steps[COMPILED] = Ours({**METHODS[method], "run.compile": True})
        for _ in range(3):
            steps[COMPILED]()
    steps["2021 code"] = Reference(config, torch.device("cpu"))
    if find_spec("lightly"):
        steps["lightly"] = peer(config)
    rounds = [{n: processor_time(step) for n, step in steps.items()} for _ in range(repeats + 1)]
    milliseconds = {name: median(one[name] for one in rounds[1:]) for name in steps}
    ours_first, *others = milliseconds
    fastest = min((name for name in others if name != COMPILED), key=milliseconds.__getitem__)
    return Row(method, milliseconds, median(one[fastest] / one[ours_first] for one in rounds[1:]))


@contextmanager
def timed(seconds: defaultdict[str, float]) -> Iterator[None]:
    """Add the time of each part of the steps inside."""
    inside: list[str] = []

    def wrapped(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if inside:
                return function(*arguments, **keywords)
            inside.append(part)
            start = time.thread_time()
            try:
                return function(*arguments, **keywords)
            finally:
                seconds[part] += time.thread_time() - start
                inside.pop()

        return call

    with ExitStack() as stack:
        for name, part in PARTS.items():
            stack.enter_context(patch(name, wrapped(pkgutil.resolve_name(name), part)))
        yield


def parts(method: str, repeats: int) -> Table:
    """Say what part of our step takes how many operators and milliseconds."""
    ours = Ours(METHODS[method])
    ours()
    with Kernels() as counted:
        ours()
    rounds = []
    for _ in range(repeats + 1):
        seconds = defaultdict[str, float](float)
        with timed(seconds):
            whole = processor_time(ours) / 1000 * STEPS
        seconds[ELSEWHERE] = whole - sum(seconds.values())
        rounds.append(seconds)
    found = {part: 1000 / STEPS * median(one[part] for one in rounds[1:]) for part in rounds[0]}
    clock = sum(found.values())
    rows = [
        Row(part, {"operators": float(counted.operators[part]), "milliseconds": spent}, spent / clock)
        for part, spent in sorted(found.items(), key=lambda one: -one[1])
    ]
    rows.append(
        Row("the whole step", {"operators": float(counted.operators.total()), "milliseconds": clock}, 1.0)
    )
    return Table(f"{method}: parts of our step", "in a step", rows, ratio="share of the time")


def run(*, repeats: int, compiled: bool = False) -> list[Table]:
    """Measure every step, and its parts."""
    torch.set_num_threads(1)
    rows = [measure(method, repeats, compiled=compiled) for method in METHODS]
    note = "Ours with augmentation, the others without; the 2021 code's step is DINO's in both rows."
    table = Table(
        "Host time of a step, CPU, 1 thread", "milliseconds", rows, note, ratio="fastest other / ours"
    )
    return [table, *(parts(method, repeats) for method in METHODS)]


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--compiled", action="store_true", help="the networks compiled too, which takes minutes"
    )
    options = parser.parse_args()
    report(run(repeats=options.repeats, compiled=options.compiled), options)

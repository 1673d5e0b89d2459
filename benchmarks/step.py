"""One training step of ViT-S/16 beside the 2021 code's and other libraries': speed, memory, the host's time.

    python -m benchmarks.step --repeats 5 --batch 8

2 × 224 and 8 × 96 pixels, 65,536 prototypes that learn, AdamW; views that are ready, no logging. Ours is the
training loop's own step on a state set up from a config; the other is `benchmarks/reference.py` with the same
weights, views and rates. Memory is all that two steps take on top of the imports: networks, optimiser,
gradients, activations. Of lightly's modules and stable-pretraining's DINO those that are installed take the
same step in float32. What a step costs the host is measured where arithmetic is negligible: 12 blocks of
width 12, two images, few prototypes, one thread, augmentation included in ours; nearly all the time goes into
calling operators, which a GPU would wait for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import peer, reference
from benchmarks.measure import Row, Table, Work, arguments, compare, peak_memory, report
from dino_vit.cli import tune_process
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import STUDENT_TEMPERATURE
from dino_vit.core.runtime import Precision, start_processes
from dino_vit.method.targets import MOMENTUM
from dino_vit.models.vit import VisionTransformer
from dino_vit.training.loop import take_step
from dino_vit.training.plan import ScheduleValues
from dino_vit.training.pretrain import set_up
from dino_vit.training.state import TrainingState
from dino_vit.views.augment import Augment
from dino_vit.views.build import build_masking
from dino_vit.views.loader import Batch

FIXED: dict[str, Any] = {
    "data.source": "synthetic",
    "data.workers": 0,
    "optim.freeze_last_layer_epochs": 0,
    "budget.epochs": None,
    "budget.steps": 100_000,
    "compute.trackers": (),
    "compute.compile": False,
    "compute.eval_every": None,
    "compute.log_every": 1_000_000,
}
TINY: dict[str, Any] = {  # arithmetic is negligible
    "data.source": "synthetic:64:40",
    "data.batch_size": 2,
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
    "compute.precision": "no",
}
CONTENDERS = ("dino_vit", "2021 code")
LABELS = {"no": "float32", "bf16": "bf16", "fp16": "fp16"}
TIMED = 20  # steps of the host that are timed together


@dataclass(frozen=True)
class Case:
    """How our step computes, on how many images, and what else the config says."""

    batch: int
    precision: Precision
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        how = ", blocks recomputed" if self.changes.get("model.grad_checkpointing") else ""
        return f"{LABELS[self.precision]}{how}, {self.batch} images"

    @property
    def config(self) -> PretrainConfig:
        own = {"data.batch_size": self.batch, "compute.precision": self.precision}
        return load(PretrainConfig, None, {**FIXED, **own, **self.changes})


class Ours:
    """A state, and its step on the same views again and again."""

    def __init__(self, case: Case) -> None:
        with TemporaryDirectory() as folder:
            config = load(PretrainConfig, case.config, {"output": folder})
            self.state: TrainingState = set_up(config, start_processes())
        self.state.augment = cast(Augment, lambda views, _: views)  # they are ready
        for network in (self.state.student, self.state.teacher):
            assert isinstance(network.backbone, VisionTransformer)
            network.backbone.position_mode = "dino"  # as the other resamples them
        self.batches = repeat(make_batch(case.config, self.state.device))

    def __call__(self) -> None:
        take_step(self.state, self.batches)


class Reference:
    """The other's step on the same views; with a state's first weights and its rates, if one is given."""

    def __init__(
        self, config: PretrainConfig, device: torch.device, state: TrainingState | None = None
    ) -> None:
        student, teacher = (build_network(config, rate) for rate in (config.model.drop_path, 0.0))
        if state is not None:
            reference.load(student, state.student.state_dict())
        teacher.load_state_dict(student.state_dict())
        loss = reference.Loss(
            prototypes=config.head.prototypes,
            views=config.views.global_count + config.views.local_count,
            student_temp=STUDENT_TEMPERATURE,
            momentum=MOMENTUM,
        )
        self.trainer = reference.Trainer(student, teacher, loss, clip=config.optim.clip, device=device)
        self.views = split_views(make_batch(config, device), config.data.batch_size)
        self.state, self.step = state, 0

    def __call__(self) -> float:
        return self.take(self.views)

    def take(self, views: Sequence[Tensor]) -> float:
        """Take the next step on some views and return its loss."""
        rates = self.state.plan.rates(self.step) if self.state else ScheduleValues(1e-5, 0.04, 0.996, 0.04)
        self.step += 1
        return self.trainer.step(views, **rates._asdict())


def build_network(config: PretrainConfig, drop_path: float) -> reference.Network:
    """Build the other's network as the config has it."""
    width, depth, heads = config.model.shape
    head = config.head
    return reference.Network(
        reference.Backbone(
            size=config.views.global_shape[0],
            patch=config.model.patch_size,
            width=width,
            depth=depth,
            heads=heads,
            drop_path=drop_path,
        ),
        reference.Head(
            width=width, hidden=head.hidden_dim, bottleneck=head.bottleneck_dim, prototypes=head.prototypes
        ),
    )


def make_batch(config: PretrainConfig, device: torch.device) -> Batch:
    """Return views that have been through the photometry, the same at every call."""
    generator, views = torch.Generator().manual_seed(0), config.views
    both = {views.global_shape: views.global_count, views.local_shape: views.local_count}
    counts = {size: count for size, count in both.items() if count}
    images = config.data.batch_size
    masks = build_masking(config, images).draw(0, 0, 0, images) if config.loss.patch_weight else None
    return Batch(
        epoch=0,
        step=0,
        samples=torch.arange(images),
        read=torch.arange(images),
        views={
            size: torch.randn(count * images, config.data.channels, *size, generator=generator).to(device)
            for size, count in counts.items()
        },
        augment={size: torch.empty(0) for size in counts},
        unreadable=(),
        times={},
        masks=masks,
    )


def split_views(batch: Batch, images: int) -> list[Tensor]:
    """Return a tensor for each view, the global ones first."""
    return [view for of_a_size in batch.views.values() for view in torch.split(of_a_size, images)]


def build_run(name: str, case: Case) -> Work:
    """Return what memory is measured of: building everything, and two steps."""

    def run() -> None:
        step = Ours(case) if name == "dino_vit" else Reference(case.config, torch.device("cpu"))
        step()
        step()

    return run


def measure(case: Case, repeats: int) -> tuple[Row, str]:
    """Measure one row, and say what it comes to."""
    print(f"{case.name} ...", file=sys.stderr, flush=True)
    ours = Ours(case)
    works: dict[str, Work] = {
        "dino_vit": ours,
        "2021 code": Reference(case.config, torch.device("cpu"), ours.state),
    }
    row = compare(case.name, works, items=case.batch, repeats=repeats)
    share = f", {product_share(ours, row.speed['dino_vit'] / case.batch)}" if case.precision == "bf16" else ""
    row.memory.update({name: peak_memory(build_run, name, case) for name in CONTENDERS})
    peak, other = row.memory.values()
    memory = f", {peak / other:.2f} times its memory" if peak and other else ""
    return row, f"{case.name}: {row.advantage:.2f} times the 2021 code's speed{memory}{share}."


def product_share(step: Work, rate: float) -> str:
    """Set the products of so many steps a second beside the fastest that the processor does in bf16."""
    with FlopCounterMode(display=False) as counter:
        step()
    reached, side, seconds = counter.get_total_flops() * rate, 2048, []
    square = torch.randn(side, side, dtype=torch.bfloat16)
    for _ in range(8):
        start = time.perf_counter()
        square @ square
        seconds.append(time.perf_counter() - start)
    peak = 2 * side**3 / min(seconds)
    fastest = f"a bf16 product of {side} × {side} reaches {peak / 1e12:.2f}"
    return f"{reached / 1e12:.2f} TFLOP/s where {fastest} ({reached / peak:.0%})"


def cases(images: int) -> list[Case]:
    """Return all rows beside the 2021 code."""
    # float32 needs nearly the reference's memory, unless blocks are computed twice
    twice = Case(images, "no", {"model.grad_checkpointing": True})
    return [Case(images, "bf16"), Case(images, "no"), twice]


def beside_libraries(images: int, repeats: int) -> Row:
    """Measure our step beside those of all libraries that are installed, in float32."""
    case = Case(images, "no")
    works: dict[str, Work] = {
        "dino_vit": Ours(case),
        "2021 code": Reference(case.config, torch.device("cpu")),
    }
    views = split_views(make_batch(case.config, torch.device("cpu")), images)
    for name, build in peer.STEPS.items():
        if find_spec(name.replace("-", "_")):
            works[name] = partial(build(case.config), views)
        else:
            print(f"no column of {name}, which is not installed", file=sys.stderr)
    return compare(case.name, works, items=images, repeats=repeats)


class TinyStep:
    """A whole step, from uint8 views, of a network whose arithmetic is negligible."""

    def __init__(self, changes: Mapping[str, Any]) -> None:
        with TemporaryDirectory() as folder:
            config = load(PretrainConfig, None, {**FIXED, **TINY, **changes, "output": folder})
            self.state = set_up(config, start_processes())
            self.batches = repeat(next(self.state.loader.batches()))

    def __call__(self) -> None:
        take_step(self.state, self.batches)


def host_row(name: str, changes: Mapping[str, Any], repeats: int) -> Row:
    """Measure the milliseconds of this thread in a step, which other programs do not count to."""
    ours = TinyStep(changes)
    steps: dict[str, Work] = {
        "dino_vit": ours,
        "2021 code": Reference(ours.state.config, torch.device("cpu")),
    }
    rounds = [{key: thread_time(step) for key, step in steps.items()} for _ in range(repeats + 1)][1:]
    milliseconds = {key: median(times[key] for times in rounds) for key in steps}
    share = median(times["dino_vit"] / times["2021 code"] for times in rounds)
    return Row(name, milliseconds, share)


def thread_time(step: Callable[[], object]) -> float:
    start = time.thread_time()
    for _ in range(TIMED):
        step()
    return 1000 * (time.thread_time() - start) / TIMED


def run(*, repeats: int, threads: int, images: int = 8) -> list[Table]:
    """Measure every table."""
    torch.set_num_threads(threads)
    rows, notes = zip(*(measure(case, repeats) for case in cases(images)), strict=True)
    where, unit = f"CPU, {threads} threads", "images a second"
    tables = [Table(f"Training step, {where}, the 2021 code in float32", unit, list(rows), "\n".join(notes))]
    row = beside_libraries(images, repeats)
    tables.append(Table(f"Training step beside other libraries, {where}, float32", unit, [row]))
    torch.set_num_threads(1)
    methods: dict[str, dict[str, Any]] = {"DINO": {}, "DINOv2": {"method": "dinov2"}}
    rows = tuple(host_row(name, changes, repeats) for name, changes in methods.items())
    note = "Ours with augmentation; the 2021 code's step is DINO's in both rows, and its views are ready."
    title, ratio = "Host time of a step, CPU, 1 thread", "ours / 2021 code"
    return [*tables, Table(title, "milliseconds", list(rows), note, ratio=ratio)]


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="images (default %(default)s)")
    options = parser.parse_args()
    tune_process()  # as `dino-vit` does, which all contenders gain from
    report(run(repeats=options.repeats, threads=options.threads, images=options.batch), options)

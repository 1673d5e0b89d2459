"""One training step of ViT-S/16 beside the 2021 code's: images a second and peak memory.

    python -m benchmarks.step --repeats 5 --batch 8

2 × 224 and 8 × 96 pixels, 65,536 prototypes that learn, AdamW; views that are ready, no logging. Ours is the
training loop's own step on a state set up from a config; the other is `benchmarks/reference.py` with the same
weights, views and rates, in float32 on a CPU and in fp16 with a scaler on CUDA. Memory is all that two steps
take on top of the imports: networks, optimiser, gradients, activations. On CUDA: ViT-S/16 and ViT-B/16, with
64 and with 256 images.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import reference
from benchmarks.measure import Row, Table, Work, arguments, compare, here, peak_memory, report, where
from dino_vit.cli import tune_process
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import STUDENT_TEMPERATURE
from dino_vit.core.runtime import Precision, start_processes
from dino_vit.method.centering import MOMENTUM
from dino_vit.models.vit import VisionTransformer
from dino_vit.training.loop import take_step
from dino_vit.training.plan import ScheduleValues
from dino_vit.training.setup import set_up
from dino_vit.training.state import TrainingState
from dino_vit.views.augment import Augment
from dino_vit.views.build import build_masking
from dino_vit.views.loader import Batch

CONTENDERS = ("dino_vit", "reference")
FIXED: dict[str, Any] = {
    "data.source": "synthetic",
    "data.workers": 0,
    "optim.freeze_last_layer_epochs": 0,
    "budget.epochs": None,
    "budget.steps": 100_000,
    "run.trackers": (),
    "run.compile": False,
    "run.eval_every": None,
    "run.log_every": 1_000_000,
}
ON_CUDA = "ViT-S/16 and ViT-B/16 with 64 and with 256 images, bf16 beside the reference's fp16; share of peak"
ARCHS = {"vit_small": "ViT-S/16", "vit_base": "ViT-B/16"}
LABELS = {"no": "float32", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Case:
    """How our step computes, on how many images, and what else the config says."""

    batch: int
    precision: Precision
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        how = [ARCHS[self.changes["model.arch"]]] if self.changes.get("model.arch") else []
        how += [LABELS[self.precision]]
        how += ["blocks recomputed"] if self.changes.get("model.grad_checkpointing") else []
        return f"{', '.join(how)}, {self.batch} images"

    @property
    def config(self) -> PretrainConfig:
        own = {"data.batch_size": self.batch, "run.precision": self.precision}
        return replace(PretrainConfig(), {**FIXED, **own, **self.changes})


class Ours:
    """A state, and its step on the same views again and again."""

    def __init__(self, case: Case) -> None:
        with TemporaryDirectory() as folder:
            config = replace(case.config, {"output": folder})
            accelerator = start_processes()
            run_ = set_up(config, accelerator)
        self.state: TrainingState = run_.state
        self.state.augment = cast(Augment, lambda views, _: views)  # they are ready
        for network in (self.state.student, self.state.teacher):
            assert isinstance(network.backbone, VisionTransformer)
            network.backbone.position_mode = "dino"  # as the other resamples them
        self.batches = repeat(make_batch(case.config, self.state.device))

    def __call__(self) -> None:
        take_step(self.state, self.batches)

    def loss(self) -> float:
        """Return the mean loss of the steps since it was asked for last."""
        loss = self.state.interval.read()["loss"]
        self.state.interval.restart()
        return loss


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
        views = make_batch(config, device).views.values()
        self.views = [view for of_a_size in views for view in torch.split(of_a_size, config.data.batch_size)]
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
        masks=masks,
    )


def build_run(name: str, case: Case, device: torch.device) -> Work:
    """Return what memory is measured of: building everything, and two steps."""

    def run() -> None:
        step = Ours(case) if name == "dino_vit" else Reference(case.config, device)
        step()
        step()

    return run


def measure(case: Case, repeats: int) -> tuple[Row, str]:
    """Measure one row, and say what it comes to."""
    print(f"{case.name} ...", file=sys.stderr, flush=True)
    ours = Ours(case)
    device = ours.state.device
    works: dict[str, Work] = {"dino_vit": ours, "reference": Reference(case.config, device, ours.state)}
    row = compare(case.name, works, items=case.batch, repeats=repeats, device=device.type)
    share = ""
    if case.precision == "bf16":
        share = f", {matrix_share(ours, ours.state.device, row.speed['dino_vit'] / case.batch)}"
    del ours, works  # the peak on CUDA is that of the process
    memory = {name: peak_memory(build_run, name, case, device, device=device.type) for name in CONTENDERS}
    row.memory.update(memory)
    peak, other = (memory[name] for name in CONTENDERS)
    compared = f", {peak / other:.2f} times its memory" if peak and other else ""
    return row, f"{case.name}: {row.advantage:.2f} times the reference's speed{compared}{share}."


def matrix_share(step: Work, device: torch.device, rate: float) -> str:
    """Set the matrix products of so many steps a second beside the fastest that the device does in bf16."""
    with FlopCounterMode(display=False) as counter:
        step()
    reached = counter.get_total_flops() * rate
    side, products, seconds = *((8192, 10) if device.type == "cuda" else (2048, 1)), []
    square = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(products):
            product = square @ square
        float(product[0, 0])  # wait for it
        seconds.append((time.perf_counter() - start) / products)
    peak = 2 * side**3 / min(seconds)
    fastest = f"a bf16 product of {side} × {side} reaches {peak / 1e12:.2f}"
    return f"{reached / 1e12:.2f} TFLOP/s where {fastest} ({reached / peak:.0%})"


def cases(device: str, batch: int | None) -> list[Case]:
    """Name all rows of a device."""
    if device == "cuda":
        sizes = (batch,) if batch else (64, 256)
        return [Case(images, "bf16", {"model.arch": arch}) for arch in ARCHS for images in sizes]
    images = batch or 8
    # float32 needs nearly the reference's memory, unless blocks are computed twice
    twice = Case(images, "no", {"model.grad_checkpointing": True})
    return [Case(images, "bf16"), Case(images, "no"), twice]


def usual_cases(device: str) -> list[Case]:
    """Name those in bf16 that other programs look at too."""
    if device == "cuda":
        return [Case(64, "bf16", {"model.arch": arch}) for arch in ARCHS]
    return [Case(8, "bf16")]


def run(*, repeats: int, threads: int, batch: int | None = None) -> list[Table]:
    """Measure every row."""
    torch.set_num_threads(threads)
    device, rows, notes = here().type, [], []
    for case in cases(device, batch):
        try:
            row, note = measure(case, repeats)
        except torch.cuda.OutOfMemoryError:
            notes.append(f"{case.name}: not both fit in the device's memory.")
        else:
            rows.append(row)
            notes.append(note)
    other = "fp16" if device == "cuda" else "float32"
    title = f"Training step, {where(threads)}, reference in {other}"
    return [Table(title, "images a second", rows, "\n".join(notes))]


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, help="images (default: 8 on a CPU, 64 and 256 on CUDA)")
    options = parser.parse_args()
    tune_process()  # as `dino-vit` does, which both contenders gain from
    report(run(repeats=options.repeats, threads=options.threads, batch=options.batch), options)

"""Training steps on a GPU: ours, the 2021 code's, other kernels of attention, compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import einops
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_record import DEVICE, ON_GPU, SMALL, Record, milliseconds, seconds, size
from benchmarks.measure import Work
from benchmarks.step import FIXED, Case, Reference
from dino_vit.config.loading import replace as with_settings
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import start_processes, wait_for_device
from dino_vit.training.loop import take_step
from dino_vit.training.setup import set_up
from dino_vit.training.state import TrainingState
from dino_vit.views.loader import Batch
from tests.support.kernels import PEAK

READ = size(64, 2)  # images that are cut into views; a larger batch has them several times
TITLES = {"vit_small": "ViT-S/16", "vit_base": "ViT-B/16"}
WARM_UP = 5  # steps
WITHOUT_CUDNN = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@dataclass(frozen=True)
class StepCase:
    """A step: network, images, method, and other settings."""

    arch: str
    batch: int
    method: str = "DINO"
    how: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        how = f", {self.how}" if self.how else ""
        return f"{TITLES[self.arch]}, {self.method}, {self.batch} images{how}"

    @property
    def images(self) -> int:
        return size(self.batch, self.batch // 32)

    @property
    def settings(self) -> dict[str, Any]:
        own = {"model.arch": self.arch, "method": self.method.lower(), "run.compile": False}
        own |= self.changes
        return own if ON_GPU else {**own, **SMALL}


SMALL_STEP, BASE_STEP = StepCase("vit_small", 64), StepCase("vit_base", 64)
DINOV2_STEP = StepCase("vit_small", 64, "DINOv2")


class WholeStep:
    """A step with everything in it: uint8 views in pinned memory, augmented on the device."""

    def __init__(self, case: StepCase) -> None:
        read = min(READ, case.images)
        own = {"data.source": f"synthetic:{read}:256", "data.batch_size": read, "data.augment_on": "device"}
        own |= {"data.mean": (0.5,) * 3, "data.std": (0.2,) * 3, "run.precision": "bf16"}
        with TemporaryDirectory() as folder:
            config = with_settings(PretrainConfig(), {**FIXED, **own, **case.settings, "output": folder})
            self.state: TrainingState = set_up(config, start_processes()).state
        batches = self.state.loader.batches()
        batch = tiled(next(batches), case.images // read)
        batches.close()
        self.batches = repeat(batch)

    def __call__(self) -> None:
        take_step(self.state, self.batches)


def tiled(batch: Batch, times: int) -> Batch:
    """Return a batch that holds its images several times."""
    if times == 1:
        return batch
    assert batch.masks is None

    def rows(parts: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        images = len(batch.read)
        views = {
            key: einops.repeat(part, "(v b) ... -> (v t b) ...", b=images, t=times)
            for key, part in parts.items()
        }
        return {key: part.pin_memory() if ON_GPU else part for key, part in views.items()}

    return replace(
        batch,
        samples=batch.samples.repeat(times),
        read=batch.read.repeat(times),
        views=rows(batch.views),
        augment=rows(batch.augment),
    )


def measured(step: Work, images: int, *, queued: int = 10, rounds: int = 3) -> dict[str, float]:
    """Time steps in a queue, as the loop takes them, then one by itself and the host in it."""
    for _ in range(size(WARM_UP, 1)):
        step()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(step, calls=queued, rounds=rounds, warm_up=2)
    hosts, alone = [], []
    for _ in range(size(5, 1)):
        start = time.perf_counter()
        step()
        hosts.append(1e3 * (time.perf_counter() - start))
        wait_for_device(DEVICE)
        alone.append(1e3 * (time.perf_counter() - start))
    found = {"images_s": round(1e3 * images / ms, 1), "ms": round(ms, 2), "ms_alone": round(median(alone), 2)}
    found |= {"ms_host": round(median(hosts), 2)}
    if ON_GPU:
        found["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return found


def multiplications(step: Work) -> int:
    """Count the FLOPs of a step, before it is recorded."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def shares(flops: int, ms: float) -> dict[str, float]:
    """Set the multiplications of a step beside the peak of an H100's data sheet."""
    reached = 1e3 * flops / ms
    return {
        "tflop": round(flops / 1e12, 2),
        "tflop_s": round(reached / 1e12, 1),
        "of_peak": round(reached / PEAK, 3),
    }


def ours(record: Record, case: StepCase, build: Callable[[StepCase], Work] = WholeStep) -> None:
    """Measure one of our steps, whose functions are compiled for its own shapes."""
    torch._dynamo.reset()
    with record.attempt("step", case.name):
        step = build(case)
        first, flops = seconds(step), multiplications(step)
        found = measured(step, case.images)
        record.add("step", case.name, first_s=round(first, 1), **found, **shares(flops, found["ms"]))


def published(record: Record, case: StepCase) -> None:
    """Measure the 2021 code's step, whose views are ready, in fp16 with a scaler."""
    name = replace(case, how="code of 2021, fp16").name
    with record.attempt("step", name):
        step = Reference(Case(case.images, "no", case.settings).config, DEVICE)
        record.add("step", name, **measured(step, case.images, queued=3, rounds=2))


def steps(record: Record, _: float) -> None:
    """Measure steps as they are, the most telling first."""
    ours(record, SMALL_STEP)
    published(record, SMALL_STEP)
    ours(record, BASE_STEP)
    ours(record, replace(SMALL_STEP, batch=256))
    ours(record, DINOV2_STEP)
    published(record, BASE_STEP)
    ours(record, replace(BASE_STEP, method="DINOv2"))
    ours(record, replace(BASE_STEP, batch=256))
    published(record, replace(SMALL_STEP, batch=256))
    with sdpa_kernel(list(WITHOUT_CUDNN)) if ON_GPU else nullcontext():
        ours(record, replace(SMALL_STEP, how="without cuDNN's attention"))


def compiled(record: Record, _: float) -> None:
    """Measure what compiling costs and brings: block by block, or the whole networks."""
    for case, how in (
        (SMALL_STEP, "blocks compiled"),
        (BASE_STEP, "blocks compiled"),
        (DINOV2_STEP, "blocks compiled"),
        (replace(SMALL_STEP, batch=256), "blocks compiled"),
        (SMALL_STEP, "networks compiled"),
    ):
        case = replace(case, how=how, changes={"run.compile": COMPILED[how]})
        torch._dynamo.reset()  # what it keeps of the case before counts to its limit
        counters.clear()
        with record.attempt("compiled", case.name):
            step, start = WholeStep(case), time.perf_counter()
            for _ in range(WARM_UP):
                step()
            wait_for_device(DEVICE)
            took = round(time.perf_counter() - start, 1)
            graphs = counters["stats"]["unique_graphs"]
            record.add("compiled", case.name, compile_s=took, graphs=graphs, **measured(step, case.images))


COMPILED: dict[str, Any] = {"blocks compiled": "auto", "networks compiled": True}

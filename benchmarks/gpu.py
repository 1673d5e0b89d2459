"""Which variant of a step is best on a GPU: all in one process, warmed, then measured in turn.

    python -m benchmarks gpu [decide] [--seconds 520] [--out gpu-out] [--only NAME ...]
    python -m benchmarks gpu confirm [--seconds 180] [--compile auto] [--data FOLDER]

`decide` measures what decides most first, each while there is time: a step of ViT-S/16 with 64 images by
plain operators, compiled blocks and compiled networks, without CUDA graphs and with, and what keeps the GPU
busy in them; larger steps; DINOv2's; operations. `tests/gpu` runs beside the warming. A round of ten queued
steps is a line of JSON. `confirm` runs the tests again, trains from JPEGs, and trains on the CIFAR-10 of
`--data` (train.parquet and test.parquet) for the time left. `--device cpu` rehearses it with small networks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._dynamo
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_table import read, summary, table
from benchmarks.input import Photos
from benchmarks.step import FIXED, TINY
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.distributed import wait_for_device
from dino_vit.core.runtime import device_name, start_processes
from dino_vit.training.loop import take_step
from dino_vit.training.networks import compile_networks
from dino_vit.training.pretrain import set_up
from dino_vit.views import augment

ROOT = Path(__file__).parents[1]
GRAPHS = ", reduce-overhead"  # `torch.compile`'s mode with CUDA graphs
# What is compiled, and the seconds that building and warming it takes at most.
VARIANTS = {"plain": 30, "blocks": 60, f"blocks{GRAPHS}": 60, "networks": 120, f"networks{GRAPHS}": 120}
TESTS = ["pytest", "-m", "gpu", "tests/gpu", "-v", "-rfEs", "-p", "no:benchmark"]  # whose warning is an error
SMALL = {key: value for key, value in TINY.items() if key.startswith(("model.", "head.", "views."))}
SMALL |= {"model.depth": 1, "views.local_count": 2}
SHORT = ["budget.steps=4", "data.batch_size=4", "optim.warmup_epochs=0", "optim.freeze_last_layer_epochs=0"]
LONG = ["budget.steps=100000", "compute.log_every=20", "compute.eval_every=null"]


class Case(NamedTuple):
    """A step, and the variants of it that are measured; "better" is the best compiled one of the first."""

    title: str
    images: int
    variants: Sequence[str]
    changes: dict[str, Any]


CASES = (
    Case("ViT-S/16, 64 images", 64, tuple(VARIANTS), {}),
    Case("ViT-B/16, 64 images", 64, ("plain", "blocks"), {"model.arch": "vit_base"}),
    Case("ViT-B/16, 256 images", 256, ("plain", "better"), {"model.arch": "vit_base"}),
    Case("ViT-S/16, 256 images", 256, ("plain", "better"), {}),
    Case("ViT-S/16, DINOv2, 64 images", 64, ("plain", "blocks"), {"method": "dinov2"}),
)
Work = Callable[[], object]


@dataclass
class Bench:
    """Where it is measured, until when, and the file of all lines."""

    device: torch.device
    on_gpu: bool
    path: Path
    end: float  # by time.monotonic

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def size(self, full: int, small: int) -> int:
        return full if self.on_gpu else small

    def add(self, kind: str, name: str, **values: Any) -> None:
        """Write a line of JSON at once, as the process can be killed at any time."""
        values = {key: round(v, 4) if isinstance(v, float) else v for key, v in values.items()}
        line = json.dumps({"kind": kind, "name": name, **values}, ensure_ascii=False)
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def attempt(self, name: str, seconds: float) -> Iterator[None]:
        """Give something so many seconds; write down what fails or takes longer, and go on."""
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, seconds if self.on_gpu else 0)
        try:
            yield
        except Exception as error:
            self.add("error", name, said=f"{type(error).__name__}: {error}"[:1500])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _stop(*_: object) -> None:
    raise TimeoutError("it took too long")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table of it."""
    names = ("tests", *(case.title for case in CASES), "operations")
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__.splitlines()[0])
    parser.add_argument("call", nargs="?", choices=("decide", "confirm"), default="decide")
    parser.add_argument("--seconds", type=float, help="in all (default: 520, or 180 to confirm)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--compile", choices=("auto", "true", "false"), default="auto", help="to confirm")
    parser.add_argument("--data", type=Path, default=Path("gpu-data"), help="CIFAR-10 (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="folder (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    seconds, path = options.seconds or (520 if options.call == "decide" else 180), options.out / "gpu.jsonl"
    path.unlink(missing_ok=True)
    bench = Bench(torch.device(options.device), options.device == "cuda", path, time.monotonic() + seconds)
    bench.add("machine", device_name(bench.device), torch=str(torch.__version__), cores=os.cpu_count())
    several = ["-n8"] if find_spec("xdist") and bench.on_gpu else []
    tests = start(bench, "tests", TESTS + several) if "tests" in options.only else None
    if options.call == "confirm":
        confirm(bench, options.compile, options.data, tests)
    else:
        for case in (case for case in CASES if case.title in options.only):
            measure_steps(bench, case, tests)
            tests = None  # they have ended
        if "operations" in options.only:
            measure_operations(bench)
    print(table(read(path)))
    return any(line["kind"] == "error" or line.get("rc", 0) > 0 for line in read(path))


def measure_steps(bench: Bench, case: Case, tests: subprocess.Popen[bytes] | None) -> None:
    """Warm all variants of a step, then measure them in turn, and what keeps the GPU busy in each."""
    torch._dynamo.reset()
    steps, images = dict[str, Work](), bench.size(case.images, case.images // 32)
    found = summary(read(bench.path))
    first = {v: found[name]["ms"] for v in list(VARIANTS)[1:] if (name := f"{CASES[0].title}: {v}") in found}
    better = min(first, key=first.__getitem__, default="blocks")
    for variant in (better if variant == "better" else variant for variant in case.variants):
        name, limit = f"{case.title}: {variant}", VARIANTS[variant]
        if bench.left < limit:
            bench.add("left out", name, seconds_left=bench.left)
            continue
        with bench.attempt(name, limit):
            step, began = build_step(bench, variant, case.changes, images), time.perf_counter()
            for _ in range(bench.size(5, 1)):
                step()
            wait_for_device(bench.device)
            values = {"warm_s": time.perf_counter() - began}
            if variant == "plain":
                with FlopCounterMode(display=False) as counter:
                    step()
                values["gflop"] = counter.get_total_flops() / 1e9
            bench.add("warmed", name, images=images, **values)
            steps[name] = step
    finish(bench, "tests", tests, 120)
    measure_in_turn(bench, steps, calls=bench.size(10, 1))
    for name, step in steps.items():
        with bench.attempt(name, 60):
            profile_kernels(bench, name, step)
    steps.clear()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU


def build_step(bench: Bench, variant: str, changes: Mapping[str, Any], images: int) -> Work:
    """Build a step with everything in it: uint8 views in pinned memory, augmented on the device."""
    own = {"data.source": f"synthetic:{images}:256", "data.batch_size": images}
    own |= {"data.mean": (0.5,) * 3, "data.std": (0.2,) * 3, "compute.precision": "bf16", **changes}
    with TemporaryDirectory() as folder:
        own |= {"output": folder, **({} if bench.on_gpu else SMALL)}
        state = set_up(load(PretrainConfig, None, {**FIXED, **own}), start_processes())
    batches = state.loader.batches()
    batch = next(batches)
    batches.close()
    if variant != "plain":
        options = {"mode": "reduce-overhead"} if GRAPHS in variant else {}
        options = options if bench.on_gpu else {"backend": "eager"}  # without the minutes of a compiler
        with patch("torch.compile", partial(torch.compile, **options)):
            compile_networks((state.student, state.teacher), whole=variant.startswith("networks"))
        if bench.on_gpu:
            state.objective.compile()

    def step() -> None:
        if GRAPHS in variant:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with patch("torch._dynamo.config.recompile_limit", 64):  # variants share the code of a block
            take_step(state, repeat(batch))

    return step


def measure_in_turn(bench: Bench, works: Mapping[str, Work], calls: int) -> None:
    """Measure five rounds of all, each in a queue of calls."""
    for number in range(bench.size(5, 2)):
        for name, work in works.items():
            with bench.attempt(name, 60):
                wait_for_device(bench.device)
                if bench.on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                resident = torch.cuda.memory_allocated() if bench.on_gpu else 0
                start, host, threads = time.perf_counter(), time.thread_time(), time.process_time()
                for _ in range(calls):
                    work()
                host, threads = time.thread_time() - host, time.process_time() - threads
                wait_for_device(bench.device)
                seconds = {"ms": time.perf_counter() - start, "host_ms": host, "threads_ms": threads}
                values = {key: 1e3 * value / calls for key, value in seconds.items()}
                peak = torch.cuda.max_memory_allocated() - resident if bench.on_gpu else 0
                bench.add("round", name, number=number, **values, peak_mib=peak / 2**20)


def profile_kernels(bench: Bench, name: str, step: Work, count: int = 3) -> None:
    """Write down how long the GPU is busy in a step, and its 40 largest kernels."""
    with profile(activities=[ProfilerActivity.CUDA if bench.on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(count):
            step()
        wait_for_device(bench.device)
    events = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == bench.device.type.upper()
    ]
    times, busy, last = Counter[str](), 0, 0
    for began, ended, kernel in sorted(events):  # kernels may overlap
        times[kernel] += ended - began
        busy, last = busy + max(0, ended - max(began, last)), max(last, ended)
    largest = {kernel[:150]: ns / count / 1e6 for kernel, ns in times.most_common(40)}
    bench.add("busy", name, busy_ms=busy / count / 1e6, kernels=len(events) / count, largest=largest)


def measure_operations(bench: Bench) -> None:
    """Measure single operations that have alternatives: blur, sums of biases, attention over few tokens."""
    random = partial(torch.randn, device=bench.device, dtype=torch.bfloat16)
    images, side, sequences, rows = (128, 224, 512, 44_160) if bench.on_gpu else (2, 32, 1, 64)
    x, taps = random(images, 3, side, side).float(), random(17, images, 1, 1, 1).float()
    works: dict[str, Work] = {"blur of 128 views": partial(augment._blur_, x, taps)}
    compiled = torch.compile(lambda g: g.sum(0), backend="inductor" if bench.on_gpu else "eager")
    for width in (384, 1536):
        grad, name = random(rows, width), f"gradient of a bias of {width}"
        works[f"{name}, sum(0)"] = partial(torch.sum, grad, 0)
        works[f"{name}, product with ones"] = partial(torch.mm, torch.ones_like(grad[:, :1]).T, grad)
        works[f"{name}, compiled"] = partial(compiled, grad)
    qkv = random(3, sequences, 6, 37, 64, requires_grad=True).unbind()
    for name in ("FLASH", "CUDNN", "EFFICIENT") if bench.on_gpu else ("MATH",):
        kernel = next(kernel for key, kernel in SDPBackend.__members__.items() if key.startswith(name))
        works[f"attention over 37 tokens, {name}"] = partial(attend, kernel, *qkv)
    measure_in_turn(bench, works, calls=bench.size(50, 1))  # in the first round they are compiled


def attend(kernel: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), out)


def start(bench: Bench, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a module of Python, whose output goes to a file."""
    argv = [sys.executable, "-m", *command]
    with bench.path.with_name(f"{name}.txt").open("wb") as file:
        return subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)


def finish(bench: Bench, name: str, process: subprocess.Popen[bytes] | None, seconds: float) -> None:
    """Wait for a process, end it after some seconds, and write down what it said last."""
    if process is not None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(1, min(seconds if bench.on_gpu else 1e6, bench.left)))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        lines = (bench.path.parent / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        bench.add("process", name, rc=process.wait(), failed=failed, said=lines[-3:])


def confirm(bench: Bench, compiled: str, data: Path, tests: subprocess.Popen[bytes] | None) -> None:
    """Train from JPEGs, then two networks on CIFAR-10 for the time left, judged by k-NN."""
    finish(bench, "tests", tests, 120)
    train, test, photos = data / "train.parquet", data / "test.parquet", Photos(bench.size(64, 4)).files
    with TemporaryDirectory() as folder:
        for number in range(bench.size(6400, 16)):
            Path(folder, f"{number}.jpg").write_bytes(photos[number % len(photos)])
        run = ["pretrain", folder, str(bench.path.with_name("jpegs")), f"compute.compile={compiled}"]
        run += ["budget.epochs=null", *(LONG if bench.on_gpu else SHORT)]
        finish(bench, "jpegs", start(bench, "jpegs", ["dino_vit", *run]), seconds=60)
    for number, arch in enumerate(("vit_tiny", "timm:resnet18")):
        seconds, output = 0.6 * bench.left / (2 - number), str(bench.path.with_name(f"cifar10-{number}"))
        run = ["pretrain", "--config", "configs/pretrain/cifar10.yaml", str(train), output]
        length = [f"budget.minutes={seconds / 60}"] if bench.on_gpu else SHORT
        knn = ["knn", str(test), output, f"train={train}"]
        run += [f"model.arch={arch}", "budget.epochs=null", *length]
        for name, command, limit in ((arch, run, 1.5 * seconds), (f"{arch}, k-NN", knn, 60)):
            finish(bench, name, start(bench, name, ["dino_vit", *command]), limit)

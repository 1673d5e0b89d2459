"""Programs on a GPU: the tests of `tests/gpu`, the loader, steps from files, CIFAR-10 in the time left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks import end_to_end
from benchmarks.gpu_record import ON_GPU, SMALL, Record, seconds, size
from benchmarks.input import Photos
from dino_vit.config.commands import KnnConfig
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import start_processes
from dino_vit.eval.classification import knn
from dino_vit.reports.metrics import MetricsRecord
from dino_vit.training.pretrain import pretrain
from dino_vit.training.setup import set_up
from dino_vit.views.workers import choose_workers

ROOT = Path(__file__).parents[1]
PHOTOS = 64  # that are made; more files hold the same
TESTS = ("--durations=10", "--tb=short", "-rfEs", "-v")  # -v: what was tested by the time that it is killed
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # the second warns, which is an error
JUDGED = 0.35  # of the time of a run on CIFAR-10, for setting it up and for judging it
SHORTEST = 30.0  # seconds of a run that says something
NETWORKS = ("vit_tiny", "timm:resnet18")
REHEARSED = ("synthetic:64:32", "synthetic:40:32")
SHORT: dict[str, Any] = {
    "budget.minutes": None,
    "budget.steps": 4,
    "data.batch_size": 8,
    "run.log_every": 2,
}
SHORT |= {"data.workers": 0, "run.eval_every": None, "recipe": "dino"}
SHORT |= {key: value for key, value in SMALL.items() if key.startswith(("head.", "views."))}
KEPT = ("step", "epoch", "loss", "images_per_second", "data_wait", "knn")


def tests(record: Record, _: float) -> None:
    """Run the tests of `make test-gpu`, several at a time where pytest-xdist is installed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", *PLUGINS, *TESTS]
    command += ["-n", str(size(8, 2))] if find_spec("xdist") else []
    environ = dict(os.environ)
    if not ON_GPU:
        environ |= {"TEST_GPU_ON": "cpu"}
    with (record.path.parent / "tests.txt").open("w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT)
    lines = (record.path.parent / "tests.txt").read_text(encoding="utf-8").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    record.add("tests", "tests/gpu", rc=done.returncode, said=lines[-1] if lines else "", failed=failed)


def feeding(record: Record, _: float) -> None:
    """Measure whether the loader can feed a GPU, by itself and in steps."""
    workers = choose_workers(None, 1) if ON_GPU else 1
    batch = size(64, 2)
    with same_photos():
        with record.attempt("loader", "JPEGs"):
            loader(record, batch, workers)
        for images in (64, 256):
            with record.attempt("loader", f"steps of {images} images"):
                steps_from_files(record, images, workers)


@contextmanager
def same_photos() -> Iterator[None]:
    """Make a few photographs once for all."""
    made = Photos(size(PHOTOS, 4), 500).files

    class Repeated(Photos):
        def __init__(self, count: int, side: int) -> None:
            self.files = (made * -(-count // len(made)))[:count]

    with patch.object(end_to_end, "Photos", Repeated):
        yield


def loader(record: Record, batch: int, workers: int) -> None:
    """Measure how many images all workers make into views, with nothing else to do."""
    case = end_to_end.Case("loader", 500, batch, 1, {} if ON_GPU else SMALL)
    with end_to_end.files_of(case, workers) as config:
        batches = set_up(config, start_processes()).state.loader.batches()
        for _ in range(3 * workers):  # past what they have made ahead
            next(batches)
        start, count = time.perf_counter(), 4 * workers
        for _ in range(count):
            next(batches)
        rate = count * batch / (time.perf_counter() - start)
        batches.close()
    name = "JPEGs of 500 × 375 to views"
    record.add("loader", name, workers=workers, images_s=round(rate, 1), by_each=round(rate / workers, 1))


def steps_from_files(record: Record, images: int, workers: int) -> None:
    """Measure the whole program, as a run has it."""
    steps = size(40 * 64 // images, 2)
    name, batch = f"ViT-S/16, {images} images from JPEGs", size(images, 2)
    case = end_to_end.Case(name, 500, batch, steps, {} if ON_GPU else SMALL)
    with end_to_end.files_of(case, workers) as config:
        program = end_to_end.Ours(config, steps)
        with program.opened():
            took = seconds(program)
    rate = steps * batch / took
    record.add("loader", name, images_s=round(rate, 1), waits=round(program.waits[-1], 3))


def cifar10(record: Record, limit: float) -> None:
    """Train on CIFAR-10 in the time left, a ViT-Ti/4 and then a ResNet-18, and classify by k-NN."""
    folder = Path(os.environ.get("GPU_DATA", "gpu-data"))
    images = [str(folder / name) for name in ("train.parquet", "test.parquet")] if ON_GPU else REHEARSED
    if ON_GPU and not Path(images[0]).exists():
        record.add("left out", "CIFAR-10", said=f"there is no {images[0]}")
        return
    networks = NETWORKS if limit >= 4 * SHORTEST or not ON_GPU else NETWORKS[:1]
    for arch in networks:
        minutes = limit / len(networks) * (1 - JUDGED) / 60
        with record.attempt("cifar10", arch), TemporaryDirectory() as output:
            trained(record, images, arch, minutes, output)


def trained(record: Record, images: Sequence[str], arch: str, minutes: float, output: str) -> None:
    """Train and judge one network."""
    train, test = images
    settings: dict[str, Any] = {
        "data.source": train,
        "output": output,
        "budget.epochs": None,
        "budget.minutes": minutes,
    }
    settings |= {"run.log_every": 20} if ON_GPU else SHORT
    settings |= {"model.arch": arch, "run.trackers": ()}
    config = load(PretrainConfig, ROOT / "configs/pretrain/cifar10.yaml", settings)
    took = seconds(lambda: pretrain(config, on_metrics=lambda metrics: keep(record, arch, metrics)))
    result = knn.run(KnnConfig(source=test, weights=output, train=train))
    record.add("cifar10", f"CIFAR-10, {arch}", minutes=round(took / 60, 2), knn=str(result.figure))


def keep(record: Record, arch: str, metrics: MetricsRecord) -> None:
    """Keep a record of a run, which may be killed later on."""
    values = {name: getattr(metrics, name, None) for name in KEPT}
    record.add("metrics", arch, **{name: value for name, value in values.items() if value is not None})

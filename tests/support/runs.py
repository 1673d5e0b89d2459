"""Runs of the command in real processes, which start fast: forked from one that has imported torch."""

import io
import json
import logging
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch

from dino_vit.core.storage import read_tensors

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["tests.support.forked"])

ROOT = Path(__file__).parents[2]
CPU = Path(__file__).with_name("two_cpus.yaml")

TINY = {
    "data.source": "synthetic:64:32",
    "data.batch_size": 8,
    "data.workers": 0,
    "model.arch": "null",
    "model.width": 32,
    "model.depth": 2,
    "model.heads": 2,
    "model.patch_size": 8,
    "head.prototypes": 256,
    "head.hidden_dim": 64,
    "head.bottleneck_dim": 32,
    "views.global_size": 32,
    "views.local_size": 16,
    "views.local_count": 2,
    "optim.lr": 0.03,
    "optim.warmup_epochs": 1,
    "optim.freeze_last_layer_epochs": 0.5,
    "budget.epochs": "null",
    "budget.steps": 20,
    "compute.precision": "no",
    "compute.log_every": 1,
    "compute.eval_every": "null",
    "compute.checkpoint_every": 5,
    "compute.trackers": "[]",
}

# What is left to a model of timm, at a size that it takes.
TIMM = {"model.width": "null", "model.depth": "null", "model.heads": "null", "model.patch_size": 16}
TIMM |= {"views.global_size": 64, "views.local_size": 32, "data.source": "synthetic:64:64"}
RESNET = {**TIMM, "model.arch": "timm:test_resnet"}  # with BatchNorm

# The same as values, for the functions of the package.
SETTINGS = {key: {"null": None, "[]": []}.get(str(value), value) for key, value in TINY.items()}


def arguments(output: Path, settings: Mapping[str, object] = {}) -> list[str]:
    """Return the arguments of a run of 8 steps an epoch, 20 in all, that take about a second."""
    merged = {**TINY, "output": output, **settings}
    return ["pretrain", *(f"{key}={value}" for key, value in merged.items())]


class Command:
    """A command, or a program such as eval/davis.py, in a process of its own; what it says goes to a file."""

    def __init__(
        self,
        argv: list[str],
        log: Path,
        *,
        environ: Mapping[str, str] = {},
        before: Callable[[], None] | None = None,
    ) -> None:
        self.log = log
        self.process = server.Process(target=_run, args=(argv, log, dict(environ), before))
        self.process.start()

    def wait(self, seconds: float = 900) -> int:
        """Return the exit code; that of a process ended by a signal is negative."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"the run hangs, having said:\n{self.said}")
        return self.process.exitcode

    def wait_until(self, condition: Callable[[], bool], seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self.process.exitcode is not None:
                self.process.kill()
                raise TimeoutError(f"what was waited for did not come; the run said:\n{self.said}")
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


class Run(Command):
    """A pretraining that was started."""

    started = 0

    def __init__(self, output: Path, settings: Mapping[str, object] = {}, **options: Any) -> None:
        Run.started += 1
        self.output = output
        super().__init__(
            arguments(output, settings), output.with_name(f"{output.name}.{Run.started}.log"), **options
        )


def pretrain_until(step: int, *source: object, **settings: Any) -> None:
    """Pretrain in this process, and interrupt the run after a step."""
    import dino_vit

    def stop(reading: Any) -> None:
        if reading.step == step:
            raise InterruptedError

    with suppress(InterruptedError):
        dino_vit.pretrain(*source, on_metrics=stop, **settings)


def command(log: Path, *argv: object, code: int = 0, **options: Any) -> str:
    """Run a command to the end, check the exit code and return what it said."""
    started = Command([str(argument) for argument in argv], log, **options)
    assert started.wait() == code, started.said
    return started.said


def command_here(*argv: object, code: int = 0) -> str:
    """Run a command in this process, check the exit code and return what it said."""
    from dino_vit.cli import main

    said, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(said), root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            found = main([str(argument) for argument in argv])
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert found == code, said.getvalue()
    return said.getvalue()


def run(output: Path, settings: Mapping[str, object] = {}, *, code: int = 0, **options: object) -> str:
    """Run to the end, check the exit code and return what was said."""
    started = Run(output, settings, **options)
    assert started.wait() == code, started.said
    return started.said


def _run(argv: list[str], log: Path, environ: dict[str, str], before: Callable[[], None] | None) -> None:
    import torch

    from dino_vit.cli import main

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environ)
    multiprocessing.set_start_method("fork", force=True)  # as it is in a process that nobody forked
    torch.set_num_threads(1)
    if before:
        before()
    try:
        if argv[0].endswith(".py"):
            sys.argv = argv
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        code = main(argv)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def within_step(step, action):
    """Have the loop act while it takes a step, for which all images are there."""
    import dino_vit.training.loop

    clip = dino_vit.training.loop.clip_gradients
    taken = 0

    def clip_gradients(*arguments, **keywords):
        nonlocal taken
        if taken == step:
            action()
        taken += 1
        return clip(*arguments, **keywords)

    dino_vit.training.loop.clip_gradients = clip_gradients


def signal_within_step(step, *numbers):
    """Have the process send itself signals while the loop takes a step."""

    def send():
        wait_for_checkpoints()
        for number in numbers:
            os.kill(os.getpid(), number)

    within_step(step, send)


def wait_for_checkpoints():
    """Wait until this process writes no checkpoint, so that a kill always finds the same on the disk."""
    import gc

    from dino_vit.core.checkpoint import BackgroundWriter

    for writer in gc.get_objects():
        if type(writer) is BackgroundWriter and writer._writing:  # isinstance asks weak proxies too
            writer._writing.exception()


def limit_files(size: int) -> None:
    """Have files of this process be no larger, which stands in for a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def assert_same_end(output: Path, other: Path, step: int) -> None:
    """Check that the records of two runs and their checkpoints of a step are the same bit for bit."""
    torch.testing.assert_close(tensors(output, step), tensors(other, step), rtol=0, atol=0)
    assert history(output) == history(other)


def assert_same_readings(output: Path, other: Path, *keys: str, atol: float = 1e-5, rtol: float = 1e-4):
    """Check that the records of two runs have the same readings, up to rounding."""
    lines = history(output), history(other)
    ours, theirs = ({key: [line[key] for line in record] for key in keys} for record in lines)
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


def history(output: Path) -> list[dict[str, object]]:
    """Return the lines of metrics.jsonl, the terms among the others, without what depends on the clock."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["images_per_second"], line["data_wait"]
        line |= line.pop("terms")
    return lines


def reported(output: Path) -> int:
    """Return the step that a run that logs each one has reported last."""
    path = output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def tensors(output: Path, step: int) -> dict[str, object]:
    return read_tensors(output / "checkpoints" / f"step-{step:08d}.safetensors")[0]


def steps(output: Path) -> list[int]:
    """Return the steps of the checkpoints."""
    return sorted(int(path.stem[5:]) for path in (output / "checkpoints").glob("*.safetensors"))


def save_and_fail(save: Callable[..., None]) -> Callable[..., None]:
    """Return a function that saves a checkpoint and then fails."""

    def save_then_fail(*arguments: object) -> None:
        save(*arguments)
        raise OSError("the disk is full")

    return save_then_fail

"""The programs that `make bench` runs on a GPU, rehearsed: they run through, whatever they measure."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import attention, backbone, end_to_end, knn, objective, scaling, step
from tests.support.rehearsal import CUDA, OnGpu, Rehearsal
from tests.support.runs import SETTINGS as TINY

NAMES = {path.stem for path in Path(bench.__file__).parent.glob("*.py")} - set(bench.LONG)
PROGRAMS = sorted(name for name in NAMES if bench.on_cuda(name))
ROOT = Path(bench.__file__).parents[1]
SMALL = {key: value for key, value in TINY.items() if key.startswith(("model.", "head.", "views."))}
SMALL |= {"model.depth": 1}
CUDA_FUNCTIONS = ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that says nothing of its memory."""
    for name in CUDA_FUNCTIONS:
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: 0)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: None)
    for program in (step, end_to_end):
        monkeypatch.setattr(program, "start_processes", OnGpu)
    monkeypatch.setattr(end_to_end, "here", lambda: CUDA)
    monkeypatch.setattr(attention, "CALLS", 1)
    monkeypatch.setattr(step, "peak_memory", lambda *_, **__: 1.0)
    monkeypatch.setattr(step, "matrix_share", lambda *_: "1 TFLOP/s")  # by hooks of PyTorch's own engine
    monkeypatch.setattr(knn, "check", lambda _: "")  # it reads values
    with Rehearsal(answers=True):
        yield CUDA


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_takes_what_it_is_called_with(name, monkeypatch, capsys):
    called = ["--repeats", "1", "--threads", "1", "--out", "x.json"]
    monkeypatch.setattr("sys.argv", [name, *called, "--unknown"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(Path(bench.__file__).with_name(f"{name}.py")), run_name="__main__")
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --unknown\n")


@pytest.mark.slow
def test_a_row_of_each_kind(gpu):
    row, _ = step.measure(step.Case(2, "bf16", SMALL), repeats=1)
    assert row.speed.keys() == row.memory.keys() == {"dino_vit", "reference"}
    assert attention.measure("cuda", torch.bfloat16, True, 37, repeats=1).speed["attend"] > 0
    assert knn.measure(600, 20, 1, gpu)[0].speed["dino_vit"] > 0
    assert scaling.measure_step("small", SMALL, repeats=1).speed["dino_vit"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", objective.NAMES[:2])
def test_steps_of_both_methods(gpu, name):
    settings = objective.DINOV2 if name == objective.NAMES[0] else {}
    objective.build(name, step.Case(2, "bf16", {**SMALL, **settings}), gpu)()


@pytest.mark.slow
@pytest.mark.parametrize("name", backbone.CONTENDERS)
@pytest.mark.parametrize("train", [False, True])
def test_backbones(gpu, name, train):
    for precision in ("float32", "bf16") if train else ("float32", "bf16", "bf16 weights"):
        backbone.build_work(name, backbone.Case(96, 2, train, precision, "cuda"))()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")  # lightly's head
def test_the_whole_program(gpu):
    row, said = end_to_end.measure(end_to_end.Case("small", 40, 2, 2, SMALL), repeats=1, workers=0)
    assert row.speed["dino_vit"] > 0
    assert "waits for data" in said


@pytest.mark.slow
def test_the_tests_of_make_test_gpu_run(tmp_path):
    """On a CPU, without the compiler's minutes: what is left to fail on a GPU is the GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"]
    environ = {**os.environ, "TEST_GPU_ON": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    command += ["--basetemp", str(tmp_path / "runs")]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

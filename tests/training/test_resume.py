"""A run that was interrupted anywhere goes on as if nothing had been."""

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import fields
from functools import partial

import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.storage import StorageError
from dino_vit.reports.metrics import START_ADAPTER, Baseline, read_records
from dino_vit.training.loop import finish_save
from dino_vit.training.reporter import Reporter
from tests.support.runs import (
    RESNET,
    Run,
    assert_same_end,
    history,
    limit_files,
    run,
    signal_within_step,
    steps,
)
from tests.support.training import assert_resumes_exactly, opened, trained


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 20 steps that nobody interrupts."""
    output = tmp_path_factory.mktemp("whole") / "run"
    run(output)
    return output


def signalled(*numbers):
    return partial(signal_within_step, 13, *numbers)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The same run, stopped by SIGTERM at step 14."""
    output = tmp_path_factory.mktemp("stopped") / "run"
    said = run(output, code=75, before=signalled(signal.SIGTERM))
    assert "saved at step 14" in said
    assert steps(output) == [10, 14]
    assert [metrics["step"] for metrics in history(output)] == list(range(1, 15))
    return output


@pytest.fixture
def output(stopped, tmp_path):
    """A copy of the stopped run, under its own name."""
    return shutil.copytree(stopped, tmp_path / "run")


def test_stopped_in_an_epoch_and_resumed_is_bit_for_bit_the_same(output, whole):
    assert "resuming after step 14" in run(output)
    assert_same_end(output, whole, 20)
    assert "all 20 steps were taken before; a larger budget with compute.resume=changed goes on" in run(
        output
    )


def test_killed_and_resumed_is_bit_for_bit_the_same(tmp_path, whole):
    """A kill loses the steps since a checkpoint."""
    output, settings = tmp_path / "run", {"data.workers": 2}
    run(output, settings, code=-signal.SIGKILL, before=signalled(signal.SIGKILL))
    assert steps(output) == [5, 10]
    assert [metrics["step"] for metrics in history(output)] == list(range(1, 14))
    assert "resuming after step 10" in run(output, settings)
    assert_same_end(output, whole, 20)


def test_ctrl_c_twice_leaves_at_once(tmp_path):
    said = run(tmp_path / "run", code=130, before=signalled(signal.SIGINT, signal.SIGINT))
    assert steps(tmp_path / "run") == [5, 10]
    assert said.endswith("dino-vit pretrain: interrupted\n")
    assert "Traceback" not in said
    assert said.count("ctrl-C again") == 1


def members(group):
    """Say of each process of a group whether it is running; one that only waits for its parent is not."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return ["ended" if state.startswith("Z") else "running" for number, state in rows if int(number) == group]


@pytest.mark.parametrize(
    ("send", "number", "code", "seconds"),
    [
        (os.killpg, signal.SIGTERM, 75, 0),  # as SLURM and systemd send it, and a terminal sends ctrl-C
        (os.kill, signal.SIGKILL, -signal.SIGKILL, 300),  # loader processes look for it from time to time
    ],
)
def test_nothing_stays_of_a_run_that_was_interrupted(tmp_path, send, number, code, seconds):
    """Loader processes end with it and not before it."""
    settings = {"data.workers": 2, "budget.steps": 100_000}
    started = Run(tmp_path / "run", settings, before=os.setsid)
    started.wait_until(lambda: steps(tmp_path / "run"))
    group = started.process.pid
    assert members(group).count("running") >= 3
    send(group, number)
    assert started.wait() == code, started.said
    if number != signal.SIGKILL:  # then a worker may be cut off while it hands over a batch
        assert "Traceback" not in started.said
    end = time.monotonic() + seconds
    while "running" in members(group) and time.monotonic() < end:
        time.sleep(0.05)
    assert "running" not in members(group)


SHORT = {"optim.warmup_epochs": 0, "compute.keep_every": 5}


def test_damaged_files_are_said_and_the_checkpoint_before_is_taken(output, whole):
    newest = output / "checkpoints" / "step-00000014.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1000])
    (output / "config.yaml").write_bytes(b"\xff")  # a damaged one is replaced
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}\n{"step": 14, "loss": "low"}\n{"step": 14, "lo')
    with (output / "starts.jsonl").open("a") as file:
        file.write('{"step": 14, "beg')
    said = run(output)
    assert said.count("damaged lines are left out") == 1
    assert "skipped a checkpoint" in said
    assert "step-00000014.safetensors is" in said
    assert "resuming after step 10" in said
    assert load(PretrainConfig, output / "config.yaml", []).output == str(output)
    assert [start.step for start in read_records(output / "starts.jsonl", START_ADAPTER)] == [0, 10]
    assert steps(output) == [15, 20]
    assert_same_end(output, whole, 20)


def test_a_full_disk_is_said_and_leaves_the_last_good_checkpoint(output, whole):
    """A limit on the size of files stands in for the full disk."""
    good = {path: path.read_bytes() for path in (output / "checkpoints").iterdir()}
    said = run(output, code=2, before=partial(limit_files, 8_000))
    assert "the record could not be written" in said
    assert "step 15: no checkpoint was written" in said
    assert "its last checkpoint could not be written: " in said
    assert "Free disk space for it and run the same command again" in said
    assert {path: path.read_bytes() for path in (output / "checkpoints").iterdir()} == good
    run(output)
    assert_same_end(output, whole, 20)


def test_only_a_best_that_was_written_counts(tmp_path, monkeypatch):
    """Of four in a row, the second and the last cannot be written, each while the next one is evaluated."""
    state = opened(tmp_path / "run", SHORT)
    save = state.checkpoints.save

    def full_at_times(step, *arguments):
        if step in (2, 4):
            raise StorageError("no space")
        return save(step, *arguments)

    monkeypatch.setattr(state.checkpoints, "save", full_at_times)
    with Reporter(state) as reporter:
        for step in (1, 2, 3, 4):
            state.step, state.evaluations.best = step, {"figure": "knn", "value": 30.0 + step, "step": step}
            finish_save(state, reporter, wait=True)
            state.begin_save()
        finish_save(state, reporter, wait=True)
    assert state.evaluations.best["step"] == 3
    assert steps(tmp_path / "run") == [1, 3]


def test_the_settings_of_a_run_resume_it_wherever_it_lies(tmp_path):
    trained(tmp_path / "run", {"budget.steps": 5, **SHORT})
    trained(tmp_path / "run", {"budget.steps": 10, "compute.resume": "changed", **SHORT})
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    config = load(PretrainConfig, moved / "config.yaml", [])
    assert (config.output, config.compute.resume) == (str(moved), "same")


ROTARY = {"model.positions": "rotary", "views.local_size": 24}
PATCHES = {"loss.patch_weight": 1, "views.global_size": 48, "loss.koleo_weight": 0.1}
ALL_TERMS = {**PATCHES, "loss.centering": "sinkhorn_ema", "head.shared": "false", "data.workers": 2}
ALL_TERMS["loss.edge_weight"] = 2


@pytest.mark.parametrize(
    "settings",
    [
        {**ALL_TERMS, "model.drop_path": 0.1},
        {**ROTARY, "model.registers": 2},
        {**RESNET, "loss.koleo_weight": 0.1},
        pytest.param({**ROTARY, "compute.compile": "true"}, marks=pytest.mark.slow),
    ],
    ids=["dinov2", "rotary", "timm", "compiled"],
)
def test_a_run_resumes_exactly(tmp_path, settings):
    assert_resumes_exactly(tmp_path, settings)


def test_a_run_resumes_exactly_between_two_records(tmp_path):
    """Its starts are recorded, and the figures from before the first step stay as they were."""
    settings = {
        "compute.precision": "bf16",
        "data.batch_size": 4,
        "optim.accumulate": 2,
        "model.patch_drop": 0.5,
        "budget.steps": 20,
    }
    assert_resumes_exactly(tmp_path, {**settings, "compute.log_every": 4, "compute.eval_every": 1}, step=12)
    baseline, uninterrupted = ((tmp_path / name / "baseline.json").read_bytes() for name in ("run", "whole"))
    assert baseline == uninterrupted
    assert set(json.loads(baseline)) == {field.name for field in fields(Baseline)}
    first, second = read_records(tmp_path / "run" / "starts.jsonl", START_ADAPTER)
    assert (first.step, first.global_batch, first.images, first.total_steps) == (0, 8, 64, 20)
    assert first.began <= second.began

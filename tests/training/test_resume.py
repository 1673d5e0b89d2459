"""A run that was interrupted anywhere goes on as if nothing had been."""

import json
import os
import signal
import subprocess
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.training.readings import START, Baseline, read_records
from tests.support.runs import (
    Run,
    assert_same_end,
    kill_a_loader,
    limit_files,
    readings,
    run,
    signal_within_step,
    steps,
    within_step,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 20 steps that nobody interrupts."""
    output = tmp_path_factory.mktemp("whole") / "run"
    run(output)
    return output


def signalled(*numbers):
    return partial(signal_within_step, 13, *numbers)


@pytest.mark.parametrize(
    ("number", "workers", "code", "last"),
    [
        (signal.SIGKILL, 0, -signal.SIGKILL, 10),
        (signal.SIGKILL, 2, -signal.SIGKILL, 10),
        (signal.SIGTERM, 0, 75, 14),
        (signal.SIGUSR1, 0, 75, 14),
        (signal.SIGINT, 0, 130, 14),
    ],
)
def test_interrupted_in_an_epoch_and_resumed_is_bit_for_bit_the_same(
    tmp_path, whole, number, workers, code, last
):
    """A kill loses the steps since a checkpoint; the other signals save after the step."""
    output, settings = tmp_path / "run", {"data.workers": workers}
    said = run(output, settings, code=code, before=signalled(number))
    assert ("saved at step 14" in said) == (last == 14)
    assert steps(output)[-1] == last
    assert len(steps(output)) == 2
    assert [reading["step"] for reading in readings(output)] == list(range(1, max(13, last) + 1))
    assert f"resuming after step {last}" in run(output, settings)
    assert_same_end(output, whole, 20)


@pytest.mark.parametrize("settings", [{}, {"data.batch_size": 4, "optim.accumulate": 2}], ids=["one", "two"])
def test_a_killed_loader_process_costs_no_step(tmp_path, whole, settings):
    """As the system kills it when memory runs out, here in a step of one pass and of two."""
    output, settings = tmp_path / "run", {"data.workers": 2, **settings}
    said = run(output, settings, code=75, before=partial(within_step, 13, kill_a_loader))
    assert "ended by SIGKILL, probably because memory ran out: use fewer workers (now 2)" in said
    assert f"saved at step {steps(output)[-1]}; run the same command to resume" in said
    assert "Traceback" not in said
    assert steps(output)[-1] in range(14, 20)
    run(output, settings)
    if "optim.accumulate" in settings:
        whole = tmp_path / "whole"
        run(whole, settings)
    assert_same_end(output, whole, 20)


@pytest.mark.parametrize("place", ["open_source", "build_networks"])
def test_a_signal_before_the_first_step_asks_for_another_start_too(tmp_path, place):
    said = run(tmp_path / "run", code=75, before=partial(signal_at, place))
    assert said.endswith("dino-vit pretrain: stopped; run the same command again\n")
    run(tmp_path / "run")


def signal_at(place):
    import dino_vit.training.setup

    take = getattr(dino_vit.training.setup, place)

    def signalled(*arguments, **keywords):
        os.kill(os.getpid(), signal.SIGTERM)
        return take(*arguments, **keywords)

    setattr(dino_vit.training.setup, place, signalled)


def test_the_readings_after_a_resume_are_those_of_a_whole_run(tmp_path):
    """A checkpoint between two log lines holds what was summed since the first of them."""
    settings = {"run.log_every": 4}
    run(tmp_path / "whole", settings)
    run(tmp_path / "run", settings, code=-signal.SIGKILL, before=signalled(signal.SIGKILL))
    assert "resuming after step 10" in run(tmp_path / "run", settings)
    assert_same_end(tmp_path / "run", tmp_path / "whole", 20)


def test_a_resumed_run_adds_its_start_and_keeps_what_was_before_the_first_step(tmp_path):
    output = tmp_path / "run"
    evaluated = {"run.eval_every": 1, "data.batch_size": 16, "optim.warmup_epochs": 0}
    run(output, evaluated, code=75, before=signalled(signal.SIGTERM))
    baseline = (output / "baseline.json").read_bytes()
    assert set(json.loads(baseline)) == {field.name for field in fields(Baseline)}
    run(output, evaluated)
    starts = read_records(output / "starts.jsonl", START)
    assert [start.step for start in starts] == [0, 14]
    assert (starts[0].global_batch, starts[0].images, starts[0].total_steps) == (16, 64, 20)
    assert starts[0].began <= starts[1].began
    assert (output / "baseline.json").read_bytes() == baseline


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    first = Run(tmp_path / "run", {"budget.steps": 100_000})
    first.wait_until(lambda: steps(tmp_path / "run"))
    said = run(tmp_path / "run", {"budget.steps": 100_000}, code=2)
    assert f"another run is using {tmp_path / 'run'} (process {first.process.pid} on " in said
    first.send(signal.SIGTERM)
    assert first.wait() == 75


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


def shared_memory():
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this system")
@pytest.mark.parametrize(
    ("send", "number", "code", "seconds"),
    [
        (os.killpg, signal.SIGTERM, 75, 0),  # as SLURM and systemd send it, and a terminal sends ctrl-C
        (os.kill, signal.SIGINT, 130, 5),
        (os.kill, signal.SIGKILL, -signal.SIGKILL, 30),  # loader processes look for it from time to time
    ],
)
def test_nothing_stays_of_a_run_that_was_interrupted(tmp_path, send, number, code, seconds):
    """Loader processes end with it and not before it, and shared memory is given back."""
    before = shared_memory()
    settings = {"data.workers": 2, "budget.steps": 100_000, "data.photometry": "worker"}
    started = Run(tmp_path / "run", settings, before=os.setsid)
    started.wait_until(lambda: steps(tmp_path / "run"))
    group = started.process.pid
    assert members(group).count("running") >= 3
    send(group, number)
    assert started.wait() == code, started.said
    assert "Traceback" not in started.said
    end = time.monotonic() + seconds
    while "running" in members(group) and time.monotonic() < end:
        time.sleep(0.05)
    assert "running" not in members(group)
    assert shared_memory() <= before


def test_lines_that_are_no_readings_are_left_out_by_a_resume(tmp_path, whole):
    output = tmp_path / "run"
    run(output, code=75, before=signalled(signal.SIGTERM))
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}\n{"step": 14, "loss": "low"}\n{"step": 14, "lo')
    with (output / "starts.jsonl").open("a") as file:
        file.write('{"step": 14, "beg')
    assert run(output).count("damaged lines are left out") == 1
    assert_same_end(output, whole, 20)
    assert [start.step for start in read_records(output / "starts.jsonl", START)] == [0, 14]


SHORT = {"optim.warmup_epochs": 0, "run.keep_every": 5}


def test_a_changed_setting_is_refused_unless_it_is_asked_for(tmp_path, whole):
    output = tmp_path / "run"
    run(output, {"budget.steps": 5, **SHORT})
    said = run(output, {"optim.lr": 0.02, **SHORT}, code=2)
    assert "holds a run at step 5 with other settings" in said
    assert "optim.lr was 0.03 and is 0.02" in said
    assert "budget.steps was 5 and is 20" in said
    assert "run.resume=changed" in said
    assert "Traceback" not in said
    said = run(output, {"run.resume": "never", "budget.steps": 5, **SHORT}, code=2)
    assert "run.resume=never does not overwrite it" in said
    said = run(output, {"model.width": 64, "run.resume": "changed", **SHORT}, code=2)
    assert "is of another network or optimiser" in said
    said = run(output, {"data.source": "synthetic:72:32", **SHORT}, code=2)
    assert "the images of synthetic:72:32 have changed" in said
    assert steps(output) == [5]
    assert "resuming after step 5" in run(output, {"optim.lr": 0.02, "run.resume": "changed", **SHORT})
    assert steps(output) == [5, 10, 15, 20]


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"head.batch_norm": "true"}, "BatchNorm"),
        ({"loss.centring": "sinkhorn"}, "Sinkhorn-Knopp"),
        ({"loss.koleo_weight": 0.1}, "KoLeo"),
    ],
    ids=["batch norm", "sinkhorn", "koleo"],
)
def test_the_batch_of_the_statistics_is_kept(tmp_path, setting, name):
    """The global batch may be made up in another way, unless something looks at all images of a pass."""
    settings = {**setting, "budget.steps": 5, **SHORT}
    run(tmp_path / "run", settings)
    said = run(tmp_path / "run", {**settings, "data.batch_size": 4}, code=2)
    assert f"{name} used 8 images per forward pass and would now use 4 (data.batch_size=4 on 1 proc" in said


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_is_taken(tmp_path, whole):
    output = tmp_path / "run"
    run(output, code=75, before=signalled(signal.SIGTERM))
    newest = output / "checkpoints" / "step-00000014.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1000])
    (output / "config.yaml").write_bytes(b"\xff")  # a damaged one is replaced
    said = run(output)
    assert load(PretrainConfig, output / "config.yaml", []).output == str(output)
    assert "skipped a checkpoint" in said
    assert "step-00000014.safetensors is" in said
    assert "resuming after step 10" in said
    assert steps(output) == [15, 20]
    assert_same_end(output, whole, 20)


@pytest.mark.parametrize("size", [8_000, 20_000], ids=["nothing", "readings"])
def test_a_full_disk_is_said_and_leaves_the_last_good_checkpoint(tmp_path, whole, size):
    """A limit on the size of files stands in for the full disk."""
    output = tmp_path / "run"
    run(output, code=75, before=signalled(signal.SIGTERM))
    good = {path: path.read_bytes() for path in (output / "checkpoints").iterdir()}
    said = run(output, code=2, before=partial(limit_files, size))
    assert ("the reading could not be written" in said) == (size == 8_000)
    assert "step 15: no checkpoint was written" in said
    assert "its last checkpoint could not be written: " in said
    assert "Free disk space for it and run the same command again" in said
    assert {path: path.read_bytes() for path in (output / "checkpoints").iterdir()} == good
    run(output)
    assert_same_end(output, whole, 20)

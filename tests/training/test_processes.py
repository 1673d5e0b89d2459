"""Two processes are one run: the same images, losses and teacher as one process with twice the batch."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from torch.testing import assert_close

from dino_vit.core import checkpoint
from tests.support.processes import finish, free_port, pair, run_in_two, torchrun_environs
from tests.support.runs import (
    Run,
    arguments,
    assert_same_end,
    assert_same_readings,
    history,
    run,
    signal_within_step,
    steps,
    tensors,
    within_step,
)
from tests.support.training import opened

# Stochastic depth is drawn on each process for its own images.
SETTINGS = {"budget.steps": 10, "model.drop_path": 0}
ONE = {**SETTINGS, "data.batch_size": 16}
TWO = {**SETTINGS, "data.batch_size": 8}
LIMIT = {"compute.peer_timeout": 0.05}  # 3 seconds


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    output = tmp_path_factory.mktemp("alone") / "run"
    run(output, ONE)
    return output


def assert_follows(output, alone):
    found = history(output)
    assert [line["step"] for line in found] == list(range(1, 11))
    assert [line["rows"] for line in found] == [32] * 10
    keys = "loss", "gradient_norm", "mean_output_entropy", "output_entropy", "student_divergence"
    assert_same_readings(output, alone, *keys)


@pytest.mark.slow  # as that of `accelerate launch` is: tests/project/test_readme_walk.py
def test_torchrun_follows_one_process(tmp_path, alone):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command = [*launcher, free_port(), "-m", "dino_vit", *arguments(tmp_path / "run", TWO)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=900)
    assert_follows(tmp_path / "run", alone)


def test_two_processes_follow_one(tmp_path, alone):
    output = tmp_path / "run"
    first, second = finish(pair(output, TWO, torchrun_environs()))
    assert "2 processes on cpu" in first
    assert "global batch 16" in first
    assert first.count("saved:") == 1
    said = [line for line in second.splitlines() if not line.startswith("[Gloo]")]  # torch 2.10
    assert said == [], "only the first process speaks"
    assert_follows(output, alone)


def test_a_signal_to_one_process_takes_both_and_one_process_goes_on(tmp_path, alone):
    """Both leave after the step that follows the signal; the global batch stays, in two passes, and so do the
    images and the losses.
    """
    output, stopped = tmp_path / "run", partial(signal_within_step, 2, signal.SIGTERM)
    finish(pair(output, TWO, torchrun_environs(), before=(None, stopped)), 75)
    assert steps(output) == [4]
    said = run(output, TWO)
    assert "resuming after step 4" in said
    assert "optim.accumulate=2: keeps the global batch of 16" in said
    assert_same_readings(output, alone, "loss", "gradient_norm")
    assert_close(tensors(output, 10), tensors(alone, 10), atol=1e-4, rtol=1e-3)


def test_a_process_that_fails_says_why_and_the_other_that_it_is_alone(tmp_path):
    """In the middle of a step, where the other waits in a collective."""
    failing = partial(within_step, 3, partial(fail_with, "no space left"))
    failed, other = pair(tmp_path / "run", TWO, torchrun_environs(), before=(failing, None))
    assert failed.wait() == 2
    assert "dino-vit pretrain: no space left" in failed.said
    assert other.wait() == 1
    assert other.said.splitlines()[-1].startswith("dino-vit pretrain: another process of this run has ended")
    assert "Traceback" not in other.said


def test_a_process_that_does_not_answer_ends_the_other_and_both_go_on_bit_for_bit(tmp_path):
    """Stopped as by a machine that hangs, in a step after one with a checkpoint; it ends when it goes on."""
    output, settings = tmp_path / "run", {**TWO, "compute.checkpoint_every": 3}
    stopped = partial(signal_within_step, 4, signal.SIGSTOP)
    other, victim = pair(output, {**settings, **LIMIT}, torchrun_environs(), before=(None, stopped))
    assert other.wait() == 75
    last = other.said.splitlines()[-1]
    text = "dino-vit pretrain: Timed out waiting for another rank (compute.peer_timeout)"
    assert last == f"{text}; run the same command again"
    victim.send(signal.SIGCONT)
    assert victim.wait() in (1, 75)  # it finds that the other has ended, or that it waited too long itself
    assert steps(output) == [3]
    run_in_two(output, settings)
    run_in_two(tmp_path / "whole", settings)
    assert_same_end(output, tmp_path / "whole", 10)


def test_a_first_step_that_takes_long_is_waited_for(tmp_path):
    """As with hosts that compile, or read their images, at different speeds."""
    settings = {**TWO, **LIMIT, "budget.steps": 4, "optim.warmup_epochs": 0.5}
    slow = partial(within_step, 0, partial(time.sleep, 5))
    finish(pair(tmp_path / "run", settings, torchrun_environs(), before=(slow, None)))


def fail_with(text):
    raise OSError(text)


def test_a_batch_that_processes_cannot_make_up_is_refused(alone):
    with pytest.raises(ValueError, match="its global batch was 16, which is not a multiple of 6"):
        opened(alone, {**ONE, "data.batch_size": 6})


def test_one_process_reads_the_checkpoint_and_others_need_not_see_the_folder(tmp_path):
    settings = {**TWO, "optim.warmup_epochs": 0}
    run(tmp_path / "one", {**settings, "data.batch_size": 16, "budget.steps": 3})
    hashed = [partial(note_hashed, tmp_path / f"hashed{rank}") for rank in "01"]
    started = [
        Run(tmp_path / folder, {**settings, "compute.resume": "changed"}, environ=environ, before=note)
        for folder, environ, note in zip(("one", "two"), torchrun_environs(), hashed, strict=True)
    ]
    assert "resuming after step 3" in finish(started)[0]
    read = [(tmp_path / f"hashed{rank}").exists() for rank in "01"]
    assert read == [True, False]
    assert not (tmp_path / "two").exists()


def note_hashed(path):
    """Have the process note that it reads tensors of a file."""
    read_tensors = checkpoint.read_tensors

    def read_and_note(*arguments):
        path.touch()
        return read_tensors(*arguments)

    checkpoint.read_tensors = read_and_note

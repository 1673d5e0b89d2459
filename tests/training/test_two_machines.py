"""A run over two machines, one of which fails: both sides end, and the same command ends as a whole run.

Or torchrun starts both sides again. In the end records and checkpoints are the same bit for bit.
"""

import os
import shutil
import signal
import time

import pytest

from tests.support.images import write_synthetic
from tests.support.machines import VARIABLES, accelerate, restarting, torchrun, two_machines
from tests.support.runs import ROOT, arguments, assert_same_end, reported

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("ip") or os.geteuid(), reason="needs root on Linux and iproute2"),
]
LIMIT = 12  # seconds of compute.peer_timeout
STEPS, HURT = 240, 100  # of a run, and when something happens
PATIENCE = 600  # seconds until a run that neither goes on nor ends is a failure
IMAGES, DAY = 64, 86_400
SETTINGS = {"data.workers": 1, "data.keep_decoded": "false"}
SETTINGS |= {"budget.steps": STEPS, "compute.checkpoint_every": 40, "compute.peer_timeout": LIMIT / 60}


class Trial:
    """A run over two machines, to which something happens."""

    def __init__(self, machines, folder, images, launcher):
        self.machines, self.folder, self.launcher = machines, folder, launcher
        self.output = folder / "run"
        self.arguments = arguments(self.output, {**SETTINGS, "data.source": images})[1:]

    def start(self):
        """Start both sides by the same command, or go on."""
        for machine in self.machines:
            command = [*self.launcher(machine.number), str(ROOT / "launch" / "pretrain.py"), *self.arguments]
            machine.start(command, self.folder / f"{machine.number}.log")

    def wait(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                said = "\n".join(machine.log.read_text()[-3000:] for machine in self.machines)
                raise TimeoutError(f"what was waited for did not come; the run said:\n{said}")
            time.sleep(0.05)

    def hurt(self, fault):
        """Start the run, and let something happen to it in the middle."""
        self.start()
        self.wait(lambda: reported(self.output) >= HURT or any(machine.ended for machine in self.machines))
        fault()

    def end(self, code):
        """Wait for the end of both sides."""
        self.wait(lambda: all(machine.ended for machine in self.machines))
        for machine in self.machines:
            assert machine.process.returncode == code, machine.log.read_text()

    def go_on(self, whole):
        """Start both sides again, or see torchrun do it."""
        if all(machine.ended for machine in self.machines):
            self.start()
        self.end(0)
        assert_same_end(self.output, whole, STEPS)


@pytest.fixture(scope="module")
def machines():
    with two_machines() as machines:
        yield machines


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number in range(IMAGES):
        write_synthetic(folder / f"{number:03d}.png", number)
    return folder


@pytest.fixture(scope="module")
def whole(machines, images, tmp_path_factory):
    trial = Trial(machines, tmp_path_factory.mktemp("whole"), images, torchrun)
    trial.start()
    trial.end(0)
    return trial.output


@pytest.fixture
def trial(machines, images, tmp_path):
    trial = Trial(machines, tmp_path, images, torchrun)
    yield trial
    for machine in machines:
        machine.send(signal.SIGKILL)
        machine.cut("up")
        machine.variables = dict(VARIABLES)


@pytest.mark.parametrize("launcher", [accelerate, torchrun])
def test_a_link_that_is_cut_ends_both_sides(trial, whole, launcher):
    trial.launcher, second = launcher, trial.machines[1]
    trial.hurt(second.cut)
    trial.end(1)
    assert all("compute.peer_timeout" in machine.sentence for machine in trial.machines)
    second.cut("up")
    trial.go_on(whole)


@pytest.mark.parametrize(("launcher", "number"), [(accelerate, 0), (torchrun, 1)])
def test_a_machine_that_is_stopped_ends_the_other(trial, whole, launcher, number):
    trial.launcher = launcher
    stopped, other = trial.machines[number], trial.machines[1 - number]
    trial.hurt(lambda: stopped.send(signal.SIGSTOP))
    trial.wait(lambda: other.ended)
    assert "compute.peer_timeout" in other.sentence
    stopped.send(signal.SIGCONT)
    trial.end(1)
    trial.go_on(whole)


def test_images_that_one_machine_loses_end_both_sides(trial, whole, images):
    second = trial.machines[1]
    trial.hurt(lambda: second.mount("-t", "tmpfs", "none", str(images)))
    trial.end(1)
    assert "cannot be read" in second.sentence
    trial.go_on(whole)


def test_an_output_that_cannot_be_written_any_more_ends_both_sides(trial, whole):
    first, output = trial.machines[0], str(trial.output)

    def make_read_only():
        first.mount("--bind", output, output)
        first.mount("-o", "remount,bind,ro", output)

    trial.hurt(make_read_only)
    trial.wait(lambda: all(machine.ended for machine in trial.machines))
    assert "Read-only file system" in first.log.read_text()
    trial.go_on(whole)


@pytest.mark.parametrize("number", [0, 1])
def test_torchrun_starts_both_sides_again_when_a_process_is_killed(trial, whole, number):
    trial.launcher = restarting
    trial.hurt(trial.machines[number].kill_process)
    trial.go_on(whole)


def test_torchrun_starts_both_sides_again_after_a_link_was_cut_for_a_while(trial, whole):
    trial.launcher, second = restarting, trial.machines[1]

    def cut_for_a_while():
        second.cut()
        time.sleep(2 * LIMIT)
        second.cut("up")

    trial.hurt(cut_for_a_while)
    trial.go_on(whole)


@pytest.mark.parametrize(("launcher", "number", "seconds"), [(accelerate, 1, DAY), (restarting, 0, -DAY)])
def test_a_wall_clock_that_jumps_changes_nothing(trial, whole, launcher, number, seconds):
    trial.launcher = launcher
    for machine in trial.machines:
        machine.give_clock(trial.folder)
    trial.hurt(lambda: trial.machines[number].jump(seconds))
    trial.go_on(whole)

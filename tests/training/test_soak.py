"""A run that is killed anywhere ends as one that is left alone, and memory does not grow with steps."""

import os
import random
import signal
from pathlib import Path
from statistics import median

import pytest

from tests.support.runs import Run, assert_same_end, reported, run

pytestmark = pytest.mark.slow
STEPS, KILLS = 800, 4
SETTINGS = {
    "budget.steps": STEPS,
    "data.workers": 1,
    "compute.checkpoint_every": 25,
}


def test_killed_at_random_and_resumed_is_bit_for_bit_the_same(tmp_path):
    chance = random.Random(0)
    for step in sorted(chance.randrange(STEPS * 9 // 10) for _ in range(KILLS)):
        killed = Run(tmp_path / "killed", SETTINGS, before=os.setsid)
        killed.wait_until(lambda run=killed.process.pid: os.getpgid(run) == run)  # os.setsid was called
        killed.wait_until(lambda step=step: reported(tmp_path / "killed") >= step)
        os.killpg(killed.process.pid, signal.SIGKILL)  # its loader processes too, and whatever it writes
        assert killed.wait() == -signal.SIGKILL
    run(tmp_path / "killed", SETTINGS)
    run(tmp_path / "left", SETTINGS)
    assert_same_end(tmp_path / "killed", tmp_path / "left", STEPS)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_memory_does_not_grow_with_steps(tmp_path):
    started, samples = Run(tmp_path / "run", SETTINGS), []
    for step in range(20, STEPS - 20, 10):
        started.wait_until(lambda step=step: reported(tmp_path / "run") >= step)
        samples.append(sum(map(private_kilobytes, family(started.process.pid))))
    assert started.wait() == 0, started.said
    tenth = len(samples) // 10
    early, late = median(samples[tenth : 2 * tenth]), median(samples[-tenth:])
    assert late < 1.03 * early


def family(pid):
    """Return a process, those that it started, and so on."""
    pids = [pid]
    for parent in pids:
        pids += [
            int(child)
            for path in Path(f"/proc/{parent}/task").glob("*/children")
            for child in path.read_text().split()
        ]
    return pids


def private_kilobytes(pid):
    """Return the memory of a process that is no file's; those of libraries depend on who else maps them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

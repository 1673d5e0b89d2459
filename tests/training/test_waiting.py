"""A run that waits for images says once what an image takes, and what to do."""

import contextlib
import re
from dataclasses import replace

import pytest

from dino_vit.training.diagnosis import PATIENCE, WAITING, begins_to_wait
from dino_vit.training.loop import take_step
from dino_vit.training.reporter import Reporter
from tests.support.readings import HEALTHY
from tests.support.training import opened


def readings(*shares):
    return [replace(HEALTHY, step=5 * n, data_wait=share) for n, share in enumerate(shares, start=1)]


@pytest.mark.parametrize(
    ("shares", "at"),
    [
        ([0.5] * 20, PATIENCE + 1),  # the first reading does not count
        ([0.9] + [0.0] * 9, None),
        (
            [0.0, *[0.5] * (PATIENCE - 1), WAITING, *[0.5] * PATIENCE, 0.0, *[0.5] * PATIENCE],
            2 * PATIENCE + 1,
        ),
        ([0.0] * 9 + [0.21] * PATIENCE + [0.1], 9 + PATIENCE),
        ([float("nan")] * 9, None),
    ],
)
def test_only_the_first_readings_in_a_row_that_wait_get_advice(shares, at):
    found = readings(*shares)
    assert [n for n in range(1, len(found) + 1) if begins_to_wait(found[:n])] == ([at] if at else [])


@pytest.mark.parametrize("workers", [0, 1])
def test_it_is_said_once_in_a_run_with_what_was_measured(tmp_path, capsys, caplog, workers):
    caplog.set_level("INFO", "dino_vit")  # at which a run shows its lines
    waiting = readings(*[0.5] * (PATIENCE + 4))
    settings = {"data.workers": workers, "run.eval_every": "null"}
    run = opened(tmp_path / "run", settings)
    with Reporter(run) as reporter, contextlib.closing(run.state.loader.batches()) as batches:
        for reading in waiting[:-2]:
            if run.state.step < 2:
                take_step(run.state, batches)
            reporter.log(reading)
    assert run.state.interval.loading.images == 2 * run.state.plan.global_batch
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "waits for images" in line]
    times = re.search(
        r"waits for images 50% of its time; an image takes (\S+) ms to read, (\S+) ms to decode and (\S+) ms "
        + ("to cut, by 1 loader process" if workers else "to cut, by this process alone"),
        line,
    )
    assert all(float(time) > 0 for time in times.groups())
    again = opened(tmp_path / "run", settings)
    again.state.step = waiting[-3].step  # readings after the last checkpoint are dropped
    with Reporter(again) as reporter:
        assert len(reporter.readings) == len(waiting) - 2
        for reading in waiting[-2:]:
            reporter.log(reading)
    assert "waits for images" not in capsys.readouterr().err

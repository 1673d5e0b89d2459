"""A run that is asked to stop while its images do not come."""

import os
import signal
import time
from functools import partial

from dino_vit.data.image_set import ImageSet
from dino_vit.views import loader, workers
from tests.support.runs import Run, history, run, steps

SETTINGS = {"data.workers": 1, "budget.steps": 5, "optim.warmup_epochs": 0.1, "run.checkpoint_every": 100}
READ = 3 * 8  # images of three steps


def hang(images=READ):
    """Have the worker read the images of three steps and then wait, as for a disk that is gone."""
    workers.GRACE_S = 0.4
    loader.LOOK_S = workers.LOOK_S = 0.2
    read, count = ImageSet.read, 0

    def read_or_hang(self, index):
        nonlocal count
        if workers.get_worker_info() is not None:
            count += 1
            if count > images:
                os.write(2, b"hangs\n")
                time.sleep(600)
        return read(self, index)

    ImageSet.read = read_or_hang


def test_a_signal_ends_a_run_that_waits_for_images_and_nothing_is_lost(tmp_path):
    output = tmp_path / "run"
    started = Run(output, SETTINGS, before=hang)
    started.wait_until(lambda: (output / "metrics.jsonl").exists() and len(history(output)) == 3)
    started.send(signal.SIGTERM)
    assert started.wait(60) == 75
    assert "step 3: stopped while no images came" in started.said
    assert steps(output) == [3]
    assert "resuming after step 3" in run(output, SETTINGS)


def test_a_run_that_stops_before_its_first_step_keeps_its_baseline(tmp_path):
    output, settings = tmp_path / "run", {**SETTINGS, "run.eval_every": 1}
    started = Run(output, settings, before=partial(hang, 0))
    started.wait_until(lambda: "hangs" in started.said)
    started.send(signal.SIGTERM)
    assert started.wait(60) == 75
    assert steps(output) == [0]
    assert "(before training " in run(output, settings)


def test_a_step_of_several_micro_batches_is_taken_again(tmp_path):
    """The gradients of a part of a step are nowhere: the run goes on from its last checkpoint."""
    output, settings = tmp_path / "run", {**SETTINGS, "optim.accumulate": 2, "run.checkpoint_every": 1}
    started = Run(output, settings, before=hang)
    started.wait_until(lambda: steps(output) == [1])
    started.send(signal.SIGTERM)
    assert started.wait(60) == 75
    assert steps(output) == [1]
    assert "resuming after step 1" in run(output, settings)

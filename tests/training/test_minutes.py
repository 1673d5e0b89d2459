"""A run of some minutes: its speed is measured, its schedules follow the clock, and it resumes."""

import signal
from functools import partial

import pytest
from accelerate import Accelerator

import dino_vit.training.loop
from dino_vit.config.auto import ENOUGH_IMAGES, network_ladder
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.training import state as state_module
from dino_vit.training.loop import TIMED, WARM_UP, fit_to_minutes
from dino_vit.training.setup import set_up
from tests.support.processes import finish, pair, srun_environs
from tests.support.runs import history, run, signal_within_step
from tests.support.training import opened

SECONDS = 4.0
MEASURED = WARM_UP + TIMED  # steps that are taken to measure the speed
SETTINGS = {
    "budget.steps": "null",
    "budget.minutes": SECONDS / 60,
    "run.eval_every": "null",
    "run.log_every": 10,
    # A busy machine takes few steps in so many seconds.
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layer_epochs": 0,
}


def metadata(output):
    return Checkpoints(output).newest().metadata


def test_a_resumed_run_takes_what_is_left_of_the_time(tmp_path):
    run(tmp_path / "run", SETTINGS, code=75, before=partial(signal_within_step, MEASURED + 1, signal.SIGTERM))
    before = metadata(tmp_path / "run")
    assert before["step"] == 2
    run(tmp_path / "run", SETTINGS)
    after = metadata(tmp_path / "run")
    assert before["seconds"] < after["seconds"] < SECONDS * 10
    assert after["step"] == after["total_steps"] > before["step"]


def test_two_processes_end_after_the_same_step(tmp_path):
    finish(pair(tmp_path / "run", SETTINGS, srun_environs()))
    found = metadata(tmp_path / "run")
    assert found["step"] == found["total_steps"] == history(tmp_path / "run")[-1]["step"]
    assert found["seconds"] < SECONDS * 20


def test_the_length_follows_the_pace(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(state_module.time, "monotonic", lambda: now)
    state = opened(tmp_path / "run", {"budget.steps": 40}).state
    state.config = load(PretrainConfig, None, ["budget.minutes=10", *settings_of(state)])
    state.start_clock()
    now = 160.0  # a minute of evaluation before the first step
    state.start_clock()
    state.step, now = 30, 190.0
    state.refit()  # a second a step, and 510 seconds are left
    assert state.plan.total_steps == 30 + 510
    state.step, now = 60, 250.0
    state.refit()  # 1.5 seconds a step
    assert state.plan.total_steps == 60 + 300
    state.step, now = 300, 695.0
    state.refit()  # 5 seconds are left for two or three steps
    assert state.plan.total_steps == 300


def settings_of(state):
    return [f"output={state.config.output}", f"data.source={state.config.data.source}"]


def test_the_network_is_the_largest_that_sees_enough_images():
    config = load(PretrainConfig, None, ["recipe=auto", "budget.minutes=10"])
    ladder = network_ladder(config, 500)
    assert [one.cost for one in ladder] == sorted(one.cost for one in ladder)
    assert ladder[0].settings["model.width"] == 96
    assert ladder[-1].settings["views.global_size"] == 224
    assert {one.settings["views.global_size"] for one in network_ladder(config, 32)} == {32}
    given = load(PretrainConfig, None, ["recipe=auto", "model.arch=vit_tiny"])
    assert network_ladder(given, 500) == []


@pytest.mark.parametrize(("speed", "width"), [(10, 96), (1e9, 384)])
def test_the_choice_follows_the_measured_speed(tmp_path, monkeypatch, speed, width):
    monkeypatch.setattr(dino_vit.training.loop, "seconds_per_step", lambda _: 8 / speed)
    settings = ["recipe=auto", "data.source=synthetic:400:224", f"output={tmp_path}", "budget.minutes=10"]
    config = load(PretrainConfig, None, [*settings, "data.batch_size=8", "data.workers=0"])
    accelerator = Accelerator()
    run = set_up(config, accelerator, fit_to_minutes(config))
    assert run.state.config.model.width == width
    assert run.state.plan.total_steps == int(600 * speed / 8)
    reasons = {choice.key: choice.reason for choice in run.choices}
    assert "in 10 minutes on this machine" in reasons["model.width"]
    assert ENOUGH_IMAGES == 100_000


def test_a_recipe_whose_phases_are_longer_than_the_trial_is_measured(tmp_path):
    """Ten epochs of warm-up are 5,000 steps here; only the length in minutes may be held against them."""
    images = {**SETTINGS, "data.source": "synthetic:4000:32", "optim.warmup_epochs": 10}
    said = run(tmp_path / "run", images, code=2)
    assert "optim.warmup_epochs=10 is not shorter than the run" in said
    assert "or a larger budget.minutes" in said

"""A run of some minutes: its speed is measured, its schedules follow the clock, and it resumes."""

from dataclasses import replace
from itertools import cycle
from types import MappingProxyType

import pytest
from accelerate import Accelerator

import dino_vit.training.loop
from dino_vit.config.auto import SHORT, network_ladder
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.training import state as state_module
from dino_vit.training.loop import fit_to_minutes
from dino_vit.training.resolve import Fit
from dino_vit.training.setup import set_up
from tests.support.processes import finish, pair, srun_environs
from tests.support.runs import history
from tests.support.training import configured, opened, trained

SETTINGS = {
    "budget.steps": "null",
    "budget.minutes": 4 / 60,
    "run.eval_every": "null",
    "run.log_every": 10,
    # A busy machine takes few steps in so many seconds.
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layer_epochs": 0,
}


def test_two_processes_end_after_the_same_step(tmp_path):
    finish(pair(tmp_path / "run", SETTINGS, srun_environs()))
    found = Checkpoints(tmp_path / "run").newest().metadata
    assert found["step"] == found["total_steps"] == history(tmp_path / "run")[-1]["step"]


class Pace:
    """A run of ten minutes, some of whose intervals of ten steps are played."""

    def __init__(self, tmp_path, monkeypatch, settings=MappingProxyType({})):
        self.now = 100.0
        for clock in ("monotonic", "perf_counter"):
            monkeypatch.setattr(state_module.time, clock, lambda: self.now)
        steps = {"budget.steps": "null", "budget.minutes": 10, "optim.freeze_last_layer_epochs": 0}
        config = configured(tmp_path / "run", {**steps, "optim.warmup_epochs": 0, **settings})
        self.state = set_up(config, Accelerator(), Fit(500)).state
        self.state.began = self.now

    def play(self, *paces):
        """Take ten steps at each of some paces, in seconds per step; return the length after each."""
        lengths = []
        for pace in paces:
            self.state.interval.restart()
            self.state.step, self.now = self.state.step + 10, self.now + 10 * pace
            self.state.interval.images = 10 * self.state.plan.global_batch
            self.state.refit()
            lengths.append(self.state.plan.total_steps)
        return lengths


def test_the_length_follows_the_clock_without_jumping(tmp_path, monkeypatch):
    run = Pace(tmp_path, monkeypatch)
    run.now += 60  # of evaluation before the first step
    # The first interval of a start is slow, and one beside another program; the median is 1.2 s a step.
    lengths = run.play(1.5, 1.2, 1.2, 9.0)
    assert lengths == [500, 500, 447, 344]  # the last for the 78 seconds that were lost
    for pace in cycle([1.2, 1.15, 1.25]):
        if run.state.step >= run.state.plan.total_steps:
            break
        lengths += run.play(pace)
    assert len(set(lengths)) <= 5
    assert run.state.seconds == pytest.approx(600, rel=0.03)


def test_the_rates_in_the_log_are_those_of_the_step(tmp_path, monkeypatch):
    """Though the length was fitted after the step, before the line."""
    used, set_rates = [], dino_vit.training.loop.set_rates

    def lengthen(state):
        state.plan = replace(state.plan, total_steps=40 - state.step)

    def watch(optimizer, **rates):
        used.append((rates["lr"], rates["weight_decay"]))
        set_rates(optimizer, **rates)

    monkeypatch.setattr(state_module.TrainingState, "refit", lengthen)
    monkeypatch.setattr(dino_vit.training.loop, "set_rates", watch)
    trained(tmp_path / "run")
    assert [(line["lr"], line["weight_decay"]) for line in history(tmp_path / "run")] == used


def test_evaluations_count_in_the_minutes(tmp_path, monkeypatch):
    run = Pace(tmp_path, monkeypatch, {"run.eval_every": "null", "run.eval_every_steps": 100})
    run.state.evaluation_seconds = 30.0
    *_, length = run.play(1.0, 1.0, 1.0)
    assert length == 30 + int((600 - 30 - 30) / (1 + 0.3))


def test_a_run_that_resumes_keeps_its_length_unless_its_minutes_change(tmp_path, monkeypatch):
    run = Pace(tmp_path, monkeypatch)
    run.play(1.0, 1.0, 1.0)
    length = run.state.plan.total_steps
    run.state.begin_save()
    run.state.writer.finish(wait=True)
    monkeypatch.undo()
    settings = {"budget.steps": "null", "optim.freeze_last_layer_epochs": 0, "optim.warmup_epochs": 0}
    assert opened(tmp_path / "run", {**settings, "budget.minutes": 10}).state.plan.total_steps == length
    changed = {**settings, "budget.minutes": 20, "run.resume": "changed"}
    assert opened(tmp_path / "run", changed).state.plan.total_steps == 30 + 1170
    in_steps = {"budget.steps": 400, "run.resume": "changed", "optim.warmup_epochs": 0}
    assert opened(tmp_path / "run", in_steps).state.plan.total_steps == 400


def test_the_network_is_the_largest_that_sees_enough_images():
    config = load(PretrainConfig, None, ["recipe=auto", "budget.minutes=10"])
    ladder = network_ladder(config, 500)
    assert [one.cost for one in ladder] == sorted(one.cost for one in ladder)
    assert ladder[0].settings["model.width"] == 96
    assert ladder[-1].settings["views.global_size"] == 224
    for image_size, view in {32: 24, 4: 4, 2: 4}.items():
        assert {one.settings["views.global_size"] for one in network_ladder(config, image_size)} == {view}
    assert (ladder[-1].settings["model.width"], ladder[-1].settings["model.heads"]) == (384, 6)  # ViT-S
    config = load(PretrainConfig, None, ["recipe=auto", "budget.minutes=10", "model.patch_size=14"])
    assert all(one.settings["views.global_size"] % 14 == 0 for one in network_ladder(config, 500))
    config = load(PretrainConfig, None, ["recipe=auto", "budget.minutes=10", "views.global_size=224"])
    costs = [one.cost for one in network_ladder(config, 500)]
    assert costs[-1] / costs[0] > 30, "the patches are those of the view, whatever the network"
    given = load(PretrainConfig, None, ["recipe=auto", "model.arch=vit_tiny"])
    assert network_ladder(given, 500) == []


@pytest.mark.parametrize(("of_long", "steps"), [(0.02, SHORT - 1), (0.012, 45_000)])
def test_a_long_run_has_the_speed_of_its_own_recipe(tmp_path, monkeypatch, of_long, steps):
    """A step of a long run, with more views and all patches, takes longer than one of a short run."""
    monkeypatch.setattr(
        dino_vit.training.loop,
        "measured_seconds",
        lambda config, steps=1000: (of_long if steps >= SHORT else 0.01, 15.0),
    )
    settings = ["recipe=auto", "data.source=synthetic:400:32", f"output={tmp_path}", "budget.minutes=10"]
    fit = fit_to_minutes(load(PretrainConfig, None, [*settings, "model.arch=vit_tiny", "data.batch_size=8"]))
    assert fit.steps == pytest.approx(steps, rel=0.02)
    assert (fit.steps < SHORT) == (steps < SHORT)


@pytest.mark.parametrize(("speed", "width"), [(10, 96), (1e9, 384)])
def test_the_choice_follows_the_measured_speed(tmp_path, monkeypatch, speed, width):
    monkeypatch.setattr(dino_vit.training.loop, "measured_seconds", lambda *_: (8 / speed, 15.0))
    settings = ["recipe=auto", "data.source=synthetic:400:224", f"output={tmp_path}", "budget.minutes=10"]
    config = load(PretrainConfig, None, [*settings, "data.batch_size=8", "data.workers=0"])
    accelerator = Accelerator()
    run = set_up(config, accelerator, fit_to_minutes(config))
    assert run.state.config.model.width == width
    assert run.state.plan.total_steps == pytest.approx(540 * speed / 8, rel=0.02)  # less what measuring took
    reasons = {choice.key: choice.reason for choice in run.choices}
    assert "in 10 minutes on this machine" in reasons["model.width"]


def test_a_recipe_whose_phases_are_longer_than_the_trial_is_measured(tmp_path):
    """Ten epochs of warm-up are 5,000 steps here; only the length in minutes may be held against them."""
    images = {**SETTINGS, "data.source": "synthetic:4000:32", "optim.warmup_epochs": 10}
    config = configured(tmp_path / "run", images)
    with pytest.raises(ValueError, match=r"optim.warmup_epochs=10 is not shorter than the run") as error:
        set_up(config, Accelerator(), fit_to_minutes(config))
    assert "or a larger budget.minutes" in str(error.value)

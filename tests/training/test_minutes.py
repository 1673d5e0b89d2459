"""A run of some minutes: its speed is measured, its schedules follow the clock, and it resumes."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import pytest
from accelerate import Accelerator

import dino_vit.training.budget
import dino_vit.training.loop
from dino_vit.config.auto import SHORT, network_ladder
from dino_vit.config.loading import load
from dino_vit.config.loading import replace as replace_settings
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.training import resolve, setup
from dino_vit.training import state as state_module
from dino_vit.training.budget import estimate_budget, seconds_per_step
from dino_vit.training.plan import BudgetEstimate
from dino_vit.training.pretrain import pretrain
from dino_vit.training.setup import open_context, set_up
from tests.support.processes import finish, pair, torchrun_environs
from tests.support.runs import ROOT, history
from tests.support.training import configured, opened, trained

SETTINGS = {
    "budget.steps": "null",
    "budget.minutes": 4 / 60,
    "compute.eval_every": "null",
    "compute.log_every": 10,
    # A busy machine takes few steps in so many seconds.
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layer_epochs": 0,
}


def test_two_processes_end_after_the_same_step(tmp_path):
    finish(pair(tmp_path / "run", SETTINGS, torchrun_environs()))
    found = Checkpoints(tmp_path / "run").newest().metadata
    assert found["step"] == found["total_steps"] == history(tmp_path / "run")[-1]["step"]


def planned(config, estimate=None):
    """Set a run up that has time for what is given, or for what is measured."""
    accelerator = Accelerator()
    context = open_context(config, accelerator)
    context = replace(context, estimate=estimate or estimate_budget(config, context))
    return set_up(config, accelerator, context)


class Played:
    """A run of ten minutes, whose steps are played, each with its time."""

    def __init__(self, tmp_path, monkeypatch, settings=MappingProxyType({}), steps=500):
        self.now = 100.0
        for clock in ("monotonic", "perf_counter"):
            monkeypatch.setattr(state_module.time, clock, lambda: self.now)
        changes = {"budget.steps": "null", "budget.minutes": 10, "optim.freeze_last_layer_epochs": 0}
        changes |= {"optim.warmup_epochs": 0, "compute.log_every": 50}
        config = configured(tmp_path / "run", changes | settings)
        self.state = planned(config, BudgetEstimate(steps)).state
        self.state.began = self.now
        self.totals, self.lr = [], []  # totals with the share of the time at which they were known
        self.state.begin_pace()

    def play(self, seconds, steps=1):
        """Take steps of some seconds each, and return the length after them."""
        for _ in range(steps):
            state = self.state
            self.lr.append(state.plan.rates(state.step).lr)
            state.step, self.now = state.step + 1, self.now + seconds
            state.refit(logged=state.plan.is_logged(state.step))
            self.totals.append((state.seconds / 600, state.plan.total_steps))
        return self.state.plan.total_steps

    def play_to_the_end(self, seconds):
        """Play a run whose steps take `seconds(step, time)`."""
        while self.state.step < self.state.plan.total_steps:
            self.play(seconds(self.state.step, self.state.seconds))

    @property
    def largest_change(self):
        """The largest change of the length, relative, after the first tenth of the time."""
        totals = [total for time, total in self.totals if time > 0.1]
        return max(abs(after / before - 1) for before, after in pairwise(totals))


def stalling(every, seconds):
    """Return a source that gives images for some seconds and then none for others."""
    due = every

    def step(_, time):
        nonlocal due
        if time < due:
            return 0.5
        due = time + seconds + every
        return 0.5 + seconds

    return step


PACES = {
    "constant": lambda step, time: 0.5,
    "measured four times too fast": lambda step, time: 2.0,
    "measured three times too slow": lambda step, time: 0.17,
    "slow at first": lambda step, time: 25.0 if step < 2 else 0.5,
    "prefetched at first": lambda step, time: 0.1 if step < 10 else 0.6,
    "short stalls": stalling(2, 4),
    "stalls": stalling(20, 20),
    "long stalls": stalling(60, 30),
    "one outage": lambda step, time: 60.0 if step == 200 else 0.5,
    "ever slower": lambda step, time: 0.4 + 0.4 * time / 600,
    "ever faster": lambda step, time: 0.8 - 0.4 * time / 600,
    "half as fast from the middle on": lambda step, time: 0.5 if time < 300 else 1.0,
}


@pytest.mark.parametrize("name", PACES)
def test_a_run_ends_with_its_minutes_and_its_length_does_not_jump(tmp_path, monkeypatch, name):
    run = Played(tmp_path, monkeypatch, steps=1160)
    run.play_to_the_end(PACES[name])
    assert run.state.seconds == pytest.approx(600, rel=0.03)
    assert run.largest_change < 0.2
    assert all(after <= before for before, after in pairwise(run.lr)), "the schedule never goes back"
    assert max(before - after for before, after in pairwise(run.lr)) < 0.06 * run.lr[0]
    assert run.lr[-1] < 0.06 * run.lr[0], "and comes to its end"


def test_a_short_run_with_stalls_takes_all_of_its_time(tmp_path, monkeypatch):
    """Each stall is a fifteenth of the time: a median of a few lines takes it for the pace, or misses it."""
    run = Played(tmp_path, monkeypatch, steps=114)
    due = 30.0

    def step(_, time):
        nonlocal due
        if time < due:
            return 4.0
        due = time + 70
        return 44.0

    run.play_to_the_end(step)
    assert run.state.seconds == pytest.approx(600, rel=0.03)
    assert run.largest_change < 0.25


def test_a_wrong_length_is_mended_before_the_first_log_line(tmp_path, monkeypatch):
    """As the steps become more, however far away the line is."""
    run = Played(tmp_path, monkeypatch, {"compute.log_every": 1000}, steps=100_000)
    assert run.play(2.0, 30) < 12_000
    run.play_to_the_end(lambda *_: 2.0)
    assert run.state.step == pytest.approx(300, abs=5)


def test_steps_are_timed_beyond_the_prefetched_images(tmp_path, monkeypatch):
    """Workers have made eight batches ahead, which hide that each takes longer to make than a step."""
    config = {"data.workers": 4, "optim.accumulate": 1}
    run = Played(tmp_path, monkeypatch, config)
    ahead = run.state.steps_ahead
    assert ahead == 8
    ready = ahead

    def take():
        nonlocal ready
        ready -= 1
        run.now += 0.1 if ready >= 0 else 0.9

    assert seconds_per_step(run.state, take, limit=100) == pytest.approx(0.9)
    ready = ahead
    assert seconds_per_step(run.state, take, limit=0.5) == pytest.approx((3 * 0.1 + 0.9) / 4, abs=0.3)


def test_the_rates_in_the_log_are_those_of_the_step(tmp_path, monkeypatch):
    """Though the length was fitted after the step, before the line."""
    used, set_rates = [], dino_vit.training.loop.set_rates

    def lengthen(state, **_):
        state.plan = replace(state.plan, total_steps=40 - state.step)

    def watch(optimizer, **rates):
        used.append((rates["lr"], rates["weight_decay"]))
        set_rates(optimizer, **rates)

    monkeypatch.setattr(state_module.TrainingState, "refit", lengthen)
    monkeypatch.setattr(dino_vit.training.loop, "set_rates", watch)
    trained(tmp_path / "run")
    assert [(line["lr"], line["weight_decay"]) for line in history(tmp_path / "run")] == used


def test_evaluations_count_in_the_minutes(tmp_path, monkeypatch):
    settings = {"compute.eval_every": "null", "compute.eval_every_steps": 100}
    run = Played(tmp_path, monkeypatch, settings, steps=438)
    run.state.evaluation_seconds = 30.0
    run.state.begin_pace()
    assert run.state.pace.planned == pytest.approx((600 - 30) / 438 - 0.3)
    run.play(2.0, 100)
    more = (600 - 200 - 30) / (run.state.pace.seconds + 0.3)
    assert run.state.plan.total_steps == pytest.approx(100 + more, rel=0.06)


def test_a_run_that_resumes_keeps_its_length_unless_its_minutes_change(tmp_path, monkeypatch):
    run = Played(tmp_path, monkeypatch)
    run.play(2.0, 60)
    plan = run.state.plan
    assert plan.total_steps < 400
    run.state.begin_save()
    run.state.writer.finish(wait=True)
    monkeypatch.undo()
    settings = {"budget.steps": "null", "optim.freeze_last_layer_epochs": 0, "optim.warmup_epochs": 0}
    resumed = opened(tmp_path / "run", {**settings, "budget.minutes": 10}).state.plan
    assert [resumed.rates(step) for step in range(60, 400)] == [plan.rates(step) for step in range(60, 400)]
    assert resumed.total_steps == plan.total_steps
    changed = {**settings, "budget.minutes": 20, "compute.resume": "changed"}
    assert opened(tmp_path / "run", changed).state.plan.total_steps == 60 + 540
    in_steps = {"budget.steps": 400, "compute.resume": "changed", "optim.warmup_epochs": 0}
    in_steps = opened(tmp_path / "run", in_steps).state.plan
    assert (in_steps.total_steps, in_steps.length) == (400, 400)


def test_a_run_that_is_done_learns_again_with_more_minutes(tmp_path, monkeypatch):
    run = Played(tmp_path, monkeypatch)
    run.play_to_the_end(lambda step, time: 2.0)
    done = run.state.step
    run.state.begin_save()
    run.state.writer.finish(wait=True)
    monkeypatch.undo()
    settings = {"budget.steps": "null", "optim.freeze_last_layer_epochs": 0, "optim.warmup_epochs": 0}
    plan = opened(
        tmp_path / "run", {**settings, "budget.minutes": 20, "compute.resume": "changed"}
    ).state.plan
    assert plan.total_steps == pytest.approx(2 * done, rel=0.05)
    in_steps = {**settings, "budget.steps": plan.total_steps, "compute.resume": "changed"}
    in_steps = opened(tmp_path / "run", in_steps).state.plan
    assert [plan.rates(step) for step in range(done, plan.total_steps)] == [
        in_steps.rates(step) for step in range(done, plan.total_steps)
    ], "the schedules of a longer run, as with a budget in another unit"
    assert plan.rates(done).momentum < 0.999, "with that of the end, 1, the teacher would stay as it is"


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


@pytest.mark.parametrize(("long_step", "steps"), [(0.02, SHORT - 1), (0.012, 45_000)])
def test_a_long_run_has_the_speed_of_its_own_recipe(tmp_path, monkeypatch, long_step, steps):
    """A step of a long run, with more views and all patches, takes longer than one of a short run."""
    monkeypatch.setattr(
        dino_vit.training.budget,
        "measured_seconds",
        lambda config, context, steps=1000: (long_step if steps >= SHORT else 0.01, 15.0),
    )
    settings = ["recipe=auto", "data.source=synthetic:400:32", f"output={tmp_path}", "budget.minutes=10"]
    config = load(PretrainConfig, None, [*settings, "model.arch=vit_tiny", "data.batch_size=8"])
    estimated = estimate_budget(config, open_context(config, Accelerator())).steps
    assert estimated == pytest.approx(steps, rel=0.02)
    assert (estimated < SHORT) == (steps < SHORT)


@pytest.mark.parametrize(("speed", "width"), [(10, 96), (1e9, 384)])
def test_the_choice_follows_the_measured_speed(tmp_path, monkeypatch, speed, width):
    monkeypatch.setattr(dino_vit.training.budget, "measured_seconds", lambda *_: (8 / speed, 15.0))
    settings = ["recipe=auto", "data.source=synthetic:400:224", f"output={tmp_path}", "budget.minutes=10"]
    config = load(PretrainConfig, None, [*settings, "data.batch_size=8", "data.workers=0"])
    run = planned(config)
    assert run.state.config.model.width == width
    assert run.state.plan.total_steps == pytest.approx(540 * speed / 8, rel=0.02)  # less what measuring took
    reasons = {choice.key: choice.reason for choice in run.choices}
    assert "in 10 minutes on this machine" in reasons["model.width"]


def test_images_are_opened_and_looked_at_once_however_often_a_step_is_measured(tmp_path, monkeypatch):
    done = []

    def noting(name, work):
        def noted(*arguments, **keywords):
            done.append(name)
            return work(*arguments, **keywords)

        return noted

    works = {"open_images": setup, "inspect_images": resolve, "channel_statistics": resolve}
    for name, module in works.items():
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    config = configured(tmp_path / "run", {**SETTINGS, "budget.minutes": 1 / 60, "recipe": "auto"})
    pretrain(replace_settings(config, {"data.mean": None}))
    assert sorted(done) == ["channel_statistics", "inspect_images", "open_images"]
    assert history(tmp_path / "run")[-1]["step"] == history(tmp_path / "run")[-1]["total_steps"]


def test_the_networks_of_a_trial_are_gone_after_it(tmp_path):
    """In a process of its own: what PyTorch imports with its first optimiser keeps frames."""
    code = f"""
import gc, weakref
from accelerate import Accelerator
from dino_vit.training import budget, setup
from tests.support.training import configured

def set_up(*arguments):
    ready = setup.set_up(*arguments)
    states.append(weakref.ref(ready.state))
    return ready

states, budget.set_up = [], set_up
config = configured({str(tmp_path / "run")!r}, {SETTINGS!r})
context = setup.open_context(config, Accelerator())
gc.disable()
budget.measured_seconds(config, context)
assert [state() for state in states] == [None]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_recipe_whose_phases_are_longer_than_the_trial_is_measured(tmp_path):
    """Ten epochs of warm-up are 5,000 steps here; only the length in minutes may be held against them."""
    images = {**SETTINGS, "data.source": "synthetic:4000:32", "optim.warmup_epochs": 10}
    config = configured(tmp_path / "run", images)
    with pytest.raises(ValueError, match=r"optim.warmup_epochs=10 is not shorter than the run") as error:
        planned(config)
    assert "or a larger budget.minutes" in str(error.value)


def test_a_step_is_measured_without_what_its_first_steps_make(tmp_path, monkeypatch):
    """Compiling blocks would be the most of so few steps."""
    measured = []
    monkeypatch.setattr(
        dino_vit.training.budget, "set_up", lambda config, *_: measured.append(config) or 1 / 0
    )
    config = configured(tmp_path / "run", SETTINGS)
    with pytest.raises(ZeroDivisionError):
        dino_vit.training.budget.measured_seconds(config, open_context(config, Accelerator()))
    assert measured[0].run.compile is False

"""A run of some minutes: its schedules follow the clock, and it resumes where it was."""

import json
from itertools import pairwise
from types import MappingProxyType

import pytest

import dino_vit.training.probe
from dino_vit.config import length
from dino_vit.config.facts import Speed
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.training import inputs
from dino_vit.training import plan as plan_module
from dino_vit.training.evaluations import Evaluations
from dino_vit.training.pretrain import pretrain
from dino_vit.training.reporter import describe_start, start_record
from tests.support.processes import finish, pair, torchrun_environs
from tests.support.runs import history
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
TEN = {**SETTINGS, "budget.minutes": 10, "compute.log_every": 50, "optim.warmup_epochs": 2}


def test_two_processes_end_after_the_same_step(tmp_path):
    finish(pair(tmp_path / "run", SETTINGS, torchrun_environs()))
    found = Checkpoints(tmp_path / "run").newest().metadata
    assert found["step"] == found["total_steps"] == history(tmp_path / "run")[-1]["step"]
    assert history(tmp_path / "run")[-1]["lr"] == pytest.approx(1e-6)


class Played:
    """A run of ten minutes whose steps are played, each with its time."""

    def __init__(self, tmp_path, monkeypatch, settings=MappingProxyType({}), measured=0.5):
        self.now = 100.0
        monkeypatch.setattr(plan_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(dino_vit.training.probe, "measure_speed", lambda *_: Speed())
        monkeypatch.setattr(length, "step_seconds", lambda *_, **__: measured)
        self.state = opened(tmp_path / "run", TEN | settings)
        self.state.clock.start()
        self.lr, self.planned, self.logged, self.evaluated = [], [], [], []

    def step(self, seconds):
        state = self.state
        state.begin_step()
        self.lr.append(state.rates.lr)
        self.planned.append(state.planned)
        state.step, self.now = state.step + 1, self.now + seconds
        state.clock.agree(state.clock.seconds)
        if state.planned.is_logged:
            self.logged.append(state.clock.share)
        if state.planned.is_evaluated:
            self.evaluated.append(state.clock.share)

    def play(self, seconds):
        """Take steps to the end, each of `seconds(step, time)`."""
        while not self.state.is_done:
            self.step(seconds(self.state.step, self.state.clock.seconds))


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


# With the seconds of the longest step.
PACES = {
    "as measured": (lambda step, time: 0.5, 0.5),
    "four times slower": (lambda step, time: 2.0, 2.0),
    "three times faster": (lambda step, time: 0.17, 0.17),
    "slow at first": (lambda step, time: 25.0 if step < 2 else 0.5, 25.0),
    "stalls": (stalling(20, 20), 20.5),
    "an outage of a minute": (lambda step, time: 60.0 if step == 200 else 0.5, 60.0),
    "an outage near the end": (lambda step, time: 60.0 if 595 < time < 600 else 0.5, 60.5),
    "ever slower": (lambda step, time: 0.4 + 0.4 * time / 600, 0.8),
    "steps of a minute": (lambda step, time: 60.0, 60.0),
}


@pytest.mark.parametrize("name", PACES)
def test_a_run_ends_within_a_step_of_its_minutes_with_its_rates_at_their_ends(tmp_path, monkeypatch, name):
    pace, longest = PACES[name]
    run = Played(tmp_path, monkeypatch)
    run.play(pace)
    assert 600 - longest <= run.state.clock.seconds <= 600 + longest
    rates, plan = run.state.rates, run.state.plan
    assert rates == plan.rates(plan.length)
    assert (rates.lr, rates.momentum) == (1e-6, 1.0)
    assert run.state.total_steps == run.state.step
    planned = [step.at for step in run.planned]
    assert all(after >= before for before, after in pairwise(planned)), "the schedule never goes back"
    warmup = plan.warmup_steps / plan.length
    assert all(lr <= plan.lr for lr in run.lr)
    if longest < 20:
        reached = next(n for n, at in enumerate(planned) if at >= plan.warmup_steps)
        assert run.lr[reached] == pytest.approx(plan.lr, rel=0.01)
        assert planned[reached] / plan.length == pytest.approx(warmup, abs=0.01)


@pytest.mark.parametrize("seconds", [0.1, 0.5, 2.0])
def test_lines_and_evaluations_come_by_share_of_the_time(tmp_path, monkeypatch, seconds):
    run = Played(tmp_path, monkeypatch, {"compute.eval_every": 25})  # of 150 epochs that are expected
    run.play(lambda *_: seconds)
    shares = [number / 6 for number in range(1, 7)]
    assert run.evaluated == pytest.approx(shares, abs=0.02)
    assert len(run.logged) == pytest.approx(24, abs=1)
    assert {step.is_last for step in run.planned[:-1]} == {False}


def test_the_evaluation_at_the_end_is_part_of_the_minutes(tmp_path, monkeypatch):
    run = Played(tmp_path, monkeypatch)
    run.state.clock.reserve = 30.0
    run.play(lambda *_: 0.5)
    assert run.state.clock.seconds == pytest.approx(570, abs=1)


def test_a_run_that_resumes_goes_on_where_it_was_unless_its_minutes_change(tmp_path, monkeypatch):
    run = Played(tmp_path, monkeypatch)
    for _ in range(60):
        run.step(2.0)
    before, plan = run.state.clock.seconds, run.state.plan
    run.state.begin_save()
    run.state.writer.finish(wait=True)
    again = Played(tmp_path, monkeypatch)
    assert (again.state.clock.seconds, again.state.plan.length) == (before, plan.length) == (120, 1200)
    again.step(2.0)
    assert again.lr == [plan.rates(120 / 600 * 1200).lr]
    again.play(lambda *_: 2.0)
    assert 598 <= again.state.clock.seconds <= 602
    changed = Played(tmp_path, monkeypatch, {"budget.minutes": 20, "compute.resume": "changed"})
    assert changed.state.plan.length == 600, "at 60 steps in 120 seconds"
    changed.step(2.0)
    assert changed.planned[0].at == pytest.approx(60)
    in_steps = {"budget.minutes": "null", "budget.steps": 400, "compute.resume": "changed"}
    state = opened(tmp_path / "run", {**TEN, **in_steps})
    assert (state.total_steps, state.is_done) == (400, False)


def test_a_run_that_is_done_learns_again_with_more_minutes(tmp_path, monkeypatch):
    run = Played(tmp_path, monkeypatch)
    run.play(lambda *_: 2.0)
    run.state.begin_save()
    run.state.writer.finish(wait=True)
    done = opened(tmp_path / "run", TEN)
    assert done.is_done
    said, epochs = "\n".join(describe_start(done, start_record(done))), done.step / done.run.steps_per_epoch
    assert f"about {done.step} steps ({epochs:.4g} epochs) in budget.minutes=10" in said
    more = Played(tmp_path, monkeypatch, {"budget.minutes": 20, "compute.resume": "changed"})
    assert not more.state.is_done
    more.step(2.0)
    assert more.state.rates.momentum < 0.999, "with that of the end, 1, the teacher would stay as it is"


def test_a_config_is_validated_twice_and_images_are_looked_at_once(tmp_path, monkeypatch):
    done = []

    def noting(name, work):
        def noted(*arguments, **keywords):
            done.append(name)
            return work(*arguments, **keywords)

        return noted

    for name in ("open_images", "inspect_images", "channel_statistics"):
        monkeypatch.setattr(inputs, name, noting(name, getattr(inputs, name)))
    settings = {**SETTINGS, "budget.minutes": 1 / 60, "recipe": "auto", "data.mean": "null"}
    validate = PretrainConfig.model_validate
    monkeypatch.setattr(PretrainConfig, "model_validate", noting("validated", validate))
    pretrain(configured(tmp_path / "run", settings))
    once = ["channel_statistics", "inspect_images", "open_images"]
    assert sorted(done) == [*once, "validated", "validated"]
    lines = history(tmp_path / "run")
    assert lines[-1]["step"] == lines[-1]["total_steps"]
    start = json.loads((tmp_path / "run" / "starts.jsonl").read_text().splitlines()[0])
    assert start["total_steps"] >= 1


def test_a_run_of_minutes_saves_every_five_minutes(tmp_path, monkeypatch):
    run = Played(tmp_path, monkeypatch, {"budget.minutes": 30})
    saved = []
    for _ in range(400):
        run.step(4.0)
        if run.state.clock.is_save_due:
            saved.append(run.state.clock.elapsed)
            run.state.clock.saved = run.state.clock.elapsed
    assert saved == pytest.approx([300, 600, 900, 1200, 1500], abs=4.1)
    in_steps = {"budget.minutes": "null", "budget.steps": 40}
    state = opened(tmp_path / "steps", {**TEN, **in_steps})
    state.clock.agree(1e4)
    assert not state.clock.is_save_due


def test_the_rates_after_an_evaluation_are_those_of_the_time_after_it(tmp_path, monkeypatch):
    """With two processes, a vote on the clock is known a step later: that of before it comes after it."""
    run = Played(tmp_path, monkeypatch)
    run.step(2.0)
    clock, voted = run.state.clock, run.state.clock.seconds
    run.now += 60.0
    clock.skip_evaluation()
    assert clock.elapsed == 62
    clock.agree(voted)
    assert clock.elapsed == 62
    run.step(2.0)
    assert run.lr[-1] == run.state.plan.rates(62 / 600 * 1200).lr
    assert min(clock.steps) in (0.0, 2.0)


def test_evaluations_move_the_clock(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr(plan_module.Clock, "skip_evaluation", lambda clock: moved.append(clock.seconds))
    trained(tmp_path / "run", {"budget.steps": 16, "compute.eval_every": 1})
    assert len(moved) == 3  # before the first step, and after each epoch
    assert moved == sorted(moved)


def test_a_slow_first_evaluation_leaves_time_to_train(tmp_path, monkeypatch):
    """It opens files and libraries: what it took is no measure of the one at the end."""
    reserved, measure = [], Evaluations.evaluate_baseline

    def slow(evaluations, teacher):
        baseline = measure(evaluations, teacher)
        evaluations.seconds = 1e4
        return baseline

    monkeypatch.setattr(Evaluations, "evaluate_baseline", slow)
    monkeypatch.setattr(plan_module.Clock, "skip_evaluation", lambda clock: reserved.append(clock.reserve))
    trained(tmp_path / "run", {"budget.steps": "null", "budget.minutes": 0.02, "compute.eval_every": 1})
    assert reserved[0] == pytest.approx(0.1 * 60 * 0.02)

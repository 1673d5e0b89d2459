"""What the loop does, in this process; what it does as a process stands in test_resume.py."""

import math
from itertools import islice

import pytest
import torch
from torch.testing import assert_close

import dino_vit.training.interval
import dino_vit.training.loop
import dino_vit.training.pretrain
from benchmarks.step import Reference
from dino_vit.core.checkpoint import NotFinite
from dino_vit.core.process import Interruption
from dino_vit.eval.online import OnlineEvaluation, OnlineFigures
from dino_vit.method.optim import warmup_cosine
from dino_vit.method.terms.cls import Cls
from dino_vit.training.interval import Interval
from dino_vit.training.loop import train
from dino_vit.training.reporter import Reporter
from dino_vit.training.state import TrainingState
from tests.support.runs import assert_same_end, assert_same_readings, history, steps, tensors
from tests.support.training import moved, opened, tensors_of, trained, without_key_biases

SHORT = {"optim.warmup_epochs": 0}


@pytest.fixture
def lose(monkeypatch):
    """Return a function that makes the loss of the steps from `first` to `last` a NaN, once each."""

    def lose(first, last):
        left, now = set(range(first, last + 1)), None
        take, loss = dino_vit.training.loop.forward_backward, Cls.loss

        def forward_backward(state, *arguments, **keywords):
            nonlocal now
            now = state.step
            return take(state, *arguments, **keywords)

        def cls_loss(*arguments):
            value = loss(*arguments)
            if now not in left:
                return value
            left.remove(now)
            return value * math.nan

        monkeypatch.setattr(dino_vit.training.loop, "forward_backward", forward_backward)
        monkeypatch.setattr(Cls, "loss", cls_loss)

    return lose


def test_steps_are_those_of_the_reference(tmp_path):
    """On the views that the loader makes; all of one size, as the reference resamples positions otherwise."""
    settings = {"budget.steps": 6, "optim.warmup_epochs": 0.25, "optim.freeze_last_layer_epochs": 0}
    settings |= {"model.drop_path": 0, "optim.clip": 0.3, "views.local_size": 32}
    state = opened(tmp_path / "reference", settings)
    reference = Reference(state.config, torch.device("cpu"), state)
    losses = []
    for batch in islice(state.loader.batches(), 6):
        views = [state.augment(cut, batch.augment[size]) for size, cut in batch.views.items()]
        losses.append(reference.take(torch.cat(views).split(8)))
    taken = trained(tmp_path / "ours", settings)
    assert [line["loss"] for line in history(tmp_path / "ours")] == pytest.approx(losses, rel=1e-5)
    other = reference.trainer
    for ours, theirs in ((taken.student, other.student), (taken.teacher, other.teacher)):
        assert_close(
            *(without_key_biases(tensors_of(side.backbone)) for side in (ours, theirs)), atol=1e-5, rtol=1e-4
        )
        assert_close(tensors_of(ours.head.mlp), tensors_of(theirs.head.mlp), atol=1e-5, rtol=1e-4)
        direction = theirs.head.last_layer.parametrizations.weight.original1
        assert_close(ours.head.last_layer.weight_v, direction, atol=1e-5, rtol=1e-4)
    assert_close(taken.objective.state["cls"].center, other.loss.center, atol=1e-6, rtol=1e-5)


def test_rates_go_by_step_and_the_teachers_temperature_by_epoch(tmp_path):
    settings = {"loss.teacher_temp": 0.07, "loss.warmup_teacher_temp_epochs": 2, "budget.steps": 32}
    state = opened(tmp_path, settings)
    rates = [state.plan.rates(step) for step in range(32)]
    schedules = {"lr": (0.03 * 8 / 256, 1e-6, 8), "weight_decay": (0.04, 0.4, 0), "momentum": (0.996, 1, 0)}
    for name, (base, final, warmup) in schedules.items():
        ends = {"base": base, "final": final, "total": 32, "warmup": warmup}
        expected = [warmup_cosine(step, **ends) for step in range(32)]
        assert [getattr(rate, name) for rate in rates] == pytest.approx(expected)
    assert [r.teacher_temp for r in rates] == pytest.approx([0.04] * 8 + [0.07] * 24)


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, lose, student_at):
    lose(6, 6)
    state = trained(tmp_path / "run")
    assert moved(student_at[6], student_at[7]) == set()
    assert moved(student_at[5], student_at[6])
    assert moved(student_at[7], student_at[8])
    assert state.interval.skipped == 1
    lines = history(tmp_path / "run")
    assert [line["nonfinite_steps"] for line in lines] == [0] * 6 + [1] * 14
    assert [line["step"] for line in lines if line["loss"] is None] == [7]
    assert {float(held["step"]) for held in state.optimizer.state.values()} == {19, 15}, "4 frozen"


def test_too_many_skipped_steps_in_a_row_end_the_run_with_advice(tmp_path, lose, monkeypatch):
    monkeypatch.setattr(dino_vit.training.interval, "MAX_SKIPPED", 3)
    settings = {"compute.keep_every": 5}
    trained(tmp_path / "whole", settings)
    lose(8, 10)
    with pytest.raises(
        NotFinite, match=r"by step 11, 3 steps in a row .* compute.resume=changed, and compute.precision=no"
    ):
        trained(tmp_path / "run", settings)
    assert not moved(tensors(tmp_path / "whole", 5), tensors(tmp_path / "run", 5))
    resumed = trained(tmp_path / "run", settings)  # from step 10, written while steps were skipped
    assert (resumed.step, int(resumed.interval.skipped)) == (20, 2)


def test_skipped_steps_between_log_lines_end_the_run_too(tmp_path, lose, monkeypatch):
    """At once, and though a good step comes before the host looks."""
    settings = {"compute.log_every": 20, "budget.steps": 20}
    lose(4, 8)
    with pytest.raises(NotFinite, match="by step 9, 5 steps in a row were not finite"):
        trained(tmp_path / "soon", settings)
    lose(4, 8)
    monkeypatch.setattr(Interval, "seems_stuck", False)  # as on a GPU that is behind
    with pytest.raises(NotFinite, match="by step 20, 5 steps in a row were not finite"):
        trained(tmp_path / "late", settings)


def test_the_best_is_never_what_is_not_a_number(tmp_path, monkeypatch):
    figures = iter([math.nan, math.nan, 30.0, 20.0])
    monkeypatch.setattr(OnlineEvaluation, "__call__", lambda *_: OnlineFigures(1.0, next(figures)))
    state = trained(tmp_path / "run", {"compute.eval_every": 1})
    assert state.evaluations.best == {"figure": "knn", "value": 30.0, "step": 16}
    assert 16 in steps(tmp_path / "run")


def test_float16_finds_its_scale_by_losing_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(dino_vit.training.interval, "MAX_SKIPPED", 2)
    state = trained(tmp_path / "run", {"compute.precision": "fp16"})
    lines = history(tmp_path / "run")
    losses = [line["loss"] for line in lines]
    lost = losses.count(None)
    assert 2 < lost < 16
    assert state.scaler.get_scale() == 65536 / 2**lost
    assert None not in losses[-5:]
    assert {line["nonfinite_steps"] for line in lines} == {0}
    assert "diverged" not in {line["diagnosis"] for line in lines}
    stored = state.checkpoints.newest().metadata
    assert stored["precision"] == "fp16"
    assert stored["scaler"] == state.scaler.state_dict()


def test_float16_gives_up_when_its_scale_cannot_fall(tmp_path, lose):
    lose(0, 40)
    # Sixteen halve it from 65,536 to 1, and the next shows that 1 is no better.
    with pytest.raises(NotFinite, match="17 steps in a row"):
        trained(tmp_path / "run", {"compute.precision": "fp16", "budget.steps": 40})


@pytest.mark.filterwarnings("ignore")  # what the compiler's own modules warn of
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_networks_train_as_plain_ones_do(tmp_path, monkeypatch, backend):
    """Captured whole; the generated code itself takes minutes to make and is left to `make test-slow`."""
    settings = {"model.drop_path": 0, "optim.lr": 0.003}
    trained(tmp_path / "plain", settings)
    used = []
    compile_function = torch.compile

    def compile(function, **keywords):
        used.append(function)
        return compile_function(function, backend=backend, fullgraph=True, **keywords)

    monkeypatch.setattr(torch, "compile", compile)
    trained(tmp_path / "compiled", {**settings, "compute.compile": "true"})
    assert len(used) == 2, "student and teacher"
    assert_same_readings(tmp_path / "compiled", tmp_path / "plain", "loss", rtol=1e-4)
    plain = history(tmp_path / "plain")
    assert plain[0]["loss"] != plain[-1]["loss"]


def test_a_skipped_step_leaves_the_statistics_of_batch_norm_alone(tmp_path, monkeypatch):
    views_of, before = TrainingState.views_of, {}

    def with_a_nan(state, batch):
        views = views_of(state, batch)
        if state.step == 6:
            before.update({name: tensors_of(getattr(state, name)) for name in ("student", "teacher")})
            views[0][0] = math.nan
        return views

    monkeypatch.setattr(TrainingState, "views_of", with_a_nan)
    settings = {"budget.steps": 7, "compute.checkpoint_every": 7, **SHORT}
    state = trained(tmp_path / "run", {"head.batch_norm": "true", **settings})
    assert state.interval.skipped == 1
    assert not moved(before["student"], tensors_of(state.student))
    changed = moved(before["teacher"], tensors_of(state.teacher))
    assert changed  # the teacher still moves towards the student
    assert not [name for name in changed if "running" in name or "batches" in name]
    assert steps(tmp_path / "run") == [7]


def test_a_run_that_ends_with_what_is_not_finite_says_so(tmp_path, monkeypatch):
    def spoil(teacher, *_):
        teacher[0].fill_(math.inf)

    monkeypatch.setattr(dino_vit.training.loop, "ema_update", torch.no_grad()(spoil))
    with pytest.raises(NotFinite, match=r"not be written: .*not finite; the first is teacher.*Run it again"):
        trained(tmp_path / "run", {"budget.steps": 5, **SHORT})


def test_the_student_sees_a_part_of_the_patches_in_all_steps(tmp_path):
    settings = {"model.patch_drop": 0.75, "budget.steps": 6}
    state, seen = opened(tmp_path / "run", settings | {"optim.warmup_epochs": 0}), []
    blocks = state.student.backbone.blocks

    def note(module, arguments):
        seen.append(arguments[0].shape[0])

    blocks[0].register_forward_pre_hook(note)
    with Interruption() as interruption, Reporter(state) as reporter:
        assert train(state, reporter, interruption)
    views, patch = state.config.views, state.config.model.patch_size
    rows = state.run.global_batch
    patches = (views.global_size // patch) ** 2
    local_tokens = views.local_count * (1 + (views.local_size // patch) ** 2)
    assert seen == [rows * (2 * (1 + patches // 4) + local_tokens)] * 6


def test_what_else_draws_random_numbers_does_not_change_stochastic_depth(tmp_path):
    settings = {"model.drop_path": 0.5, "model.patch_drop": 0.5, "budget.steps": 6, "optim.warmup_epochs": 0}
    trained(tmp_path / "whole", settings)
    state = opened(tmp_path / "run", settings)

    def draw(*_):
        torch.rand(3)

    # After the generator is seeded, before the student draws; as another thread might.
    state.teacher.register_forward_hook(draw)
    with Interruption() as interruption, Reporter(state) as reporter:
        assert train(state, reporter, interruption)
    assert_same_end(tmp_path / "run", tmp_path / "whole", 6)

"""What the loop does, in this process; what it does as a process stands in test_resume.py."""

import copy
import math
import time
from itertools import islice, pairwise
from types import MappingProxyType

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from einops import rearrange

import dino_vit.training.loop
import dino_vit.training.opening
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import NotFinite
from dino_vit.core.runtime import Interruption
from dino_vit.data.sources.open import open_source
from dino_vit.eval.online import OnlineEvaluation
from dino_vit.training.introduction import introduction
from dino_vit.training.loop import train
from dino_vit.training.opening import open_session
from dino_vit.training.reporter import Reporter
from dino_vit.views.preparation import Preparation
from dino_vit.weights import load_backbone
from tests.support.runs import TINY, readings, steps, tensors


def configured(output, settings, defaults=TINY):
    merged = {**defaults, "output": output, **settings}
    return load(PretrainConfig, None, [f"{key}={value}" for key, value in merged.items()])


def opened(output, settings):
    return open_session(configured(output, settings), Accelerator())


def trained(output, settings=MappingProxyType({})):
    """Train in this process and return the session."""
    found = opened(output, settings)
    with Interruption() as interruption, Reporter(found) as reporter:
        assert train(found.session, reporter, interruption) == 0
    return found.session


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def moved(before, after):
    """Return the names of the tensors that changed."""
    return {name for name in before if not torch.equal(before[name], after[name])}


def assert_close(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, msg=lambda text, name=name: name + text, **tolerance)


def test_the_evaluation_before_the_first_step_does_not_count_as_a_steps_time(tmp_path, monkeypatch):
    ends, raw_pixels = [], OnlineEvaluation.raw_pixels

    def evaluated(self):
        found = raw_pixels(self)
        ends.append(time.monotonic())
        return found

    monkeypatch.setattr(OnlineEvaluation, "raw_pixels", evaluated)
    with Reporter(opened(tmp_path, {"run.eval_every": 1})) as reporter:
        reporter.start()
        ((began, step),) = reporter.progress.recent
    assert step == 0
    assert ends[0] <= began


@pytest.fixture
def student_at(monkeypatch):
    """The student's state before each step that was begun, by step."""
    states = {}
    take = dino_vit.training.loop.forward_backward

    def forward_backward(session, *arguments, **keywords):
        states[session.step] = state(session.student)
        return take(session, *arguments, **keywords)

    monkeypatch.setattr(dino_vit.training.loop, "forward_backward", forward_backward)
    return states


@pytest.fixture
def lose(monkeypatch):
    """Return a function that makes the loss of the next steps from `first` to `last` a NaN, so many times."""

    def lose(first, last, times):
        left = {step: times for step in range(first, last + 1)}
        take, loss = dino_vit.training.loop.forward_backward, dino_vit.training.loop.dino_loss
        now = None

        def forward_backward(session, *arguments, **keywords):
            nonlocal now
            now = session.step
            return take(session, *arguments, **keywords)

        def dino_loss(*arguments, **keywords):
            value = loss(*arguments, **keywords)
            if not left.get(now):
                return value
            left[now] -= 1
            return value * math.nan

        monkeypatch.setattr(dino_vit.training.loop, "forward_backward", forward_backward)
        monkeypatch.setattr(dino_vit.training.loop, "dino_loss", dino_loss)

    return lose


def reference_schedule(base, final, total, warmup=0):
    """The reference's table of a rate, by step."""
    rest = np.arange(total - warmup)
    cosine = final + 0.5 * (base - final) * (1 + np.cos(np.pi * rest / len(rest)))
    return np.concatenate([np.linspace(0, base, warmup), cosine])


def determined(module):
    """A state without key biases: no softmax sees them, so AdamW makes full steps of mere rounding."""
    found = state(module)
    for name in [name for name in found if name.endswith("qkv.bias")]:
        query, _, value = found.pop(name).chunk(3)
        found |= {f"{name}.query": query, f"{name}.value": value}
    return found


def test_three_steps_are_those_of_the_reference(tmp_path):
    """The reference's step in its own order, view by view, pair by pair and tensor by tensor."""
    settings = {"budget.steps": 3, "optim.warmup_epochs": 0.25, "optim.freeze_last_layer_epochs": 0.125}
    settings |= {"model.drop_path": 0, "optim.clip": 0.3}
    session = opened(tmp_path / "naive", settings).session
    student, teacher = copy.deepcopy(session.student), copy.deepcopy(session.teacher)
    decayed = [
        p
        for n, p in student.named_parameters()
        if p.requires_grad and not (n.endswith("bias") or p.ndim == 1)
    ]
    others = [
        p for n, p in student.named_parameters() if p.requires_grad and (n.endswith("bias") or p.ndim == 1)
    ]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    lrs = reference_schedule(0.03 * 8 / 256, 1e-6, 3, warmup=2)
    decays, momenta = reference_schedule(0.04, 0.4, 3), reference_schedule(0.996, 1, 3)
    center, losses = torch.zeros(1, 256), []
    for step, batch in enumerate(islice(session.loader.batches(), 3)):
        sizes = [
            rearrange(session.augment(cut, batch.photometry[size]), "(v b) c h w -> v b c h w", b=8)
            for size, cut in batch.views.items()
        ]
        views = [view for size in sizes for view in size]
        for group, decay in zip(optimizer.param_groups, (decays[step], 0.0), strict=True):
            group["lr"], group["weight_decay"] = lrs[step], decay
        with torch.no_grad():
            taught = [teacher([view]).logits() for view in views[:2]]
        said = [student([view]).logits() for view in views]
        loss, terms = 0.0, 0
        for place, logits in enumerate(taught):
            target = torch.softmax((logits - center) / 0.04, dim=-1)
            for other in range(len(views)):
                if other != place:
                    loss = loss + (-target * torch.log_softmax(said[other] / 0.1, dim=-1)).sum(-1).mean()
                    terms += 1
        loss = loss / terms
        optimizer.zero_grad()
        loss.backward()
        for parameter in student.parameters():
            if parameter.grad is not None:
                coefficient = 0.3 / (parameter.grad.norm(2) + 1e-6)
                if coefficient < 1:
                    parameter.grad.mul_(coefficient)
        if step < 1:
            for name, parameter in student.named_parameters():
                if "last_layer" in name:
                    parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(student.parameters(), teacher.parameters(), strict=True):
                its.mul_(momenta[step]).add_((1 - momenta[step]) * mine)
        center = center * 0.9 + torch.cat(taught).mean(0, keepdim=True) * 0.1
        losses.append(loss.item())
    taken = trained(tmp_path / "ours", settings)
    assert [line["loss"] for line in readings(tmp_path / "ours")] == pytest.approx(losses, rel=1e-5)
    assert_close(determined(taken.student), determined(student), atol=1e-5, rtol=1e-4)
    assert_close(determined(taken.teacher), determined(teacher), atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(taken.center.center, center, atol=1e-6, rtol=1e-5)


def test_rates_go_by_step_and_the_teachers_temperature_by_epoch(tmp_path):
    settings = {"loss.teacher_temp": 0.07, "loss.warmup_teacher_temp_epochs": 2, "budget.steps": 32}
    session = opened(tmp_path, settings).session
    rates = [session.rates(step) for step in range(32)]
    assert [r.lr for r in rates] == pytest.approx(reference_schedule(0.03 * 8 / 256, 1e-6, 32, warmup=8))
    assert [r.weight_decay for r in rates] == pytest.approx(reference_schedule(0.04, 0.4, 32))
    assert [r.momentum for r in rates] == pytest.approx(reference_schedule(0.996, 1, 32))
    assert [r.teacher_temp for r in rates] == pytest.approx([0.04] * 8 + [0.07] * 24)


def test_one_pass_of_16_and_four_of_4_are_the_same_step(tmp_path):
    # Of SGD, as AdamW makes full steps of what is nothing but rounding, such as the gradients of key biases.
    settings = {"model.drop_path": 0, "budget.steps": 6, "optim.name": "sgd"}
    whole = trained(tmp_path / "whole", {**settings, "data.batch_size": 16})
    parts = trained(tmp_path / "parts", {**settings, "data.batch_size": 4, "optim.accumulate": 4})
    for name in ("student", "teacher", "center"):
        ours, theirs = state(getattr(parts, name)), state(getattr(whole, name))
        assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    ours, theirs = ([line["loss"] for line in readings(tmp_path / name)] for name in ("parts", "whole"))
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, lose, student_at):
    lose(6, 6, times=1)
    session = trained(tmp_path / "run")
    assert moved(student_at[6], student_at[7]) == set()
    assert moved(student_at[5], student_at[6])
    assert moved(student_at[7], student_at[8])
    assert session.nonfinite_steps == 1
    lines = readings(tmp_path / "run")
    assert [line["nonfinite_steps"] for line in lines] == [0] * 6 + [1] * 14
    assert [line["step"] for line in lines if line["loss"] is None] == [7]
    assert {float(state["step"]) for state in session.optimizer.state.values()} == {19, 15}, "4 frozen"


def test_steps_lost_by_accident_are_taken_again(tmp_path, lose, capsys):
    """The run goes back beyond the checkpoint of step 10, which was written while steps were lost."""
    settings = {"run.max_nonfinite_steps": 3, "run.keep_every": 5}
    trained(tmp_path / "whole", settings)
    lose(8, 10, times=1)
    session = trained(tmp_path / "run", settings)
    said = capsys.readouterr().err
    assert "3 steps in a row were not finite: went back to the checkpoint of step 5" in said
    assert session.nonfinite_steps == 0
    for step in steps(tmp_path / "whole"):
        assert not moved(tensors(tmp_path / "whole", step), tensors(tmp_path / "run", step)), step
    assert readings(tmp_path / "run") == readings(tmp_path / "whole")


def test_steps_lost_again_end_the_run_with_advice(tmp_path, lose, capsys):
    lose(8, 20, times=9)
    with pytest.raises(
        NotFinite, match=r"3 steps in a row up to step 11 .* Try run.precision=no, a lower optim.lr"
    ):
        trained(tmp_path / "run", {"run.max_nonfinite_steps": 3})
    assert "went back to the checkpoint of step 5" in capsys.readouterr().err
    assert 5 in steps(tmp_path / "run")


def test_steps_lost_before_any_checkpoint_end_the_run(tmp_path, lose):
    lose(0, 20, times=1)
    with pytest.raises(NotFinite, match="there is no checkpoint that helps"):
        trained(tmp_path / "run", {"run.max_nonfinite_steps": 3})
    assert steps(tmp_path / "run") == []


def test_the_prototypes_are_frozen_at_first(tmp_path, student_at):
    session = trained(tmp_path / "run", {"budget.steps": 10})
    student_at[10] = state(session.student)
    for (step, before), (_, after) in pairwise(sorted(student_at.items())):
        changed = moved(before, after)
        assert ("head.last_layer.weight_v" in changed) == (step >= 4), step
        assert "head.last_layer.weight_g" not in changed
        assert "backbone.cls_token" in changed or step == 0, "the rate of step 0 is 0"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A run to start from."""
    output = tmp_path_factory.mktemp("weights") / "run"
    trained(output, {"budget.steps": 10})
    return output


FROM = {"init.head_epochs": 0.5, "budget.steps": 10, "run.eval_every": 1, "teacher.momentum": 0.9}


def test_trained_weights_are_kept_while_the_heads_learn(tmp_path, weights, student_at, capsys):
    session = trained(tmp_path / "run", {**FROM, "init.weights": weights})
    start = load_backbone(weights)
    assert not moved(
        state(start), {name[9:]: t for name, t in student_at[0].items() if name[:9] == "backbone."}
    )
    for step in range(9):
        changed = moved(student_at[step], student_at[step + 1])
        assert any(name.startswith("backbone.") for name in changed) == (step >= 4), step
        assert any(name.startswith("head.mlp") for name in changed) or step == 0
    evaluation = OnlineEvaluation(
        source=session.source,
        preparation=Preparation(size=(32, 32), mean=session.config.data.mean, std=session.config.data.std),
        seed=0,
    )
    figure = evaluation(start)["knn"]
    assert session.baseline == figure
    assert f"knn {figure:.1f}" in capsys.readouterr().err


def test_weights_that_are_not_what_the_settings_say_are_refused(tmp_path, weights):
    with pytest.raises(ValueError, match=r"model.width=64 is not what the weights of init.weights are"):
        opened(tmp_path / "run", {**FROM, "init.weights": weights, "model.width": 64})


def test_a_run_from_weights_goes_on_without_them(tmp_path, weights):
    settings = {**FROM, "init.weights": weights}
    trained(tmp_path / "whole", settings)
    trained(tmp_path / "run", {**settings, "run.checkpoint_every": 7})
    (tmp_path / "run" / "checkpoints" / "step-00000010.safetensors").unlink()
    aside = weights.with_name("aside")
    weights.rename(aside)
    try:
        trained(tmp_path / "run", settings)
    finally:
        aside.rename(weights)
    assert not moved(tensors(tmp_path / "whole", 10), tensors(tmp_path / "run", 10))


def test_the_best_is_never_what_is_not_a_number(tmp_path, monkeypatch):
    figures = iter([math.nan, math.nan, 30.0, 20.0])
    monkeypatch.setattr(OnlineEvaluation, "__call__", lambda *_: {"rankme": 1.0, "knn": next(figures)})
    session = trained(tmp_path / "run", {"run.eval_every": 1})
    assert session.baseline is None
    assert session.best == {"figure": "knn", "value": 30.0, "step": 16}
    assert 16 in steps(tmp_path / "run")


class Grey:
    """Images of one channel."""

    fingerprint = "grey"

    def __len__(self):
        return 64

    def read(self, index):
        return torch.randint(256, (1, 32, 32), generator=torch.Generator().manual_seed(index)).byte()

    def label(self, index):
        return None

    def name(self, index):
        return str(index)


def test_weights_of_other_channels_are_inflated(tmp_path, weights, monkeypatch):
    monkeypatch.setattr(dino_vit.training.opening, "open_source", lambda *_: Grey())
    settings = {**FROM, "init.weights": weights, "budget.steps": 9}
    settings |= {f"photometry.{name}": 0 for name in ("saturation", "hue", "grey")}
    with pytest.raises(ValueError, match=r"have 1 channels, not data.channels=5"):
        opened(tmp_path / "run", {**settings, "data.channels": 5, "data.mean": "null", "data.std": "null"})
    settings |= {"data.channels": 1, "data.mean": "[0.5]", "data.std": "[0.25]"}
    session = opened(tmp_path / "run", settings).session
    assert not moved(state(session.student.backbone), state(load_backbone(weights, channels=1)))
    assert trained(tmp_path / "run", settings).best["figure"] == "rankme"


def test_labels_of_a_file_are_what_a_run_is_evaluated_with(tmp_path):
    source = open_source("synthetic:64:32")
    np.save(tmp_path / "images.npy", np.stack([source.read(index).numpy() for index in range(64)]))
    rows = "".join(f"{index:09d},{source.label(index)}\n" for index in range(64))
    (tmp_path / "labels.csv").write_text(rows)
    settings = {"data.source": tmp_path / "images.npy", "run.eval_every": 1, "budget.steps": 10}
    assert trained(tmp_path / "without", settings).best["figure"] == "rankme"
    settings["data.labels"] = tmp_path / "labels.csv"
    assert trained(tmp_path / "with", settings).best["figure"] == "knn"


def test_recipe_auto_says_what_it_chose_and_why(tmp_path):
    settings = {"recipe": "auto", "data.source": "synthetic:640:32", "run.precision": "no", "data.workers": 0}
    settings |= {"model.arch": "null", "model.width": 32, "model.depth": 2, "model.heads": 2}
    found = open_session(configured(tmp_path / "run", settings, {"run.trackers": "[]"}), Accelerator())
    said = "\n".join(introduction(found))
    config = found.session.config
    for key, value in (("head.prototypes", 256), ("model.patch_size", 4), ("views.global_size", 32)):
        assert f"  {key}={value}: " in said
    assert config.head.prototypes == len(found.session.student.head.last_layer.weight_v) == 256
    assert f"budget.epochs={config.budget.epochs}: " in said


def test_float16_finds_its_scale_by_losing_steps(tmp_path):
    session = trained(tmp_path / "run", {"run.precision": "fp16", "run.max_nonfinite_steps": 2})
    lost = session.nonfinite_steps
    assert 2 < lost < 16
    assert session.scaler.get_scale() == 65536 / 2**lost
    losses = [line["loss"] for line in readings(tmp_path / "run")]
    assert losses.count(None) == lost
    assert None not in losses[-5:]
    stored = session.checkpoints.newest().metadata
    assert stored["precision"] == "fp16"
    assert stored["scaler"] == session.scaler.state_dict()


def test_float16_gives_up_when_its_scale_cannot_fall(tmp_path, lose):
    lose(0, 40, times=1)
    with pytest.raises(NotFinite, match="16 steps in a row"):
        trained(tmp_path / "run", {"run.precision": "fp16", "budget.steps": 40})


def test_another_precision_on_this_machine_is_said(tmp_path):
    settings = {"run.precision": "bf16", "budget.steps": 10}
    trained(tmp_path / "run", settings)
    with pytest.raises(ValueError, match=r"run.precision was bf16 and is fp16"):
        opened(tmp_path / "run", {**settings, "run.precision": "fp16"})
    session = opened(tmp_path / "run", {**settings, "run.precision": "fp16", "run.resume": "changed"}).session
    assert session.scaler.is_enabled()


def test_auto_precision_that_means_something_else_here_is_said(tmp_path, monkeypatch):
    for chosen in ("bf16", "no"):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda chosen=chosen: chosen == "bf16")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        settings = {"run.precision": "auto", "budget.steps": 10}
        if chosen == "bf16":
            trained(tmp_path / "run", settings)
        else:
            with pytest.raises(ValueError, match=r"run.precision=auto was bf16 and is no here"):
                opened(tmp_path / "run", settings)


@pytest.mark.filterwarnings("ignore")  # what the compiler's own modules warn of
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_networks_train_as_plain_ones_do(tmp_path, monkeypatch, backend):
    """Captured whole; the generated code itself takes minutes to make and is left to `make test-slow`."""
    settings = {"model.drop_path": 0, "optim.lr": 0.003}
    trained(tmp_path / "plain", settings)
    used = []
    compile_module = torch.nn.Module.compile

    def compile(module, **keywords):
        used.append(module)
        compile_module(module, backend=backend, fullgraph=True, **keywords)

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    trained(tmp_path / "compiled", {**settings, "run.compile": "true"})
    assert len(used) == 2, "student and teacher"
    plain, compiled = (
        [reading["loss"] for reading in readings(tmp_path / name)] for name in ("plain", "compiled")
    )
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert plain[0] != plain[-1]

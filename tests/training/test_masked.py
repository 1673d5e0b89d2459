"""Runs that learn from masked patches too, with and without the other terms of DINOv2's loss."""

import copy
import shutil
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from dino_vit import load_backbone, save_backbone
from dino_vit.models.student_teacher import Network
from dino_vit.training.loop import take_step
from dino_vit.training.state import TrainingState
from tests.support.backbones import backbone
from tests.support.processes import finish, pair, torchrun_environs
from tests.support.runs import assert_same_readings, history, run, steps, tensors
from tests.support.training import moved, opened, tensors_of, trained

PATCHES = {"loss.patch_weight": 1, "views.global_size": 48, "model.drop_path": 0}
ALL_TERMS = {**PATCHES, "loss.koleo_weight": 0.1, "loss.centering": "sinkhorn", "head.shared": "false"}
ALL_TERMS["loss.edge_weight"] = 2


def softmaxes(tokens, head, temperature, center=0):
    logits = F.normalize(head.mlp(tokens), dim=-1) @ head.last_layer.weight().T
    return ((logits - center) / temperature).log_softmax(dim=-1)


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_is_that_of_the_formulas(tmp_path, shared):
    """View by view and patch by patch, every token computed; its gradients are those of one pass."""
    settings = {**PATCHES, "head.shared": str(shared).lower(), "views.local_count": 1}
    state = opened(tmp_path, {**settings, "loss.patch_weight": 0.7})
    state.student.train()
    torch.nn.init.normal_(state.student.backbone.mask_token)
    with torch.no_grad():
        for parameter in state.teacher.parameters():  # another network than the student
            parameter.add_(0.02 * torch.randn_like(parameter))
        for center in state.objective.state.values():
            center.center.normal_(std=0.1)
    student, teacher = copy.deepcopy(state.student), state.teacher
    batch = next(iter(state.loader.batches()))
    rates = state.plan.rates(0)
    views = state.views_of(batch)
    out = state.objective(
        state.student, teacher, views, batch.masks, images=8, teacher_temperature=rates.teacher_temp
    )
    out.total.backward()

    globals_, locals_ = views
    hidden = batch.masks.mask
    assert hidden.any(1).sum() == 8, "half of 16 views"
    heads = [(net.head, getattr(net, "patch_head", net.head)) for net in (student, teacher)]
    embedded = [student.backbone.embed_patches(globals_, hidden), teacher.backbone.embed_patches(globals_)]
    tokens = []
    for net, parts in zip((student, teacher), embedded, strict=True):
        for block in net.backbone.blocks:
            parts = block(parts)
        tokens.append(net.backbone.norm(parts))
    temperatures = 0.1, rates.teacher_temp
    student_logs = [
        *softmaxes(tokens[0][:, 0], heads[0][0], temperatures[0]).chunk(2),
        softmaxes(student.backbone(locals_), heads[0][0], temperatures[0]),
    ]
    center = state.objective.state["cls"].center
    teacher_shares = softmaxes(tokens[1][:, 0], heads[1][0], temperatures[1], center).exp().chunk(2)
    pairs = [(t, s) for t in range(2) for s in range(3) if s != t]
    cls = sum(-(teacher_shares[t] * student_logs[s]).sum(1).mean() for t, s in pairs) / len(pairs)
    patch = 0.0
    for view in range(16):
        places = hidden[view].nonzero()[:, 0]
        if len(places):
            mine = softmaxes(tokens[0][view, 1 + places], heads[0][1], temperatures[0])
            center = state.objective.state["patch"].center
            theirs = softmaxes(tokens[1][view, 1 + places], heads[1][1], temperatures[1], center).exp()
            patch = patch - (theirs * mine).sum(1).mean() / 16
    assert_close(out.main, cls, atol=1e-5, rtol=1e-5)
    assert_close(out.terms["patch"], patch, atol=1e-5, rtol=1e-5)
    assert_close(out.total, cls + 0.7 * patch, atol=1e-5, rtol=1e-5)
    (cls + 0.7 * patch).backward()
    for name, parameter in state.student.named_parameters():
        if parameter.requires_grad:
            assert_close(parameter.grad, student.get_parameter(name).grad, atol=1e-5, rtol=1e-3, msg=name)


def test_the_passes_of_a_step_are_one(tmp_path):
    """Of SGD, as AdamW makes full steps of mere rounding, such as the gradients of key biases."""
    settings = {**PATCHES, "budget.steps": 6, "optim.name": "sgd"}
    whole = trained(tmp_path / "whole", {**settings, "data.batch_size": 16})
    parts = trained(tmp_path / "parts", {**settings, "data.batch_size": 4, "optim.accumulate": 4})
    keys = "loss", "patch", "output_entropy", "entropy_gap", "student_divergence"
    keys += "prototypes_in_use", "rows", "patch_output_entropy", "patch_entropy_gap", "patch_rows"
    assert_same_readings(tmp_path / "parts", tmp_path / "whole", *keys, rtol=1e-4)
    for networks in ((parts.student, whole.student), (parts.teacher, whole.teacher)):
        assert_close(*map(tensors_of, networks), atol=1e-6, rtol=1e-4)
    for name, center in whole.objective.state.items():
        assert_close(parts.objective.state[name].center, center.center, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("shared", ["true", "false"])
def test_a_pass_may_have_one_masked_patch_or_none(tmp_path, monkeypatch, shared):
    """As one image of few patches has; BatchNorm gets as many rows. A step has some."""
    counts, views_of = [], TrainingState.views_of

    def counted(state, batch):
        counts.append(len(batch.masks.mask_indices))
        return views_of(state, batch)

    monkeypatch.setattr(TrainingState, "views_of", counted)
    settings = {"loss.patch_weight": 1, "data.batch_size": 1, "optim.accumulate": 4, "budget.steps": 12}
    trained(
        tmp_path, {**settings, "head.batch_norm": "true", "head.shared": shared, "optim.warmup_epochs": 0.1}
    )
    lines = history(tmp_path)
    assert {0, 1} < {*counts}
    assert [line["patch_rows"] for line in lines] == [sum(counts[i : i + 4]) for i in range(0, 48, 4)]
    assert all(line["loss"] > 0 and line["patch_entropy_gap"] is not None for line in lines)


def test_two_processes_follow_one(tmp_path):
    settings = {**ALL_TERMS, "budget.steps": 8}
    run(tmp_path / "alone", {**settings, "data.batch_size": 16})
    finish(pair(tmp_path / "run", {**settings, "data.batch_size": 8}, torchrun_environs()))
    keys = "loss", "patch", "gradient_norm", "patch_entropy_gap", "patch_output_entropy"
    assert_same_readings(tmp_path / "run", tmp_path / "alone", *keys, atol=2e-4, rtol=1e-4)
    centers = [tensors(tmp_path / name, 8)["patch.center"] for name in ("run", "alone")]
    assert_close(*centers, atol=1e-4, rtol=1e-3)


def test_all_that_should_learn_learns(tmp_path):
    settings = {**ALL_TERMS, "optim.freeze_last_layer_epochs": 0.125}
    settings |= {"optim.warmup_epochs": 0}
    state = opened(tmp_path, {**settings, "loss.centering": "ema"})
    before = tensors_of(state.student)
    batches = state.loader.batches()
    take_step(state, batches)
    frozen = {"head.last_layer.weight_v", "patch_head.last_layer.weight_v"}
    fixed = {"head.last_layer.weight_g", "patch_head.last_layer.weight_g"}
    assert before.keys() - moved(before, tensors_of(state.student)) == frozen | fixed
    assert "backbone.mask_token" in before
    assert state.objective.state["patch"].center.any()
    for _ in range(2):
        take_step(state, batches)
    assert before.keys() - moved(before, tensors_of(state.student)) == fixed


@pytest.mark.slow
def test_a_compiled_run_has_one_graph_for_all_steps(tmp_path):
    """Though each step has another number of masked patches."""
    state = opened(tmp_path, {**ALL_TERMS, "compute.compile": "true"})
    counters = CompileCounter(), CompileCounter()
    for network, counter in zip((state.student, state.teacher), counters, strict=True):
        run = Network.run_backbone.__get__(network)  # which is compiled without the time of a real backend
        network.run_backbone = torch.compile(run, backend=counter, dynamic=False)
    masked = set()
    for step, batch in enumerate(islice(state.loader.batches(), 6)):
        views, rates = state.views_of(batch), state.plan.rates(step)
        arguments = state.student, state.teacher, views, batch.masks
        state.objective(*arguments, images=8, teacher_temperature=rates.teacher_temp).total.backward()
        masked.add(len(batch.masks.mask_indices))
    assert len(masked) > 1
    assert [counter.frame_count for counter in counters] == [1, 1]


def test_a_gram_teacher_with_other_pixels_is_refused(tmp_path):
    save_backbone(backbone(), tmp_path / "vit.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    settings = {"views.global_size": 48, "gram.weights": tmp_path / "vit.safetensors"}
    with pytest.raises(ValueError, match=r"has data.mean of .*they must be the same"):
        opened(tmp_path / "other", {**settings, "data.mean": "[0.1, 0.1, 0.1]"})


def test_masked_patches_cannot_come_or_go_halfway(tmp_path, caplog):
    caplog.set_level("INFO", "dino_vit")
    trained(tmp_path / "run", {"budget.steps": 10})
    changed = {**PATCHES, "views.global_size": 32, "budget.steps": 20, "compute.resume": "changed"}
    with pytest.raises(
        ValueError, match=r"a different network or optimiser.* another output and init.weights="
    ):
        opened(tmp_path / "run", changed)
    started = {**changed, "init.weights": tmp_path / "run", "init.head_epochs": 0.5, "compute.resume": "same"}
    trained(tmp_path / "other", started)
    assert "added a mask token of zeros" in caplog.text
    assert steps(tmp_path / "other")[-1] == 20
    back = {"init.weights": tmp_path / "other", "init.head_epochs": 0.5, "views.global_size": 32}
    assert opened(tmp_path / "third", back).student.backbone.mask_token is None


@pytest.mark.parametrize(
    ("terms", "scale"), [({"views.global_size": 48, "model.drop_path": 0}, 1), (PATCHES, 2)]
)
def test_patches_are_held_to_an_earlier_teacher(tmp_path, terms, scale):
    """Begun from a kept checkpoint of the run itself; the term is that of the formula."""
    trained(tmp_path / "run", {**terms, "budget.steps": 10})
    kept = tmp_path / "earlier.safetensors"
    shutil.copy(max((tmp_path / "run" / "checkpoints").iterdir()), kept)
    settings = {**terms, "budget.steps": 14, "compute.resume": "changed"}
    settings |= {"gram.weights": kept, "gram.weight": 2, "gram.scale": scale}
    state = opened(tmp_path / "run", settings)
    batch, rates = next(iter(state.loader.batches(10))), state.plan.rates(10)
    views = state.views_of(batch)
    out = state.objective(
        state.student, state.teacher, views, batch.masks, images=8, teacher_temperature=rates.teacher_temp
    )
    earlier, seen = load_backbone(kept), views[0]
    assert seen.shape[-1] == 48 * scale
    theirs = earlier.forward_features(seen)[:, 1:].unflatten(1, (6 * scale, 6 * scale)).permute(0, 3, 1, 2)
    if scale > 1:
        theirs = F.interpolate(theirs, size=(6, 6), mode="bicubic", antialias=True)
        seen = F.interpolate(seen, size=48, mode="bicubic", antialias=True)
    hidden = batch.masks.mask if batch.masks else None
    ours = state.student.backbone.forward_features(seen, hidden)[:, 1:]
    ours, theirs = F.normalize(ours, dim=2), F.normalize(theirs.flatten(2).mT, dim=2)
    gram = ((ours @ ours.mT - theirs @ theirs.mT) ** 2).mean()
    assert_close(out.terms["gram"], gram)
    assert_close(out.total, out.main + out.terms.get("patch", 0) + 2 * gram)
    trained(tmp_path / "run", settings)
    found = [line.get("gram") for line in history(tmp_path / "run")]
    assert found[:10] == [None] * 10
    assert all(value > 0 for value in found[10:])


@pytest.mark.parametrize("local_size", [16, 96])  # 96: that of the enlarged views
def test_views_cut_out_at_twice_the_size_are_the_same_views(tmp_path, local_size):
    settings = {"views.local_size": local_size}
    save_backbone(backbone(), tmp_path / "vit.safetensors")
    outs, views = [], []
    for scale in (1, 2):
        gram = {"gram.weights": tmp_path / "vit.safetensors", "gram.scale": scale}
        state = opened(tmp_path / f"at{scale}", {**PATCHES, **settings, **gram})
        batch = next(iter(state.loader.batches()))
        seen, networks = state.views_of(batch), (state.student, state.teacher)
        views.append(seen[0][:16])
        outs.append(state.objective(*networks, seen, batch.masks, images=8, teacher_temperature=0.04))
    reduced = F.interpolate(views[1], size=48, mode="bicubic", antialias=True)
    assert (reduced - views[0]).abs().mean() < 0.05  # a solarised or clamped pixel may differ more
    assert_close(outs[1].main, outs[0].main, atol=1e-2, rtol=0)

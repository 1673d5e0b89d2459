"""Runs whose student also predicts the gradients around its patches."""

import pytest
import torch

from dino_vit import load_backbone
from dino_vit.method.feature_losses import gradient_loss
from tests.support.runs import history, tensors
from tests.support.training import opened, trained

GRADIENTS = {"loss.gradient_weight": 2, "model.patch_drop": 0.5}


def test_the_loss_has_the_term_and_only_the_student_has_its_head(tmp_path):
    trained(tmp_path, {**GRADIENTS, "budget.steps": 16, "optim.accumulate": 2, "compute.precision": "bf16"})
    assert all(0 < record["gradient_loss"] < 2 for record in history(tmp_path))
    heads = {name.partition(".")[0] for name in tensors(tmp_path, 16) if "gradient_head" in name}
    assert heads == {"student"} | {name for name in heads if name.startswith("optimizer")}
    for network in ("teacher", "student"):
        assert not any("gradient" in name for name in load_backbone(tmp_path, network=network).state_dict())


def test_the_loss_counts_the_term_of_the_patches_that_were_seen_by_its_weight(tmp_path):
    state = opened(tmp_path, {**GRADIENTS, "loss.gradient_weight": 3})
    state.student.train()
    batch = next(iter(state.loader.batches()))
    views, images = state.views_of(batch), len(batch.samples)
    state.student.generator = torch.Generator().manual_seed(1)
    terms, _ = state.objective(
        state.student, state.teacher, views, None, images=images, teacher_temperature=0.04
    )
    state.student.generator = torch.Generator().manual_seed(1)  # the same patches
    out, grid = state.student(views), state.student.backbone.grid_of(*views[0].shape[-2:])
    predicted = out.gradients.unflatten(0, (len(views[0]), -1))
    expected = gradient_loss(predicted, views[0], grid, out.kept_patches)
    torch.testing.assert_close(terms.gradients, expected)
    torch.testing.assert_close(terms.loss, terms.cls + 3 * expected)


def test_the_first_half_of_the_blocks_learns_gradients(tmp_path):
    state = opened(tmp_path, {**GRADIENTS, "model.depth": 4})
    state.student.train()
    views = state.views_of(next(iter(state.loader.batches())))
    out = state.student(views)
    grid = state.student.backbone.grid_of(*views[0].shape[-2:])
    predicted = out.gradients.unflatten(0, (len(views[0]), -1))
    gradient_loss(predicted, views[0], grid, out.kept_patches).backward()
    learning = [block.mlp.fc1.weight.grad is not None for block in state.student.backbone.blocks]
    assert learning == [True, True, False, False]


@pytest.mark.parametrize(
    "settings", [{"model.registers": 2}, {"loss.patch_weight": 1, "model.patch_drop": 0}]
)
def test_patches_that_predict_are_those_of_the_global_views(tmp_path, settings):
    state = opened(tmp_path, {**GRADIENTS, **settings, "views.global_size": 48})
    state.student.train()
    views = state.views_of(next(iter(state.loader.batches())))
    out = state.student(views)
    patches = torch.Size(state.student.backbone.grid_of(48, 48)).numel()
    kept = patches // 2 if "model.registers" in settings else patches
    assert out.gradients.shape == (len(views[0]) * kept, 81)
    if out.kept_patches is not None:
        assert out.kept_patches.min() == 0
        assert out.kept_patches.max() == patches - 1

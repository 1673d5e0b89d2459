"""Runs whose student also predicts the edges around its patches."""

import pytest
import torch

from dino_vit import load_backbone
from dino_vit.method.terms.edges import KEPT, PREDICTED, edge_loss, edges_around
from tests.support.runs import history, tensors
from tests.support.training import opened, trained

EDGES = {"loss.edge_weight": 2, "model.patch_drop": 0.5}


def predicted_by(state):
    """Return the global views of a batch, what patches predict of them, and the indices of these."""
    state.student.train()
    batch = next(iter(state.loader.batches()))
    views = state.views_of(batch)
    outputs = state.student(views, [PREDICTED, KEPT], kept=batch.kept)
    return views[0], outputs[PREDICTED].unflatten(0, (len(views[0]), -1)), outputs.get(KEPT)


def loss_of(state, views, predicted, kept):
    around = edges_around(views, state.student.backbone.grid_of(*views.shape[-2:]))
    return edge_loss(predicted, around - around.mean((0, 1)), kept)


def test_the_loss_has_the_term_and_only_the_student_has_its_head(tmp_path):
    trained(tmp_path, {**EDGES, "budget.steps": 16, "optim.accumulate": 2, "compute.precision": "bf16"})
    assert all(0 < record["edges"] < 2 for record in history(tmp_path))
    heads = {name.partition(".")[0] for name in tensors(tmp_path, 16) if "edges_head" in name}
    assert heads == {"student"} | {name for name in heads if name.startswith("optimizer")}
    for network in ("teacher", "student"):
        assert not any("edges" in name for name in load_backbone(tmp_path, network=network).state_dict())


def test_the_loss_counts_the_term_of_the_patches_that_were_seen_by_its_weight(tmp_path):
    state = opened(tmp_path, {**EDGES, "loss.edge_weight": 3})
    expected = loss_of(state, *predicted_by(state))
    batch = next(iter(state.loader.batches()))
    given = state.student, state.teacher, state.views_of(batch), None
    settings = {"images": len(batch.samples), "teacher_temperature": 0.04, "kept": batch.kept}
    losses = state.objective(*given, **settings)
    torch.testing.assert_close(losses.terms["edges"], expected)
    torch.testing.assert_close(losses.total, losses.main + 3 * expected)


def test_the_first_half_of_the_blocks_learns_edges(tmp_path):
    state = opened(tmp_path, {**EDGES, "model.depth": 4})
    loss_of(state, *predicted_by(state)).backward()
    learning = [block.mlp.fc1.weight.grad is not None for block in state.student.backbone.blocks]
    assert learning == [True, True, False, False]


@pytest.mark.parametrize(
    "settings", [{"model.registers": 2}, {"loss.patch_weight": 1, "model.patch_drop": 0}]
)
def test_patches_that_predict_are_those_of_the_global_views(tmp_path, settings):
    state = opened(tmp_path, {**EDGES, **settings, "views.global_size": 48})
    views, predicted, indices = predicted_by(state)
    patches = torch.Size(state.student.backbone.grid_of(48, 48)).numel()
    kept = patches // 2 if "model.registers" in settings else patches
    assert predicted.shape == (len(views), kept, 81)
    assert (indices is None) == (kept == patches)
    if indices is not None:
        assert indices.min() == 0
        assert indices.max() == patches - 1

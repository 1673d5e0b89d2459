"""Runs that imitate the features of a frozen backbone without heads: a file, another library's, timm's."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import Dinov2Config, Dinov2Model

import dino_vit
from dino_vit.method.terms.imitation import resize_patches
from dino_vit.models.timm_backbone import TimmBackbone
from tests.support.backbones import backbone
from tests.support.runs import history, tensors
from tests.support.training import assert_resumes_exactly, opened, tensors_of, trained

STATISTICS = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("teachers") / "wide.safetensors"
    dino_vit.save_backbone(backbone(width=48, heads=3), path, **STATISTICS)
    return path


def test_the_loss_is_that_of_the_cosines_through_linear_layers(tmp_path, weights):
    state = opened(
        tmp_path / "run", {"teacher.weights": weights, "model.drop_path": 0, "teacher.patch_weight": 0.5}
    )
    assert (state.config.data.mean, state.config.data.std) == tuple(STATISTICS.values())
    batch = next(state.loader.batches())
    views, images = state.views_of(batch), len(batch.samples)
    found = state.objective(
        state.student, state.teacher, views, None, images=images, teacher_temperature=0.04
    )
    with torch.no_grad():
        theirs = dino_vit.load_backbone(weights).forward_features(views[0])
        ours = state.student.backbone.forward_features(views[0])
        into, into_patches = state.student.head.linear, state.student.patch_head.linear
        cls = F.cosine_similarity(into(ours[:, 0]), theirs[:, 0])
        local = into(state.student.backbone(views[1])).chunk(2)
        local_cosines = [F.cosine_similarity(one, two) for one in local for two in theirs[:, 0].chunk(2)]
        patches = F.cosine_similarity(into_patches(ours[:, 1:]), theirs[:, 1:], dim=-1)
        expected = 1 - torch.stack([cls.mean(), torch.stack(local_cosines).mean()]).mean()
    assert_close(found.main.detach(), expected, atol=1e-5, rtol=1e-5)
    assert_close(found.terms["imitated_patches"].detach(), 1 - patches.mean(), atol=1e-5, rtol=1e-5)
    assert_close(found.total, found.main + 0.5 * found.terms["imitated_patches"])


def test_a_run_resumes_exactly(tmp_path, weights, capsys, caplog):
    caplog.set_level("INFO", "dino_vit")  # at which a run shows its lines
    assert_resumes_exactly(tmp_path, {"teacher.weights": weights, "compute.eval_every": 5 / 8})
    said = capsys.readouterr().err
    assert "imitates the features of" in said
    assert "gap" not in said.split("step  1/10")[-1]
    assert "cls.center" not in tensors(tmp_path / "run", 10)
    last = history(tmp_path / "run")[-1]
    assert (last["prototypes"], last["entropy_gap"], last["excess"]) == (None, None, None)
    assert last["imitated_patches"] is not None


def test_patches_of_another_size_are_resized_to_the_grid_of_the_student(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2}
    Dinov2Model(Dinov2Config(**sizes, image_size=32, patch_size=16)).save_pretrained(tmp_path / "dinov2")
    state = opened(tmp_path / "run", {"teacher.weights": tmp_path / "dinov2", "model.drop_path": 0})
    batch = next(state.loader.batches())
    views = state.views_of(batch)
    found = state.objective(state.student, state.teacher, views, None, images=8, teacher_temperature=0.04)
    with torch.no_grad():
        theirs = dino_vit.load_backbone(tmp_path / "dinov2").forward_features(views[0])[:, 1:]
        ours = state.student.patch_head.linear(state.student.backbone.forward_features(views[0])[:, 1:])
        cosines = F.cosine_similarity(ours, resize_patches(theirs, (2, 2), (4, 4)), dim=-1)
    assert_close(found.terms["imitated_patches"].detach(), 1 - cosines.mean(), atol=1e-5, rtol=1e-5)


def test_a_model_of_timm_teaches_and_a_student_may_teach_on(tmp_path):
    torch.manual_seed(0)
    model = TimmBackbone(name="test_resnet", image_size=64).eval()
    dino_vit.save_backbone(model, tmp_path / "resnet.safetensors", **STATISTICS)
    size = {"views.global_size": 64, "views.local_size": 32, "data.source": "synthetic:64:64"}
    size |= {"compute.precision": "bf16", "model.patch_size": 16, "budget.steps": 2}
    size |= {"optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
    before = tensors_of(model)
    state = trained(tmp_path / "run", {"teacher.weights": tmp_path / "resnet.safetensors", **size})
    assert_close(tensors_of(state.objective.frozen_teacher.backbone), before, atol=0, rtol=0)
    trained(tmp_path / "next", {"teacher.weights": tmp_path / "run", **size})
    assert history(tmp_path / "next")[-1]["prototypes"] is None

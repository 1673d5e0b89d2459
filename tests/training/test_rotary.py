"""Runs with rotary positions: from scratch and from DINOv3's weights."""

import pytest
import torch
from transformers import DINOv3ViTConfig, DINOv3ViTModel

import dino_vit
from dino_vit.models.student_teacher import Need
from tests.support.training import opened, trained

ROTARY = {"model.positions": "rotary", "views.local_size": 24}


def test_training_goes_on_from_dinov3(tmp_path):
    """With the loss of DINOv2, at a size that the weights were not trained at; then it is looked at."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = DINOv3ViTConfig(
        **sizes, num_register_tokens=4, image_size=32, patch_size=8, layerscale_value=0.1
    )
    DINOv3ViTModel(config).save_pretrained(tmp_path / "dinov3")
    settings = {"method": "dinov2", "init.weights": tmp_path / "dinov3", "init.head_epochs": 0.5}
    settings |= {"views.global_size": 48, "views.local_size": 24, "optim.lr": 1e-3, "optim.min_lr": 0}
    settings |= {"loss.warmup_teacher_temp_epochs": 0, "loss.teacher_temp": 0.04}
    settings |= {"model.width": 64, "model.depth": 2, "model.heads": 2}
    state = opened(tmp_path / "run", settings)
    assert state.config.model.positions == "rotary"
    assert state.student.backbone.config.rotary_rescale == 2
    trained(tmp_path / "run", settings)
    options = {"weights": tmp_path / "run", "cache": tmp_path, "verbose": False}
    assert dino_vit.knn("synthetic:60:48", k=3, **options).figure.images == 60
    maps = dino_vit.attention(
        "synthetic:4:48", weights=tmp_path / "run", output=tmp_path / "maps", verbose=False
    )
    assert len(maps.maps) == 4


@torch.no_grad()
@pytest.mark.parametrize("network", ["teacher", "student"])
def test_the_teacher_alone_is_a_function_of_the_images(tmp_path, network):
    """The student's coordinates are rescaled at random, and its branches dropped."""
    state = opened(tmp_path, {**ROTARY, "model.drop_path": 0.2})
    views = state.views_of(next(state.loader.batches()))
    cls = Need("cls")
    outputs = [getattr(state, network)(views, [cls])[cls] for _ in range(2)]
    assert torch.equal(*outputs) == (network == "teacher")
    state.evaluations.evaluate_baseline(state.teacher)
    assert torch.equal(outputs[0], state.teacher(views, [cls])[cls]) == (network == "teacher")


@torch.no_grad()
def test_batch_norm_of_the_teacher_takes_the_statistics_of_the_batch(tmp_path):
    """As in 2021."""
    state = opened(tmp_path, {**ROTARY, "head.batch_norm": "true"})
    views = state.views_of(next(state.loader.batches()))
    features = Need("cls", "head")
    whole, part = (state.teacher(given, [features])[features] for given in (views, [views[0][:8]]))
    assert not torch.allclose(whole[:8], part, atol=1e-3)

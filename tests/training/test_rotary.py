"""Runs with rotary positions: from scratch and from DINOv3's weights, resumed, compiled, with masks."""

import signal
from functools import partial

import pytest
import torch
from transformers import DINOv3ViTConfig, DINOv3ViTModel

import dino_vit
from tests.support.runs import assert_same_end, run, signal_within_step, steps
from tests.support.training import opened

ROTARY = {"model.positions": "rotary", "views.local_size": 24}
PATCHES = {"loss.patch_weight": 1, "views.global_size": 48, "loss.koleo_weight": 0.1}


@pytest.mark.parametrize("more", [{}, {**PATCHES, "model.registers": 2}, {"run.compile": "true"}], ids=len)
def test_a_run_resumes_exactly(tmp_path, more):
    """The coordinates are rescaled by random factors of the step."""
    settings = {**ROTARY, **more}
    run(tmp_path / "whole", settings)
    run(tmp_path / "run", settings, code=75, before=partial(signal_within_step, 13, signal.SIGTERM))
    run(tmp_path / "run", settings)
    assert steps(tmp_path / "run")[-1] == 20
    assert_same_end(tmp_path / "run", tmp_path / "whole", 20)
    model = dino_vit.load_backbone(tmp_path / "run")
    assert model.rotary
    assert model.pos_embed is None
    assert model.rotary_rescale == 2


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
    state = opened(tmp_path / "run", settings).state
    assert state.config.model.positions == "rotary"
    assert state.student.backbone.rotary_rescale == 2
    run(tmp_path / "run", settings)
    options = {"weights": tmp_path / "run", "cache": tmp_path, "verbose": False}
    assert dino_vit.knn("synthetic:60:48", k=3, **options).top1.images == 60
    maps = dino_vit.attention(
        "synthetic:4:48", weights=tmp_path / "run", output=tmp_path / "maps", verbose=False
    )
    assert len(maps.maps) == 4


def test_channels_that_cannot_be_turned_are_refused(tmp_path):
    said = run(tmp_path, {**ROTARY, "model.width": 30, "model.heads": 5}, code=2)
    assert "turns the channels of a head in fours, but a head has 6; use other model.heads" in said


def test_settings_of_positions_are_those_of_the_weights(tmp_path):
    run(tmp_path / "learned", {"budget.steps": 10})
    settings = {"init.weights": tmp_path / "learned", "init.head_epochs": 0.5, "model.positions": "rotary"}
    said = run(tmp_path / "run", settings, code=2)
    assert "model.positions=rotary does not match the weights" in said
    run(tmp_path / "rotary", {**ROTARY, "budget.steps": 10})
    settings = {"init.weights": tmp_path / "rotary", "init.head_epochs": 0.5, "model.rotary_rescale": "null"}
    state = opened(tmp_path / "run", {**settings, "views.local_size": 24}).state
    assert state.student.backbone.rotary
    assert state.student.backbone.rotary_rescale is None

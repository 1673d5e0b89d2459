"""Runs of timm's models: resumed, over two processes, from trained weights, and what they are refused."""

import re

import pytest
import torch
from torch.testing import assert_close

import dino_vit
from dino_vit.models.timm_backbone import TimmBackbone
from tests.support.processes import run_in_two
from tests.support.runs import RESNET, TIMM, assert_same_readings, tensors
from tests.support.training import opened, trained

CONVNEXT = {**TIMM, "model.arch": "timm:test_convnext"}


def test_two_processes_with_batch_norm_follow_one(tmp_path):
    settings = {**RESNET, "data.source": "synthetic:32:64", "budget.steps": 5, "model.drop_path": 0}
    settings["optim.name"] = "sgd"
    trained(tmp_path / "alone", {**settings, "data.batch_size": 8})
    run_in_two(tmp_path / "run", {**settings, "data.batch_size": 4})
    assert_same_readings(tmp_path / "run", tmp_path / "alone", "loss", atol=1e-4, rtol=1e-4)
    assert_same_readings(tmp_path / "run", tmp_path / "alone", "gradient_norm", atol=0, rtol=1e-2)
    states = (tensors(tmp_path / name, 5).items() for name in ("run", "alone"))
    ours, theirs = ({name: t for name, t in one if name.endswith("running_mean")} for one in states)
    assert len(ours) > 10
    assert_close(ours, theirs, atol=1e-3, rtol=1e-2)


def test_training_goes_on_from_weights_of_the_same_model(tmp_path):
    first = tmp_path / "first.safetensors"
    dino_vit.save_backbone(TimmBackbone(name="test_convnext", image_size=64), first)
    settings = {"init.weights": first, "init.head_epochs": 0.5}
    with pytest.raises(
        ValueError, match=r"model.arch=timm:test_resnet \(there timm:test_convnext\) does not"
    ):
        opened(tmp_path / "other", {**RESNET, **settings})
    backbone = opened(tmp_path / "run", {**CONVNEXT, **settings}).student.backbone
    assert isinstance(backbone, TimmBackbone)
    loaded = dino_vit.load_backbone(first).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in backbone.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"model.registers": 2},
            "built as timm defines it, without masked patches; set model.registers=0",
        ),
        ({"loss.patch_weight": 1}, "without masked patches; set loss.patch_weight=0"),
        ({"model.arch": "timm:test_convnext.r160_in1k"}, "init.weights=timm:test_convnext.r160_in1k"),
        ({"model.arch": "timm:test_vit", "views.local_size": 40}, "takes no images of 40 × 40 pixels"),
        (
            {"model.arch": "timm:test_resnet", "model.grad_checkpointing": "true"},
            "would count each batch twice",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_timm_has_no_use_for_is_refused(tmp_path, settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        opened(tmp_path / "run", {**CONVNEXT, **settings})


def test_dinov2s_settings_without_masks(tmp_path):
    settings = {"method": "dinov2", "loss.patch_weight": 0, "loss.warmup_teacher_temp_epochs": 0}
    config = opened(tmp_path, {**CONVNEXT, **settings, "loss.teacher_temp": 0.04}).config
    assert (config.model.layer_scale, config.model.drop_path, config.loss.koleo_weight) == (None, 0.3, 0.1)

"""What files state is validated before it is used: it never runs, and what no backbone has is a sentence."""

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dino_vit import WeightsError, export_backbone, load_backbone, save_backbone
from dino_vit.core.storage import write_tensors
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.weights.read_file import EXPORT_KEY
from tests.support.backbones import backbone

CODE = "x')\nopen('executed', 'w')\n#"


@pytest.fixture(autouse=True)
def in_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def own(**stated):
    """Write a file of ours that states something else; return its name."""
    model = backbone(heads=4)
    changes = stated.pop("architecture", {})
    architecture = None if changes is None else model.architecture | changes
    stated = {"kind": "backbone", "version": 1, "mean": [0.1] * 3, "std": [0.2] * 3, **stated}
    text = json.dumps({**stated, "architecture": architecture})
    write_tensors(Path("own.safetensors"), model.state_dict(), text)
    return "own.safetensors"


@pytest.mark.parametrize("format", ["timm", "huggingface"])
def test_an_export_runs_no_text(format, tmp_path):
    """Neither that of a file, which is refused, nor what a program sets past the file."""
    model = backbone()
    model.provenance = replace(model.provenance, network=CODE, source=CODE, config={"method": CODE})
    export_backbone(model, {"timm": "a.pth"}.get(format, "a"), format)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"preparation": {"interpolation": CODE}}, "preparation.interpolation = .*: must be 'bicubic' or"),
        ({"preparation": {"resize_mode": "whole", "x": 1}}, "preparation.x = 1: Extra inputs"),
        ({"preparation": {"shorter_side": 8}}, "shorter_side of 8 pixels, less than its crop of 32 × 32"),
        ({"mean": [float("nan")] * 3}, "mean = .*: item 1 must be a finite number"),
        ({"mean": [0.1] * 4}, "mean and std have different numbers of channels"),
        ({"mean": [0.1] * 4, "std": [0.1] * 4}, "mean and std have 4 values, but images 3 channels"),
        ({"range": [9, 0]}, "range does not go from low to high"),
        ({"size": [32, 10**9]}, "size = .*: item 2 must be less than or equal to 65536"),
        ({"network": "x" * 10**6}, "network = 'xxx.*: must be 'teacher', 'student' or"),
        ({"config": [1]}, "config = .*: must be a valid dictionary"),
        ({"architecture": {"depth": 10**9}}, "depth = 1000000000: must be less than or equal to 1000"),
        ({"architecture": {"image_size": 10**9}}, "image_size = 1000000000: must be less than or"),
        ({"architecture": {"heads": 0}}, "heads = 0: must be greater than or equal to 1"),
        ({"architecture": {"depth": 0, "heads": 0}}, "depth = 0: must be .*; heads = 0: must be"),
        ({"architecture": {"name": ["resnet18"]}}, "got an unexpected keyword argument"),
        ({"architecture": {"later": 1}}, "got an unexpected keyword argument 'later'"),
        ({"architecture": None}, "architecture is missing"),
        ({"version": 2}, "has format version 2, but this dino-vit reads 1"),
    ],
)
def test_what_no_backbone_states_is_a_sentence(stated, said):
    with pytest.raises(WeightsError, match=rf"^(the metadata of )?own\.safetensors .*{said}") as caught:
        load_backbone(own(**stated))
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_what_a_later_version_states_beside_it_is_ignored():
    assert load_backbone(own(later={"x": [1]}, step=3)).provenance.step == 3


def test_json_of_any_shape_ends_in_a_sentence():
    tensors, nested = OrderedDict(backbone(heads=4).state_dict()), "[" * 900 + "]" * 900
    for stated in ("[" * 10**5, '{"a": ' * 10**5, "[1]", "{", 3, f'{{"config": {{"a": {nested}}}}}'):
        vars(tensors)[EXPORT_KEY] = stated
        torch.save(tensors, "a.pth")
        with pytest.raises(WeightsError, match=r"metadata of a\.pth (is not a JSON|describes no backbone)"):
            load_backbone("a.pth", heads=4)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"image_size": [0]}, "image_size"),
        ({"layer_norm_eps": CODE}, "layer_norm_eps = .*: must be a valid number"),
        ({"size": {"height": "a"}}, "size = "),
        ({"pretrained_cfg": "a"}, "pretrained_cfg = 'a'"),
    ],
)
def test_odd_facts_of_the_hub_are_a_sentence(stated, said, tmp_path):
    export_backbone(backbone(), "hub", "huggingface")
    path = tmp_path / "hub" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **stated}))
    with pytest.raises(WeightsError, match=rf"config\.json describes no backbone .*{said}"):
        load_backbone("hub")


def test_a_model_of_timm_is_not_built_larger_than_its_tensors():
    model = TimmBackbone(name="test_vit", image_size=160)
    model.config = replace(model.config, image_size=65_536)
    save_backbone(model, "own.safetensors", mean=None, std=None)
    with pytest.raises(
        WeightsError, match=r"describes a network of [\d,]+ numbers, but has [\d,]+: its image_size"
    ):
        load_backbone("own.safetensors")


def test_exports_of_models_whose_heads_are_not_known_load():
    save_backbone(TimmBackbone(name="test_resnet", image_size=64), "own.safetensors")
    export_backbone(load_backbone("own.safetensors"), "a.safetensors", "timm")
    assert load_backbone("a.safetensors").heads == 0

"""What files say of their weights: our metadata, `config.json`, and that of exports."""

import json
import math
from collections import OrderedDict

import pytest
import safetensors.torch
import torch

from dino_vit import WeightsError, load_backbone
from dino_vit.core.storage import write_tensors
from tests.support.backbones import IMAGES, backbone

OWN = {"kind": "backbone", "mean": None, "std": None, "architecture": {}}


def test_what_our_metadata_leaves_out_is_as_by_default(tmp_path):
    model = backbone()
    known = {key: value for key, value in model.architecture.items() if key not in ("channels", "depth")}
    write_tensors(tmp_path / "a.safetensors", model.state_dict(), json.dumps({**OWN, "architecture": known}))
    assert load_backbone(tmp_path / "a.safetensors").architecture == model.architecture


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", r"the metadata of .*a\.safetensors is not a JSON object: Expecting"),
        ("[]", r"metadata of .*a\.safetensors is not a JSON object"),
        ({"kind": "backbone", "mean": None, "std": None}, "architecture is missing"),
        ({"kind": "backbone", "mean": None, "architecture": {}}, "std is missing"),
        ({**OWN, "version": 2}, "has format version 2"),
        ({**OWN, "architecture": {"soup": 1}}, "architecture.soup is unknown"),
        (
            {**OWN, "architecture": {"width": [1]}},
            r"architecture.width = \[1\], but input should be a valid",
        ),
        ({**OWN, "architecture": {"depth": 10**9}}, "has 3 blocks, but says 1,000,000,000"),
        ({**OWN, "architecture": {"mlp_ratio": 1e308}}, "describes a network that cannot be built"),
        ({**OWN, "mean": "grey"}, "metadata of .*a.safetensors cannot be used: mean = 'grey', but"),
        ({**OWN, "mean": [math.nan] * 3}, "mean.0 = nan, but input should be a finite number"),
        ({**OWN, "std": [0.2, 0, 0.2]}, "std.1 = 0, but input should be greater than 0"),
        ({**OWN, "bits": "eight"}, "bits = 'eight', but"),
        ({**OWN, "step": {}}, "step = {}, but"),
        ({**OWN, "kind": 5}, "kind = 5, but"),
        ({**OWN, "architecture": {"norm_eps": -1}}, "norm_eps = -1, but input should be greater than 0"),
        ({**OWN, "architecture": {"qk_scale": 1e300}}, r"qk_scale = 1e\+300, but input should be less than"),
        ("[" * 10**6, "is not a JSON object"),
    ],
)
def test_metadata_that_makes_no_sense(tmp_path, metadata, message):
    text = metadata if isinstance(metadata, str) else json.dumps(metadata)
    write_tensors(tmp_path / "a.safetensors", backbone().state_dict(), text)
    with pytest.raises(WeightsError, match=message):
        load_backbone(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_attention_heads": "two"}, "num_attention_heads = 'two', but"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0, but"),
        ({"layer_norm_eps": None}, "layer_norm_eps = None, but"),
        ({"image_mean": ["a"], "image_std": [1]}, "image_mean.0 = 'a', but"),
        ({"model_args": [1]}, "model_args"),
        ({"pretrained_cfg": {"mean": 5}}, "pretrained_cfg.mean"),
        ({"pretrained_cfg": {"input_size": [3, math.inf, 32]}}, "pretrained_cfg.input_size.1 = inf, but"),
        ({"image_size": [math.inf, 32]}, r"image_size = \[inf, 32\], but"),
        ({"layer_norm_eps": 1e30}, r"layer_norm_eps = 1e\+30, but"),
        ("[]", "config.json is not a JSON object"),
        ("[" * 10**6, "config.json is not a JSON object"),
    ],
)
def test_a_config_of_wrong_types_is_refused(tmp_path, config, message):
    safetensors.torch.save_file(backbone().state_dict(), tmp_path / "model.safetensors")
    text = config if isinstance(config, str) else json.dumps({"model_type": "vit", **config})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=message):
        load_backbone(tmp_path)


def test_numbers_that_a_config_quotes_are_numbers(tmp_path):
    safetensors.torch.save_file(backbone().state_dict(), tmp_path / "model.safetensors")
    config = {"model_type": "vit", "image_mean": ["0.5"] * 3, "image_std": ["0.25"] * 3}
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_norm_eps": "1e-5"}))
    loaded = load_backbone(tmp_path, heads=2)
    assert (loaded.provenance.mean, loaded.provenance.std) == ((0.5,) * 3, (0.25,) * 3)
    assert loaded.architecture["norm_eps"] == 1e-5
    assert loaded(IMAGES).isfinite().all()


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", 5, [[]], '{"format": "timm", "heads": "x", "image_size": [32, 32]}']
)
def test_an_export_that_says_nothing_usable_of_itself_is_refused(tmp_path, text):
    named = OrderedDict(backbone().state_dict())
    named.dino_vit_export = text
    torch.save(named, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"a\.pth"):
        load_backbone(tmp_path / "a.pth")

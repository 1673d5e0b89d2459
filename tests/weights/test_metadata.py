"""What files say of their weights: our metadata, `config.json`, and that of exports."""

import json

import pytest
import safetensors.torch

from dino_vit import WeightsError, load_backbone
from dino_vit.core.storage import write_tensors
from tests.support.backbones import backbone

OWN = {"kind": "backbone", "architecture": {}}


def test_what_our_metadata_leaves_out_is_as_by_default(tmp_path):
    model = backbone()
    known = {key: value for key, value in model.architecture.items() if key not in ("channels", "depth")}
    write_tensors(tmp_path / "a.safetensors", model.state_dict(), json.dumps({**OWN, "architecture": known}))
    assert load_backbone(tmp_path / "a.safetensors").architecture == model.architecture


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", r"the metadata of .*a\.safetensors is not a JSON object: Expecting"),
        ({"kind": "backbone"}, "architecture is missing"),
        ({**OWN, "version": 2}, "has format version 2"),
        ({**OWN, "architecture": {"soup": 1}}, "cannot be built: .* unexpected keyword argument 'soup'"),
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
        ({"num_attention_heads": "two"}, "cannot be built: invalid literal .* 'two'"),
        ("[]", "config.json is not a JSON object"),
    ],
)
def test_a_config_of_wrong_types_is_refused(tmp_path, config, message):
    safetensors.torch.save_file(backbone().state_dict(), tmp_path / "model.safetensors")
    text = config if isinstance(config, str) else json.dumps({"model_type": "vit", **config})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=message):
        load_backbone(tmp_path)

"""The mask token of DINOv2's files and of ours: kept where it is asked for, a token of zeros otherwise."""

import torch
from safetensors.torch import load_file

from dino_vit import export_backbone, load_backbone, save_backbone
from tests.support.backbones import backbone


def masked(**changes):
    model = backbone(mask_token=True, **changes)
    torch.nn.init.normal_(model.mask_token)
    return model


def test_it_is_kept_when_it_is_asked_for():
    named = masked(layer_scale=1.0).state_dict()  # DINOv2's names are ours
    assert load_backbone(named, heads=2).mask_token is None
    assert torch.equal(load_backbone(named, heads=2, mask_token=True).mask_token, named["mask_token"])


def test_a_file_without_one_gets_zeros():
    loaded = load_backbone(backbone().state_dict(), heads=2, mask_token=True)
    assert torch.equal(loaded.mask_token, torch.zeros(1, 32))


def test_our_files_have_it(tmp_path):
    model = masked()
    save_backbone(model, tmp_path / "ours.safetensors")
    assert torch.equal(load_backbone(tmp_path / "ours.safetensors").mask_token, model.mask_token)
    without = load_backbone(tmp_path / "ours.safetensors", mask_token=False)
    assert "mask_token" not in without.state_dict()


def test_hugging_face_gets_it_and_others_do_not(tmp_path):
    model = masked(layer_scale=1.0, position_mode="dinov2")
    export_backbone(model, tmp_path / "hf", "huggingface")
    assert torch.equal(
        load_file(tmp_path / "hf/model.safetensors")["embeddings.mask_token"], model.mask_token
    )
    assert torch.equal(load_backbone(tmp_path / "hf", mask_token=True).mask_token, model.mask_token)
    assert load_backbone(tmp_path / "hf").mask_token is None
    export_backbone(model, tmp_path / "timm.safetensors", "timm")
    assert "mask_token" not in load_file(tmp_path / "timm.safetensors")

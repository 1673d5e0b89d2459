"""What loading infers, converts, resamples, inflates, logs and refuses; what saving keeps."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTImageProcessor, ViTModel

from dino_vit import WeightsError, load_backbone, save_backbone
from dino_vit.data.images.pixels import Pixels
from dino_vit.views.eval_transform import eval_transform_of
from tests.support.backbones import IMAGES, backbone
from tests.support.close import assert_close_to_scale
from tests.support.peers import HEADS, HF_VIT, SIZE, timm_vit


def test_our_own_file_has_all_that_loading_needs(tmp_path):
    model = backbone(channels=5, registers=2, position_mode="timm", heads=4)
    path = tmp_path / "mine.safetensors"
    statistics = {"mean": (0.5,) * 5, "std": (0.2,) * 5, "bits": 16, "range": (0.0, 4095.0)}
    save_backbone(model, path, **statistics, network="teacher", step=700, config={"seed": 3})
    loaded = load_backbone(path)
    assert {**loaded.architecture, "image_size": 32, "patch_size": 8} == model.architecture
    known = loaded.provenance
    assert (known.format, known.network, known.step) == ("dino-vit", "teacher", 700)
    assert known.config == {"seed": 3}
    assert {name: getattr(known, name) for name in statistics} == statistics
    assert eval_transform_of(loaded).pixels == Pixels(channels=5, bits=16, range=(0.0, 4095.0))
    assert not loaded.training
    images = torch.randn(2, 5, 24, 40)
    assert torch.equal(loaded(images), model(images))
    save_backbone(loaded, tmp_path / "again.safetensors")
    again = load_backbone(tmp_path / "again.safetensors")
    assert replace(again.provenance, source="", sha256="") == replace(known, source="", sha256="")


def test_another_image_size_resamples_the_positions(caplog):
    model = backbone(position_mode="dino")
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(model.state_dict(), heads=2, image_size=(32, 48))
    assert "resampled positions from 4 × 4 to 4 × 6 (mode dino)" in caplog.text
    assert loaded.trained_grid == (4, 6)
    assert_close_to_scale(loaded(IMAGES), model(IMAGES))


def test_a_program_that_sets_up_no_logging_sees_what_was_converted(capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    tensors = backbone().state_dict()
    load_backbone(tensors, heads=2, channels=5)
    assert "inflated patch embedding from 3 to 5 channels" in capsys.readouterr().err
    load_backbone(tensors, heads=2, channels=5, verbose=False)
    assert capsys.readouterr() == ("", "")


def test_loading_is_strict():
    named = backbone().state_dict()
    moved = {**named, "blocks.0.attn.q_norm.weight": torch.ones(8)}
    del moved["norm.bias"]
    moved["norm.weight"] = torch.ones(31)
    with pytest.raises(WeightsError, match="does not fit") as caught:
        load_backbone(moved, heads=2)
    for message in (
        'Missing key(s) in state_dict: "norm.bias".',
        'Unexpected key(s) in state_dict: "blocks.0.attn.q_norm.weight".',
        "size mismatch for norm.weight",
    ):
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(WeightsError, match=r'Unexpected.*"head\.3\.weight"'):
        load_backbone({**named, "head.3.weight": torch.ones(1)}, heads=2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: (100 * t).to(torch.int8), "is torch.int8; weights must be floating-point"),
        (lambda t: t.index_fill(0, torch.tensor(3), torch.nan), r"has NaN or inf.* \(128 of 4,096\)"),
        (lambda t: t.half() + 1e5, r"has NaN or inf.* \(4,096 of"),
    ],
)
def test_tensors_that_would_become_other_numbers_are_refused(spoil, message):
    named = dict(backbone().state_dict())
    named["blocks.1.mlp.fc2.weight"] = spoil(named["blocks.1.mlp.fc2.weight"])
    with pytest.raises(WeightsError, match=rf"blocks\.1\.mlp\.fc2\.weight {message}"):
        load_backbone(named, heads=2)


def test_a_classifier_is_dropped_unless_it_is_asked_for(caplog):
    peer = timm_vit()
    with caplog.at_level(logging.INFO, "dino_vit"):
        features = load_backbone(peer.model.state_dict(), heads=HEADS)
    assert isinstance(features.head, nn.Identity)
    assert "dropped classifier (2 tensors)" in caplog.text
    classifier = load_backbone(peer.model.state_dict(), heads=HEADS, num_classes=5)
    images = torch.randn(2, 3, SIZE, SIZE)
    assert_close_to_scale(classifier(images), peer.model(images))
    with pytest.raises(WeightsError, match=r"size mismatch for head\.weight"):
        load_backbone(peer.model.state_dict(), heads=HEADS, num_classes=7)


def test_a_mask_token_is_kept_where_it_is_asked_for_and_zeros_without_one(tmp_path):
    model = backbone(mask_token=True, layer_scale=1.0)
    nn.init.normal_(model.mask_token)
    save_backbone(model, tmp_path / "ours.safetensors")
    assert torch.equal(load_backbone(tmp_path / "ours.safetensors").mask_token, model.mask_token)
    assert load_backbone(tmp_path / "ours.safetensors", mask_token=False).mask_token is None
    named = model.state_dict()  # DINOv2's names are ours
    assert load_backbone(named, heads=2).mask_token is None
    assert torch.equal(load_backbone(named, heads=2, mask_token=True).mask_token, model.mask_token)
    loaded = load_backbone(backbone().state_dict(), heads=2, mask_token=True)
    assert torch.equal(loaded.mask_token, torch.zeros(1, 32))


def test_the_number_of_heads_is_asked_for_unless_the_width_implies_it():
    with pytest.raises(WeightsError, match=r"number of heads \(width 32\); .*takes heads=N"):
        load_backbone(backbone().state_dict())
    assert load_backbone(backbone(width=192, heads=3).state_dict()).heads == 3


def test_positions_that_do_not_form_a_square():
    with pytest.raises(WeightsError, match=r"12 positions.*give the folder that has the config.json"):
        load_backbone(backbone(image_size=(16, 48)).state_dict(), heads=2)


def test_images_of_another_size_are_prepared_as_the_weights_say(tmp_path):
    ViTModel(ViTConfig(**HF_VIT), add_pooling_layer=False).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}, resample=2).save_pretrained(tmp_path)
    as_stated = eval_transform_of(load_backbone(tmp_path), size=(48, 48))
    assert (as_stated.resize_mode, as_stated.interpolation) == ("whole", "bilinear")
    assert load_backbone(tmp_path, image_size=48).transform == as_stated

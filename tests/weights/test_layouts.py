"""Whose weights they are and which architecture, for files of our own making and of the real libraries."""

import pytest
import timm
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from dino_vit import WeightsError, load_backbone
from tests.support.backbones import IMAGES, backbone
from tests.support.close import assert_close_to_scale
from tests.support.peers import HEADS, HF_VIT, PEERS, SIZE, assert_same_tokens


@pytest.mark.parametrize("name", PEERS)
def test_a_state_dict_of_the_real_library_gives_its_features(name):
    peer = PEERS[name]()
    eps = {"norm_eps": peer.model.config.layer_norm_eps} if "huggingface" in name else {}
    assert_same_tokens(load_backbone(peer.model.state_dict(), heads=HEADS, **eps), peer)


@pytest.mark.parametrize("name", [name for name in PEERS if "huggingface" in name])
def test_a_folder_that_transformers_saved_gives_its_features(name, tmp_path):
    peer = PEERS[name]()
    peer.model.save_pretrained(tmp_path)
    model = load_backbone(tmp_path)
    assert (model.heads, model.architecture["norm_eps"]) == (HEADS, peer.model.config.layer_norm_eps)
    assert_same_tokens(model, peer)


def test_huggingface_classifiers_carry_a_prefix(tmp_path):
    peer = ViTForImageClassification(ViTConfig(**HF_VIT, num_labels=5)).eval()
    peer.save_pretrained(tmp_path)
    images = torch.randn(2, 3, SIZE, SIZE)
    model = load_backbone(tmp_path, num_classes=5)
    assert_close_to_scale(model(images), peer(images).logits)
    tokens = peer.vit(images).last_hidden_state
    assert_close_to_scale(load_backbone(tmp_path).forward_features(images), tokens)


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("chunked", [True, False])
def test_dinov2_files(registers, chunked):
    model = backbone(layer_scale=1.0, registers=registers, mlp="swiglu")
    named = {"mask_token": torch.zeros(1, 32), "dino_head.mlp.0.weight": torch.zeros(1)}
    for name, tensor in model.state_dict().items():
        name = name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")
        parts = name.split(".")
        if chunked and parts[0] == "blocks":
            name = ".".join(["blocks", str(int(parts[1]) // 2), *parts[1:]])
        named[name] = tensor
    training = {"teacher": {f"backbone.{name}": tensor for name, tensor in named.items()}}
    loaded = load_backbone(training if chunked else named, heads=2)
    assert loaded.position_mode == ("timm" if registers else "dinov2")
    assert loaded.provenance.format == "dinov2"
    model.position_mode = loaded.position_mode
    assert torch.equal(loaded(IMAGES), model(IMAGES))


def test_the_format_decides_between_look_alikes(caplog):
    named = backbone().state_dict()
    caplog.set_level("INFO")
    load_backbone({"teacher": {f"backbone.{name}": tensor for name, tensor in named.items()}}, heads=2)
    load_backbone(named, heads=2, format="timm")
    assert "a guess" not in caplog.text
    load_backbone(named, heads=2)
    assert "taken for DINO's, with a guess at mean and std: files of timm look the same" in caplog.text
    for format, mode in {None: "dino", "timm": "timm", "dino-vit": "hf", "dinov2": "dinov2"}.items():
        assert load_backbone(named, heads=2, format=format).position_mode == mode
    with pytest.raises(WeightsError, match="choose from dino-vit, reference"):
        load_backbone(named, heads=2, format="jax")
    with pytest.raises(WeightsError, match="is in the reference format, not in torchvision"):
        load_backbone(named, heads=2, format="torchvision")


def test_a_timm_folder_gives_heads_size_and_statistics_and_no_setting_is_ignored(tmp_path):
    changes = {"img_size": (32, 128), "num_heads": 6}
    peer = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=2, **changes).eval()
    nn.init.normal_(peer.pos_embed)
    timm.models.save_for_hf(peer, tmp_path, model_args={**changes, "depth": 2}, safe_serialization=True)
    model = load_backbone(tmp_path)
    assert (model.position_mode, model.provenance.mean) == ("timm", tuple(peer.pretrained_cfg["mean"]))
    images = torch.randn(1, 3, 32, 128)
    assert_close_to_scale(model.forward_features(images), peer.forward_features(images))
    timm.models.save_for_hf(peer, tmp_path, model_args={"act_layer": "relu"}, safe_serialization=True)
    with pytest.raises(WeightsError, match=r"has model_args \(.*act_layer.*\), which are not supp"):
        load_backbone(tmp_path)


def test_another_activation_is_refused_as_no_tensor_shows_it(tmp_path):
    ViTModel(ViTConfig(**HF_VIT, hidden_act="gelu_pytorch_tanh")).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="hidden_act=gelu_pytorch_tanh, which is not supported"):
        load_backbone(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deit_tiny_distilled_patch16_224", r"197 positions, which do not form a square"),
        ("vit_xsmall_patch16_clip_224", r'Unexpected key\(s\) .* "norm_pre.weight"'),
        ("vit_relpos_small_patch16_224", "is not a supported vision transformer"),
    ],
)
def test_transformers_of_another_kind_are_refused(name, message):
    with pytest.raises(WeightsError, match=message):
        load_backbone(timm.create_model(name, depth=1).state_dict(), heads=4)

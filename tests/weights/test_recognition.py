"""Whose weights they are and which architecture, for files of our own making and of the real libraries."""

import json
import logging

import pytest
import timm
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from dino_vit import WeightsError, load_backbone
from tests.support.backbones import IMAGES, backbone
from tests.support.peers import HEADS, HF_VIT, PATCH, PEERS, SIZE, WIDTH, assert_same_tokens, timm_vit


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


def test_a_classifier_is_dropped_unless_it_is_asked_for(caplog):
    peer = timm_vit()
    with caplog.at_level(logging.INFO, "dino_vit"):
        features = load_backbone(peer.model.state_dict(), heads=HEADS)
    assert isinstance(features.head, nn.Identity)
    assert "dropped classifier (2 tensors)" in caplog.text
    classifier = load_backbone(peer.model.state_dict(), heads=HEADS, num_classes=5)
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.allclose(classifier(images), peer.model(images), atol=1e-5)
    with pytest.raises(WeightsError, match=r"size mismatch for head\.weight"):
        load_backbone(peer.model.state_dict(), heads=HEADS, num_classes=7)


def test_huggingface_classifiers_carry_a_prefix(tmp_path):
    peer = ViTForImageClassification(ViTConfig(**HF_VIT, num_labels=5)).eval()
    peer.save_pretrained(tmp_path)
    images = torch.randn(2, 3, SIZE, SIZE)
    model = load_backbone(tmp_path, num_classes=5)
    assert torch.allclose(model(images), peer(images).logits, atol=1e-5)
    tokens = peer.vit(images).last_hidden_state
    assert torch.allclose(load_backbone(tmp_path).forward_features(images), tokens, atol=1e-5)


def test_heads_of_early_and_later_official_files_are_dropped(caplog):
    named = {
        **backbone().state_dict(),
        "projection_head.0.weight": torch.zeros(2),
        "prototypes.weight_v": torch.zeros(2),
        "head.last_layer.parametrizations.weight.original0": torch.zeros(2),
    }
    with caplog.at_level(logging.INFO, "dino_vit"):
        load_backbone({f"module.{name}": tensor for name, tensor in named.items()}, heads=2)
    assert "dropped DINO head (3 tensors)" in caplog.text


def test_integers_in_a_head_do_no_harm():
    model = backbone(position_mode="dino")
    named = {f"backbone.{name}": tensor for name, tensor in model.state_dict().items()}
    named["head.mlp.1.num_batches_tracked"] = torch.tensor(7)
    assert torch.equal(load_backbone({"teacher": named}, heads=2)(IMAGES), model(IMAGES))


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


def test_separate_queries_keys_and_values_are_merged(caplog):
    model = backbone(qkv_bias=False, position_mode="dino")
    named = dict(model.state_dict())
    for index in range(3):
        qkv = named.pop(f"blocks.{index}.attn.qkv.weight")
        for third, rows in zip(("query", "key", "value"), qkv.chunk(3), strict=True):
            named[f"blocks.{index}.attn.{third}.weight"] = rows
    with caplog.at_level(logging.INFO, "dino_vit"):
        assert torch.equal(load_backbone(named, heads=2)(IMAGES), model(IMAGES))
    assert "merged separate q, k, v into qkv" in caplog.text
    del named["blocks.1.attn.key.weight"]
    with pytest.raises(WeightsError, match=r"(?s)Missing.*1\.attn\.qkv.*Unexpected.*1\.attn\.query.*value"):
        load_backbone(named, heads=2)


def test_the_format_decides_between_look_alikes():
    named = backbone().state_dict()
    for format, mode in {None: "dino", "timm": "timm", "dino-vit": "hf", "dinov2": "dinov2"}.items():
        assert load_backbone(named, heads=2, format=format).position_mode == mode
    with pytest.raises(WeightsError, match="choose from dino-vit, reference"):
        load_backbone(named, heads=2, format="jax")
    with pytest.raises(WeightsError, match="is in the reference format, not in torchvision"):
        load_backbone(named, heads=2, format="torchvision")


def test_a_classifier_under_a_prefix_of_ddp_is_timms_not_dinos():
    named = {f"module.{name}": tensor for name, tensor in backbone(num_classes=5).state_dict().items()}
    assert load_backbone(named, heads=2).provenance.format == "timm"


def test_the_number_of_heads_is_asked_for_unless_the_width_implies_it():
    with pytest.raises(WeightsError, match=r"number of heads \(width 32\); give heads="):
        load_backbone(backbone().state_dict())
    assert load_backbone(backbone(width=192, heads=3).state_dict()).heads == 3


def test_positions_that_do_not_form_a_square():
    model = backbone(image_size=(16, 48))
    with pytest.raises(WeightsError, match=r"12 positions.*give trained_size"):
        load_backbone(model.state_dict(), heads=2)
    with pytest.raises(WeightsError, match=r"12 positions, but trained_size=\(16, 40\) means 2 × 5"):
        load_backbone(model.state_dict(), heads=2, trained_size=(16, 40))
    loaded = load_backbone(model.state_dict(), heads=2, trained_size=(16, 48))
    assert loaded.trained_grid == (2, 6)
    assert torch.equal(loaded(torch.ones(1, 3, 16, 48)), model(torch.ones(1, 3, 16, 48)))


def test_a_square_number_of_positions_may_include_cls():
    peer = timm.models.VisionTransformer(
        img_size=(16, 32), patch_size=PATCH, embed_dim=WIDTH, depth=1, num_heads=HEADS, num_classes=5
    ).eval()  # 1 + 2 · 4 positions
    model = load_backbone(peer.state_dict(), heads=HEADS, trained_size=(16, 32))
    images = torch.randn(1, 3, 16, 32)
    assert torch.allclose(model.forward_features(images), peer.forward_features(images), atol=1e-5)


def test_a_hub_folder_gives_the_trained_size(tmp_path):
    config = ViTConfig(**{**HF_VIT, "image_size": (16, 64)})
    peer = ViTModel(config, add_pooling_layer=False).eval()
    nn.init.normal_(peer.embeddings.position_embeddings)
    peer.save_pretrained(tmp_path)
    images = torch.randn(1, 3, 16, 64)
    model = load_backbone(tmp_path)
    assert model.trained_grid == (2, 8), "16 positions could form a square, too"
    assert torch.allclose(model.forward_features(images), peer(images).last_hidden_state, atol=1e-5)


@pytest.mark.parametrize("size", ["32", [32], [1, 2, 3], {"height": 32}, None])
def test_a_malformed_image_size_in_a_hub_folder_is_ignored(tmp_path, size):
    ViTModel(ViTConfig(**HF_VIT), add_pooling_layer=False).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "image_size": size}))
    assert load_backbone(tmp_path).image_size == (SIZE, SIZE)


def test_a_timm_folder_gives_heads_size_and_statistics_and_no_setting_is_ignored(tmp_path):
    changes = {"img_size": (32, 128), "num_heads": 6}
    peer = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=2, **changes).eval()
    nn.init.normal_(peer.pos_embed)
    timm.models.save_for_hf(peer, tmp_path, model_args={**changes, "depth": 2}, safe_serialization=True)
    model = load_backbone(tmp_path)
    assert (model.position_mode, model.provenance.mean) == ("timm", tuple(peer.pretrained_cfg["mean"]))
    images = torch.randn(1, 3, 32, 128)
    assert torch.allclose(model.forward_features(images), peer.forward_features(images), atol=1e-5)
    timm.models.save_for_hf(peer, tmp_path, model_args={"act_layer": "relu"}, safe_serialization=True)
    with pytest.raises(WeightsError, match=r"unsupported model_args \(act_layer\)"):
        load_backbone(tmp_path)


@pytest.mark.parametrize("activation", ["quick_gelu", "relu", "gelu_pytorch_tanh"])
def test_another_activation_is_refused_as_no_tensor_shows_it(tmp_path, activation):
    ViTModel(ViTConfig(**HF_VIT, hidden_act=activation)).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=f"hidden_act='{activation}', but"):
        load_backbone(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deit_tiny_distilled_patch16_224", "distillation token"),
        ("vit_xsmall_patch16_clip_224", "normalisation before the first block"),
        ("vit_small_patch16_dinov3", "blocks of another kind"),
        ("vit_wee_patch16_reg1_gap_256", "averaged before they are normalised"),
        ("vit_relpos_small_patch16_224", "relative positions"),
        ("pit_ti_224", r"form a square|lacks|impossible shape"),
    ],
)
def test_transformers_of_another_kind_are_refused_by_name(name, message):
    depth = {} if "pit" in name else {"depth": 1}
    with pytest.raises(WeightsError, match=message):
        load_backbone(timm.create_model(name, **depth).state_dict())


def test_a_tensor_under_two_names_is_refused():
    named = dict(backbone().state_dict())
    with pytest.raises(WeightsError, match=r"blocks.1.norm1.weight twice, .* as blocks.0.1.norm1.weight"):
        load_backbone({**named, "blocks.0.1.norm1.weight": torch.ones(32)}, heads=2)
    parts = {f"blocks.0.attn.{part}.weight": torch.ones(32, 32) for part in "qkv"}
    with pytest.raises(WeightsError, match=r"Unexpected.*attn\.q\..*attn\.k\..*attn\.v\."):
        load_backbone({**named, **parts}, heads=2)


@pytest.mark.parametrize(
    "name", ["cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc2.weight"]
)
@pytest.mark.parametrize("reshape", [lambda t: t.sum(), lambda t: t[..., :0], lambda t: t.flatten()])
def test_impossible_shapes_are_refused(name, reshape):
    named = dict(backbone().state_dict())
    named[name] = reshape(named[name])
    with pytest.raises(WeightsError):
        load_backbone(named, heads=2)

"""What loading infers, converts, resamples, inflates, logs and refuses; what saving keeps."""

import json
import logging

import pytest
import timm
import torch
from torch import nn
from transformers import ViTConfig, ViTModel

from dino_vit import WeightsError, load_backbone, save_backbone
from dino_vit.core.storage import read_metadata
from dino_vit.data.images.pixels import Pixels
from dino_vit.views.preparation import preparation_of
from tests.support.backbones import IMAGES, backbone
from tests.support.peers import HEADS, HF_VIT, PATCH, SIZE, WIDTH, timm_vit


def test_our_own_file_has_all_that_loading_needs(tmp_path):
    model = backbone(
        channels=5, registers=2, positions="sinusoidal", stem="unfold", position_mode="timm", heads=4
    )
    path = tmp_path / "mine.safetensors"
    statistics = {"mean": (0.5,) * 5, "std": (0.2,) * 5, "bits": 16, "range": (0.0, 4095.0)}
    save_backbone(model, path, **statistics, network="teacher", step=700, config={"seed": 3})
    loaded = load_backbone(path)
    assert {**loaded.architecture, "image_size": 32, "patch_size": 8} == model.architecture
    known = loaded.provenance
    assert (known.format, known.network, known.step) == ("dino-vit", "teacher", 700)
    assert known.config == {"seed": 3}
    assert {name: getattr(known, name) for name in statistics} == statistics
    assert preparation_of(loaded).pixels == Pixels(channels=5, bits=16, range=(0.0, 4095.0))
    assert not loaded.training
    assert not loaded.pos_embed.requires_grad
    images = torch.randn(2, 5, 24, 40)
    assert torch.equal(loaded(images), model(images))
    save_backbone(loaded, tmp_path / "again.safetensors")
    saved, again = read_metadata(path), read_metadata(tmp_path / "again.safetensors")
    assert again["sha256"] == saved["sha256"]


def test_saving_refuses_what_would_mislead(tmp_path):
    with pytest.raises(WeightsError, match=r"must end in \.safetensors"):
        save_backbone(backbone(), tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"mean needs one value per channel \(3\), not 1"):
        save_backbone(backbone(), tmp_path / "a.safetensors", mean=(0.5,), std=(0.5,))


def test_another_image_size_resamples_the_positions(caplog):
    model = backbone(position_mode="dino")
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(model.state_dict(), heads=2, image_size=(32, 48))
    assert "resampled positions from 4 × 4 to 4 × 6 (mode dino)" in caplog.text
    assert loaded.trained_grid == (4, 6)
    assert torch.allclose(loaded(IMAGES), model(IMAGES), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 2, 13])
def test_inflated_channels_answer_equal_ones_as_before(channels, caplog):
    model = backbone()
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(model.state_dict(), heads=2, channels=channels)
    assert f"inflated patch embedding from 3 to {channels} channels" in caplog.text
    assert loaded.provenance.mean is None, "RGB statistics do not apply to other channels"
    grey = torch.randn(2, 1, 32, 32)
    inflated, rgb = (m(grey.expand(-1, n, -1, -1)) for m, n in ((loaded, channels), (model, 3)))
    assert torch.allclose(inflated, rgb, atol=1e-5)


def test_half_precision_files_become_float32(caplog):
    named = {name: tensor.half() for name, tensor in backbone().state_dict().items()}
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(named, heads=2)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert "converted float16 to float32" in caplog.text


def test_one_log_line_has_count_format_and_hash(tmp_path, caplog):
    torch.save(backbone().state_dict(), tmp_path / "dino.pth")
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(tmp_path / "dino.pth", heads=2)
    (record,) = caplog.records
    assert "dino.pth: loaded 42 tensors (reference, backbone, sha256" in record.getMessage()
    assert loaded.provenance.sha256[:12] in record.getMessage()


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


def test_a_gap_in_the_blocks_is_named_however_high_it_reaches():
    named = {k.replace("blocks.1.", "blocks.99999999."): t for k, t in backbone().state_dict().items()}
    with pytest.raises(WeightsError, match=r'(?s)Missing.*"blocks\.1\..*Unexpected.*"blocks\.99999999\.'):
        load_backbone(named, heads=2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: (100 * t).to(torch.int8), "is int8; weights must be floating-point"),
        (lambda t: t.to(torch.complex64), "is complex64"),
        (lambda t: t.to_sparse(), "is a meta or sparse tensor"),
        (lambda t: t.to("meta"), "is a meta or sparse tensor"),
        (lambda t: t.index_fill(0, torch.tensor(3), torch.nan), r"has NaN or inf.* \(128 of 4,096\)"),
        (lambda t: t.half() + 1e5, r"has NaN or inf.* \(4,096 of"),
        (lambda t: t.double() + 1e300, r"has NaN or inf.* \(4,096 of"),
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
    assert torch.allclose(classifier(images), peer.model(images), atol=1e-5)
    with pytest.raises(WeightsError, match=r"size mismatch for head\.weight"):
        load_backbone(peer.model.state_dict(), heads=HEADS, num_classes=7)


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

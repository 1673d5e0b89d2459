"""Weights that the real libraries made, read and written back."""

import logging

import pytest
import safetensors.torch
import timm
import torch
from torch import nn
from transformers import AutoModel, ViTConfig, ViTForImageClassification, ViTModel

from dino_vit import VisionTransformer, WeightsError, export_backbone, load_backbone, save_backbone
from tests.support.peers import HEADS, HF, PATCH, PEERS, SIZE, WIDTH, timm_vit

SIZES = [(SIZE, SIZE), (SIZE + 2 * PATCH, SIZE + 2 * PATCH), (2 * PATCH, SIZE + PATCH)]


def assert_same_tokens(model, peer):
    for size in SIZES if peer.resizes else SIZES[:1]:
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            ours, theirs = model.forward_features(images), peer.tokens(images)
        assert torch.allclose(ours, theirs, atol=1e-5), (size, (ours - theirs).abs().max())


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


EXPORTED = {
    "timm": "timm",
    "timm-dinov2-registers": "timm",
    "torchvision": "torchvision",
    "huggingface-vit": "huggingface",
    "huggingface-dinov2": "huggingface",
    "huggingface-dinov2-gated": "huggingface",
    "huggingface-dinov2-registers": "huggingface",
}


@pytest.mark.parametrize("name", EXPORTED)
def test_from_the_library_to_ours_and_back_changes_no_tensor(name, tmp_path):
    peer = PEERS[name]()
    format = EXPORTED[name]
    source = peer.model.state_dict()
    if format == "huggingface":
        peer.model.save_pretrained(tmp_path / "peer")
        source = tmp_path / "peer"
    model = load_backbone(
        source, heads=HEADS, num_classes=0 if format == "huggingface" or "dinov2" in name else 5
    )
    path = tmp_path / ("out" if format == "huggingface" else "out.safetensors")
    library = "transformers" if format == "huggingface" else format
    assert f"checked with {library}" in export_backbone(model, path, format)
    if format == "huggingface":
        opened = AutoModel.from_pretrained(path, **({} if "dinov2" in name else {"add_pooling_layer": False}))
        written = opened.state_dict()
    else:
        written = safetensors.torch.load_file(path)
    expected = peer.model.state_dict()
    assert written.keys() == expected.keys()
    for key, tensor in expected.items():
        if "mask_token" not in key and not ("registers" in name and key == "cls_token"):
            assert torch.equal(written[key], tensor), key


def test_auto_model_opens_the_export_and_gives_our_features_at_other_sizes(tmp_path):
    model = VisionTransformer(image_size=SIZE, patch_size=PATCH, width=WIDTH, depth=2, heads=HEADS).eval()
    export_backbone(model, tmp_path / "hf", "huggingface")
    opened = AutoModel.from_pretrained(tmp_path / "hf", add_pooling_layer=False).eval()
    for size in SIZES:
        images = torch.randn(1, 3, *size)
        theirs = opened(images, interpolate_pos_encoding=True).last_hidden_state
        assert torch.allclose(model.forward_features(images), theirs, atol=1e-5)


def test_timm_creates_its_own_model_from_the_export(tmp_path):
    model = load_backbone(timm.create_model("vit_tiny_patch16_224").state_dict(), num_classes=1000)
    export_backbone(model, tmp_path / "tiny.pth", "timm")
    opened = timm.create_model("vit_tiny_patch16_224", checkpoint_path=str(tmp_path / "tiny.pth")).eval()
    images = torch.randn(1, 3, 224, 224)
    assert torch.allclose(opened(images), model(images), atol=1e-5)


def test_a_classifier_is_left_out_unless_it_is_asked_for(caplog):
    peer = timm_vit()
    with caplog.at_level(logging.INFO, "dino_vit"):
        features = load_backbone(peer.model.state_dict(), heads=HEADS)
    assert isinstance(features.head, nn.Identity)
    assert "left out classifier (2 tensors)" in caplog.text
    classifier = load_backbone(peer.model.state_dict(), heads=HEADS, num_classes=5)
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.allclose(classifier(images), peer.model(images), atol=1e-5)
    with pytest.raises(WeightsError, match=r"head\.weight \(5, 32\) instead of \(7, 32\)"):
        load_backbone(peer.model.state_dict(), heads=HEADS, num_classes=7)


def test_huggingface_classifiers_carry_a_prefix(tmp_path):
    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        image_size=SIZE,
        patch_size=PATCH,
        num_labels=5,
    )
    peer = ViTForImageClassification(config).eval()
    peer.save_pretrained(tmp_path)
    images = torch.randn(2, 3, SIZE, SIZE)
    model = load_backbone(tmp_path, num_classes=5)
    assert torch.allclose(model(images), peer(images).logits, atol=1e-5)
    tokens = peer.vit(images).last_hidden_state
    assert torch.allclose(load_backbone(tmp_path).forward_features(images), tokens, atol=1e-5)


def test_a_timm_hub_folder_brings_its_statistics(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = load_backbone(tmp_path)
    assert loaded.position_mode == "timm"
    assert loaded.provenance.mean == tuple(model.pretrained_cfg["mean"])


@pytest.mark.parametrize(
    ("change", "format", "what"),
    [
        ({"channels": 4}, "torchvision", "channels other than 3"),
        ({"registers": 2}, "reference", "registers"),
        ({"layer_scale": 1.0}, "torchvision", "layer scale"),
        ({"stem": "unfold"}, "timm", "a stem other than a convolution"),
        ({"qk_scale": 0.5}, "huggingface", "a qk_scale of its own"),
        ({"image_size": (32, 48)}, "torchvision", "images or patches that are not square"),
    ],
)
def test_what_the_other_library_cannot_express_is_said(change, format, what, tmp_path):
    keywords = {"image_size": SIZE, "patch_size": PATCH, "width": WIDTH, "depth": 1, "heads": HEADS, **change}
    with pytest.raises(WeightsError, match=f"no place for {what}"):
        export_backbone(VisionTransformer(**keywords), tmp_path / "out.pth", format)


def test_an_export_that_disagrees_is_not_kept(tmp_path, monkeypatch):
    model = VisionTransformer(image_size=SIZE, patch_size=PATCH, width=WIDTH, depth=1, heads=HEADS)
    from dino_vit.weights import layouts

    nn.init.normal_(model.blocks[0].norm1.weight)
    real = layouts.Layout.to_theirs

    def swapped(layout, name):
        return real(
            layout, name.replace("norm1", "normX").replace("norm2", "norm1").replace("normX", "norm2")
        )

    monkeypatch.setattr(layouts.Layout, "to_theirs", swapped)
    with pytest.raises(WeightsError, match="exported features differ"):
        export_backbone(model, tmp_path / "out.pth", "torchvision")
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_not_overwritten_unless_allowed(tmp_path):
    model = VisionTransformer(image_size=SIZE, patch_size=PATCH, width=WIDTH, depth=1, heads=HEADS)
    save_backbone(model, tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match="exists already"):
        export_backbone(model, tmp_path / "a.safetensors", "timm")
    export_backbone(model, tmp_path / "a.safetensors", "timm", overwrite=True)
    (tmp_path / "folder").mkdir()
    export_backbone(model, tmp_path / "folder", "huggingface", overwrite=True)
    assert (tmp_path / "folder" / "config.json").exists()


@pytest.mark.parametrize("activation", ["quick_gelu", "relu", "gelu_pytorch_tanh"])
def test_another_activation_is_refused_as_no_tensor_shows_it(tmp_path, activation):
    config = ViTConfig(**HF, intermediate_size=4 * WIDTH, hidden_act=activation)
    ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=f"hidden_act='{activation}', but"):
        load_backbone(tmp_path)


def test_a_hub_folder_says_at_which_size_it_was_trained(tmp_path):
    config = ViTConfig(**{**HF, "image_size": (16, 64)}, intermediate_size=4 * WIDTH)
    peer = ViTModel(config, add_pooling_layer=False).eval()
    nn.init.normal_(peer.embeddings.position_embeddings)
    peer.save_pretrained(tmp_path)
    images = torch.randn(1, 3, 16, 64)
    model = load_backbone(tmp_path)
    assert model.trained_grid == (2, 8), "16 positions are a square, too"
    assert torch.allclose(model.forward_features(images), peer(images).last_hidden_state, atol=1e-5)


def test_a_timm_folder_says_its_heads_and_size_and_nothing_that_is_ignored(tmp_path):
    changes = {"img_size": (32, 128), "num_heads": 6}
    peer = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=2, **changes).eval()
    nn.init.normal_(peer.pos_embed)
    timm.models.save_for_hf(peer, tmp_path, model_args={**changes, "depth": 2}, safe_serialization=True)
    model = load_backbone(tmp_path)
    images = torch.randn(1, 3, 32, 128)
    assert torch.allclose(model.forward_features(images), peer.forward_features(images), atol=1e-5)
    timm.models.save_for_hf(peer, tmp_path, model_args={"act_layer": "relu"}, safe_serialization=True)
    with pytest.raises(WeightsError, match=r"no tensor shows \(act_layer\)"):
        load_backbone(tmp_path)


def test_a_square_number_of_positions_may_hold_a_class_token():
    peer = timm_vit(num_classes=5)
    peer.model = timm.models.VisionTransformer(
        img_size=(16, 32), patch_size=8, embed_dim=WIDTH, depth=1, num_heads=HEADS, num_classes=5
    ).eval()  # 1 + 2 · 4 positions
    model = load_backbone(peer.model.state_dict(), heads=HEADS, trained_size=(16, 32))
    images = torch.randn(1, 3, 16, 32)
    assert torch.allclose(model.forward_features(images), peer.model.forward_features(images), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deit_tiny_distilled_patch16_224", "distillation token"),
        ("vit_xsmall_patch16_clip_224", "normalisation before the first block"),
        ("vit_small_patch16_dinov3", "blocks of another kind"),
        ("vit_wee_patch16_reg1_gap_256", "averaged before they are normalised"),
        ("vit_relpos_small_patch16_224", "relative positions"),
        ("pit_ti_224", r"pit|shape|square|lacks"),
    ],
)
def test_transformers_of_another_kind_are_refused_by_name(name, said):
    depth = {} if "pit" in name else {"depth": 1}
    with pytest.raises(WeightsError, match=said):
        load_backbone(timm.create_model(name, **depth).state_dict())


def test_what_stands_in_a_folder_is_not_replaced_by_an_export(tmp_path):
    model = VisionTransformer(image_size=SIZE, patch_size=PATCH, width=WIDTH, depth=1, heads=HEADS)
    (tmp_path / "thesis.tex").write_text("all my work")
    with pytest.raises(WeightsError, match=r"replace, with thesis\.tex in it"):
        export_backbone(model, tmp_path, "huggingface", overwrite=True)
    (tmp_path / "run.pth").mkdir()
    with pytest.raises(WeightsError, match="would replace"):
        export_backbone(model, tmp_path / "run.pth", "timm", overwrite=True)
    with pytest.raises(WeightsError, match="no place for a precision other than float32"):
        export_backbone(model.half(), tmp_path / "a.pth", "timm")


def test_an_export_says_where_other_sizes_will_differ(tmp_path):
    keywords = {"image_size": SIZE, "patch_size": PATCH, "width": WIDTH, "depth": 1, "heads": HEADS}
    model = VisionTransformer(**keywords, position_mode="dinov2")
    assert "other sizes" not in export_backbone(model, tmp_path / "a.pth", "reference")
    assert "in mode timm, not dino" in export_backbone(model, tmp_path / "b.pth", "timm")
    assert "in mode hf, not dino" in export_backbone(model, tmp_path / "c", "huggingface")
    assert "trained size alone" in export_backbone(model, tmp_path / "d.pth", "torchvision")

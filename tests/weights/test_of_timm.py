"""Models of timm in our files and in timm's: read, written, opened by timm itself, found by name."""

import json
from dataclasses import replace

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.testing import assert_close

import dino_vit
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.weights import WeightsError
from dino_vit.weights.backbones import LoadedTimmBackbone, LoadedTransformer
from tests.support.close import assert_close_to_scale
from tests.support.documents import with_images
from tests.support.hub import offline, snapshot
from tests.support.images import picture

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
STATISTICS = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}


def saved(tmp_path, name="test_convnext", **changes):
    torch.manual_seed(0)
    model = TimmBackbone(name=name, image_size=64, **changes).eval()
    dino_vit.save_backbone(model, tmp_path / "a.safetensors", **STATISTICS)
    return model


@torch.no_grad()
def test_our_file_holds_the_name_and_what_rebuilds_it(tmp_path):
    model = saved(tmp_path, "test_resnet", channels=3, drop_path=0.25)
    before = torch.get_rng_state()
    loaded = dino_vit.load_backbone(tmp_path / "a.safetensors")
    assert torch.equal(torch.get_rng_state(), before)
    assert not loaded.training
    assert loaded.architecture == model.architecture
    assert (loaded.provenance.mean, loaded.provenance.std) == tuple(STATISTICS.values())
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    assert loaded.transform.size == (64, 64)
    assert loaded.embed(IMAGES.sigmoid()).shape == (2, loaded.width)
    larger = dino_vit.load_backbone(tmp_path / "a.safetensors", image_size=96, drop_path=0.0)
    assert larger.grid_of(96, 96) == (3, 3)


@torch.no_grad()
def test_positions_are_resampled_to_another_size_as_timm_does(tmp_path):
    model = saved(tmp_path, "test_vit")
    loaded = dino_vit.load_backbone(tmp_path / "a.safetensors", image_size=96)
    peer = timm.create_model("test_vit", img_size=96, num_classes=0).eval()
    theirs = timm.models.vision_transformer.checkpoint_filter_fn(model.model.state_dict(), peer)
    peer.load_state_dict(theirs)
    images = torch.randn(2, 3, 96, 96)
    assert_close_to_scale(loaded(images), peer(images))


def test_wrong_arguments_and_damaged_files_are_said(tmp_path):
    saved(tmp_path)
    with pytest.raises(WeightsError, match="a model of timm, which has no heads"):
        dino_vit.load_backbone(tmp_path / "a.safetensors", heads=3)
    with pytest.raises(WeightsError, match=r"which has no mask_token; set loss\.patch_weight=0"):
        dino_vit.load_backbone(tmp_path / "a.safetensors", mask_token=True)
    model = TimmBackbone(name="test_convnext", image_size=64)
    model.config = replace(model.config, name="test_resnet")
    dino_vit.save_backbone(model, tmp_path / "b.safetensors", **STATISTICS)
    with pytest.raises(WeightsError, match="does not fit its architecture"):
        dino_vit.load_backbone(tmp_path / "b.safetensors")


@torch.no_grad()
def test_exported_it_is_timms_own(tmp_path, monkeypatch):
    """The printed lines give our features, and the file loads here again."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, "test_resnet")
    result = dino_vit.export("a.safetensors", out="b.safetensors", format="timm", verbose=False)
    names = {"given": IMAGES}
    exec(with_images(result.text), names)
    ours = dino_vit.load_backbone("a.safetensors")(IMAGES)
    assert_close_to_scale(names["output"], ours)
    again = dino_vit.load_backbone("b.safetensors")
    assert again.provenance.mean == STATISTICS["mean"]
    assert_close_to_scale(again(IMAGES), ours)


@pytest.fixture
def folder(tmp_path):
    """A folder as timm's models have on the hub."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet").eval()
    folder = tmp_path / "hub"
    folder.mkdir()

    def write(tensors=None, prepared=(), **changes):
        config = {"architecture": "test_resnet", "num_classes": 1000, **changes}
        pretrained = {"input_size": [3, 64, 64], "mean": [0.5] * 3, "std": [0.2] * 3, **dict(prepared)}
        config["pretrained_cfg"] = pretrained
        (folder / "config.json").write_text(json.dumps(config))
        save_file(model.state_dict() if tensors is None else tensors, folder / "model.safetensors")
        return folder

    return model, write


@torch.no_grad()
def test_a_folder_of_timm_loads_strictly(folder):
    model, write = folder
    loaded = dino_vit.load_backbone(write())
    model.reset_classifier(0)
    assert_close_to_scale(loaded(IMAGES), model(IMAGES))
    tensors = dict(model.state_dict())
    lacking = {name: tensor for name, tensor in tensors.items() if not name.startswith("layer3")}
    for wrong in (lacking, {**tensors, "extra.weight": torch.ones(3)}, {"foo": torch.ones(3)}):
        with pytest.raises(WeightsError, match="does not fit its architecture"):
            dino_vit.load_backbone(write(wrong))
    with pytest.raises(WeightsError, match=r"has model_args \(global_pool\), which are not supp"):
        dino_vit.load_backbone(write(model_args={"global_pool": "max"}))


@pytest.mark.parametrize(
    ("crop_mode", "crop_pct", "interpolation"), [("center", 0.8, "bicubic"), ("squash", 1.0, "bilinear")]
)
def test_a_photo_is_prepared_as_the_configuration_of_timm_says(folder, crop_mode, crop_pct, interpolation):
    """On noise within the levels, as Pillow clips what bicubic resizing overshoots."""
    prepared = {"crop_mode": crop_mode, "crop_pct": crop_pct, "interpolation": interpolation}
    given = folder[1](prepared=prepared)
    photo = Image.fromarray(picture(90, 120, 3) // 2 + 64)
    theirs = timm.data.create_transform((3, 64, 64), mean=(0.5,) * 3, std=(0.2,) * 3, **prepared)
    model = dino_vit.load_backbone(given)
    assert_close(model.transform(photo), theirs(photo), rtol=0, atol=2.5 / 255 / 0.2)
    dino_vit.save_backbone(model, given / "ours.safetensors")
    assert dino_vit.load_backbone(given / "ours.safetensors").transform == model.transform


@torch.no_grad()
def test_transformers_that_are_not_ours_are_built_by_timm(tmp_path):
    """As one with a LayerNorm before the blocks."""
    torch.manual_seed(0)
    name = "vit_xsmall_patch16_clip_224"
    model = timm.create_model(name, num_classes=0).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    pretrained = {"input_size": [3, 224, 224], **{key: model.pretrained_cfg[key] for key in ("mean", "std")}}
    config = {"architecture": name, "num_classes": 0, "pretrained_cfg": pretrained}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = dino_vit.load_backbone(tmp_path)
    images = torch.randn(2, 3, 224, 224)
    assert type(loaded) is LoadedTimmBackbone
    assert loaded.provenance.mean == model.pretrained_cfg["mean"]
    assert_close_to_scale(loaded(images), model(images))
    assert loaded.forward_features(images).shape[1] == 1 + (224 // loaded.patch_size[0]) ** 2


@torch.no_grad()
def test_other_channels_get_the_first_kernels_of_timm(folder, caplog):
    caplog.set_level("INFO", "dino_vit")
    _, write = folder
    images = torch.randn(2, 5, 64, 64, generator=torch.Generator().manual_seed(0))
    arguments = {"pretrained": True, "num_classes": 0, "in_chans": 5}
    overlay = {"file": str(write() / "model.safetensors")}
    theirs = timm.create_model("test_resnet", pretrained_cfg_overlay=overlay, **arguments).eval()
    assert_close_to_scale(dino_vit.load_backbone(write(), channels=5)(images), theirs(images))
    assert "converted 3 channels to 5 as timm does" in caplog.text


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub with a convolution and a transformer of timm's, and a network that is off."""
    offline(tmp_path, monkeypatch)
    torch.manual_seed(0)
    models = {name: timm.create_model(name).eval() for name in ("test_convnext", "test_vit")}
    for name, model in models.items():
        folder = snapshot(tmp_path, f"timm/{name}.r160_in1k")
        save_file(model.state_dict(), folder / "model.safetensors")
        statistics = {key: list(model.pretrained_cfg[key]) for key in ("mean", "std")}
        config = {"architecture": name, "num_classes": 1000}
        config["pretrained_cfg"] = {"tag": "r160_in1k", "input_size": [3, 160, 160], **statistics}
        if name == "test_vit":
            config |= {"model_args": {"num_heads": model.blocks[0].attn.num_heads}}
        (folder / "config.json").write_text(json.dumps(config))
        model.reset_classifier(0)
    return models


@torch.no_grad()
def test_names_of_timm_resolve_in_the_cache_of_the_hub(cache):
    """A vision transformer becomes ours, with attention to look at; anything else stays timm's."""
    images = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    for name in ("timm:test_convnext", "hf:timm/test_convnext.r160_in1k", "timm:test_vit"):
        model, kind = cache["test_convnext"], LoadedTimmBackbone
        if "test_vit" in name:
            model, kind = cache["test_vit"], LoadedTransformer
        loaded = dino_vit.load_backbone(name)
        assert type(loaded) is kind
        assert loaded.provenance.mean == model.pretrained_cfg["mean"]
        assert_close_to_scale(loaded(images), model(images))
    with pytest.raises(WeightsError, match="run `hf download facebook/dinov2-small` where there"):
        dino_vit.load_backbone("hf:facebook/dinov2-small")
    with pytest.raises(WeightsError, match=r"no weights of this name on the hub; timm\.list"):
        dino_vit.load_backbone("timm:test_convnet")

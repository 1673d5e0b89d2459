"""A folder that timm.create_model opens by its path, or by its name on the hub, without other arguments."""

import pytest
import timm
import torch
from timm.models import load_model_config_from_hf
from torch import nn
from torch.testing import assert_close

import dino_vit
from dino_vit import VisionTransformer, WeightsError, export_backbone, load_backbone, save_backbone
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.weights.backbones import LoadedTimmBackbone, LoadedTransformer
from tests.support.backbones import backbone
from tests.support.close import assert_close_to_scale
from tests.support.hub import offline, snapshot
from tests.support.images import smooth

STATISTICS = {"mean": (0.4, 0.5, 0.6), "std": (0.1, 0.2, 0.3)}
SMALL = {"image_size": 32, "patch_size": 8, "width": 96, "depth": 4, "heads": 4}
ROTARY = {"positions": "rotary", "layer_scale": 0.1, "registers": 2}


@pytest.fixture(autouse=True)
def in_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def written(out="vit", statistics=STATISTICS, **changes):
    """Return a backbone whose folder for timm was written, and the printed lines."""
    model = VisionTransformer(**SMALL | changes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    save_backbone(model, "mine.safetensors", **statistics)
    result = dino_vit.export("mine.safetensors", out, format="timm", verbose=False)
    return load_backbone("mine.safetensors"), result.text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"registers": 2, "layer_scale": 0.1, "mlp_ratio": 2.5, "qkv_bias": False},
        {"width": 192, "heads": 3, "image_size": (32, 48), "patch_size": (8, 4)},
        {**ROTARY, "mlp": "swiglu"},
        {**ROTARY, "norm_eps": 1e-5},
        {"stem": "hybrid", "patch_size": 16, "image_size": 64},
        {"positions": "sinusoidal", "channels": 5, "statistics": {}},
    ],
)
@torch.no_grad()
def test_timm_builds_what_no_name_of_its_own_is_and_so_do_we(changes):
    model, _ = written(**changes)
    images = torch.randn(2, model.channels, *model.image_size)
    ours, theirs = model(images), timm.create_model("local-dir:vit", pretrained=True).eval()
    assert_close_to_scale(theirs(images), ours)
    again = load_backbone("vit")
    assert type(again) is LoadedTransformer
    assert_close_to_scale(again(images), ours)
    assert again.provenance.mean == model.provenance.mean
    assert again.transform == model.transform if model.channels == 3 else True


@torch.no_grad()
def test_a_preparation_that_weights_state_is_that_of_timm():
    model, _ = written()
    stated = {"size": (24, 24), "preparation": {"resize_mode": "whole", "interpolation": "bilinear"}}
    model.provenance = type(model.provenance)(**{**vars(model.provenance), **stated})
    export_backbone(model, "whole", "timm")
    theirs = timm.create_model("local-dir:whole", pretrained=True).eval()
    config = timm.data.resolve_data_config(model=theirs)
    assert (config["input_size"], config["crop_mode"], config["crop_pct"]) == ((3, 24, 24), "squash", 1.0)
    photo = smooth("RGB", (90, 60))
    images = timm.data.create_transform(**config)(photo)[None]
    std = torch.tensor(model.transform.std)[:, None, None]
    assert_close(images[0] * std, model.transform(photo) * std, rtol=0, atol=2.5 / 255)
    assert theirs(images).shape == (1, 96), "of another size than the positions are for"
    assert load_backbone("whole").transform == model.transform


@torch.no_grad()
def test_uploaded_it_is_opened_by_its_name(tmp_path, monkeypatch):
    """From the hub's cache, as timm reads a repository that was downloaded."""
    offline(tmp_path / "cache", monkeypatch)
    model, _ = written(**ROTARY)
    files = snapshot(tmp_path / "cache", "someone/photos")
    for path in (tmp_path / "vit").iterdir():
        path.rename(files / path.name)
    prepared, name, arguments = load_model_config_from_hf("someone/photos")
    assert (name, arguments["embed_dim"], prepared["input_size"]) == (
        "eva02_small_patch14_224",
        96,
        (3, 32, 32),
    )
    theirs = timm.create_model("hf-hub:someone/photos", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    assert_close_to_scale(theirs(images), model(images))
    assert_close_to_scale(load_backbone("hf:someone/photos")(images), model(images))


@torch.no_grad()
def test_it_is_fine_tuned_at_other_sizes_by_timms_own_arguments():
    written()
    classifier = timm.create_model("local-dir:vit", pretrained=True, num_classes=7, img_size=64).eval()
    images = torch.randn(2, 3, 64, 64)
    assert classifier(images).shape == (2, 7)
    assert_close_to_scale(
        classifier.forward_features(images)[:, 0], load_backbone("vit", image_size=64)(images)
    )


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
@torch.no_grad()
def test_a_student_of_timm_is_a_folder_of_timm(name):
    model = TimmBackbone(name=name, image_size=64).eval()
    save_backbone(model, "mine.safetensors", **STATISTICS)
    lines = dino_vit.export("mine.safetensors", "student", format="timm", verbose=False).text
    images = torch.randn(2, 3, 64, 64)
    smooth("RGB", (90, 60)).save("photo.jpg")
    names = {}
    exec(lines, names)
    assert_close_to_scale(names["output"], model(names["images"]))
    assert timm.create_model("local-dir:student", pretrained=True, num_classes=5)(images).shape == (2, 5)
    again = load_backbone("student")
    assert type(again) is LoadedTimmBackbone
    assert again.provenance.mean == STATISTICS["mean"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stem": "conv"}, "cannot build stem=conv, .*, so no folder"),
        ({"stem": "hybrid", "patch_size": 16, "resnet_layers": (1, 1, 1)}, r"resnet_layers=\(1, 1, 1\)"),
    ],
)
def test_what_timm_has_no_name_for_is_a_file_only(changes, message):
    model = backbone(**changes)
    with pytest.raises(WeightsError, match=message):
        export_backbone(model, "vit", "timm")
    export_backbone(model, "vit.pth", "timm")
    with pytest.raises(WeightsError, match=r"must end in \.pth, \.pt, \.safetensors, or have no suffix"):
        export_backbone(backbone(), "vit.v2", "timm")

"""What an export says: the lines that open it give our features, and the card states what is known."""

import sys
from pathlib import PurePath
from types import ModuleType

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from timm.models import VisionTransformer as TimmTransformer
from torch import nn

import dino_vit
from dino_vit import VisionTransformer, export_backbone, load_backbone, save_backbone
from dino_vit.weights.usage import usage
from tests.support.backbones import backbone
from tests.support.close import assert_close_to_scale
from tests.support.documents import blocks, rows, with_images
from tests.support.images import smooth

STATISTICS = {"mean": (0.4, 0.5, 0.6), "std": (0.1, 0.2, 0.3)}


class ReferenceTransformer(TimmTransformer):
    """The class of the DINO repository, which is no package, by that of timm, which has its tensors."""

    def __init__(self, *, img_size, **keywords):
        super().__init__(img_size=img_size[0], **{"num_classes": 0, **keywords})

    def forward(self, images):
        return self.forward_features(images)[:, 0]  # without the classifier


@pytest.fixture(autouse=True)
def in_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("vision_transformer")
    module.VisionTransformer = ReferenceTransformer
    monkeypatch.setitem(sys.modules, "vision_transformer", module)


def exported(format, *, suffix=".pth", statistics=STATISTICS, **changes):
    """Return a backbone and the lines that open an export of it."""
    keywords = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 4, **changes}
    model = VisionTransformer(**keywords)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    save_backbone(model, "mine.safetensors", **statistics)
    out = "out" if format == "huggingface" else f"out{suffix}"
    result = dino_vit.export("mine.safetensors", out=out, format=format, verbose=False)
    return load_backbone("mine.safetensors"), result.text


@torch.no_grad()
def features(lines, images=None):
    """Return what the lines of an export compute, of given images or of the photo that they open."""
    names = {"given": images}
    exec(lines if images is None else with_images(lines), names)
    return names["output"] if "output" in names else torch.from_numpy(names["cls"])


@pytest.mark.parametrize(
    ("format", "changes"),
    [
        ("timm", {"suffix": ".safetensors", "registers": 2, "layer_scale": 1.0, "mlp_ratio": 2.5}),
        ("timm", {"positions": "rotary", "registers": 2, "layer_scale": 1.0, "norm_eps": 1e-5}),
        ("reference", {}),
        ("reference", {"suffix": ".safetensors", "image_size": 40}),
        ("huggingface", {"statistics": {**STATISTICS, "range": (0.0, 100.0)}}),  # takes no photos
        ("onnx", {"suffix": ".onnx", "depth": 1}),
    ],
)
def test_the_lines_give_our_features(format, changes):
    model, lines = exported(format, **changes)
    images = torch.randn(2, 3, *model.image_size)
    if format == "huggingface":
        assert "images = ...  # (n, 3, 32, 32), float32" in lines
    assert_close_to_scale(features(lines, images), model(images))


def test_the_lines_open_a_backbone_with_a_classifier():
    model = backbone(num_classes=5)
    export_backbone(model, "out.pth", "timm")
    images = torch.randn(2, 3, *model.image_size)
    assert_close_to_scale(features(usage(model, PurePath("out.pth"), "timm"), images), model(images))


@pytest.mark.parametrize(
    "changes", [{"image_size": 48}, {"channels": 1, "statistics": {"mean": (0.4,), "std": (0.1,)}}]
)
@pytest.mark.parametrize(
    ("format", "suffix"), [("huggingface", ""), ("timm", ""), ("timm", ".pth"), ("reference", ".pth")]
)
@torch.no_grad()
def test_the_lines_embed_a_photo_as_we_do(format, suffix, changes):
    """In features of their pixels to rounding; Hugging Face's pixels too, Pillow's to two of 255."""
    model, lines = exported(format, suffix=suffix, depth=1, **changes)
    turned = Image.Exif()
    turned[274] = 6
    # The last side is odd, where timm's crop may lie a pixel further.
    sizes = [((128, 128), None), ((100, 75), turned), ((64, 54), None), ((79, 54), None)]
    for size, exif in sizes if suffix or format == "huggingface" else sizes[:3]:
        photo = smooth("L" if "channels" in changes else "RGB", size)
        photo.save("photo.jpg", quality=95, exif=exif or Image.Exif())
        names = {}
        exec(lines, names)
        assert_close_to_scale(names["output"], model(torch.as_tensor(names["images"])))
        std = torch.tensor(model.transform.std)[:, None, None]
        error = (torch.as_tensor(names["images"])[0] - model.transform("photo.jpg")) * std
        assert error.abs().max() <= (1e-6 if format == "huggingface" else 2.5 / 255), size


def test_the_card_says_what_it_is_and_not_where_it_comes_from(tmp_path):
    save_backbone(backbone(), "mine.safetensors", **STATISTICS, network="teacher", step=1200)
    model = load_backbone(tmp_path / "mine.safetensors")
    export_backbone(model, "out", "huggingface")
    card = ModelCard.load("out/README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "image-feature-extraction")
    assert (card.data.license, card.data.tags) == ("other", ["vit"])
    facts = {row[0]: row[1].strip("`") for row in rows(card.text)}
    assert facts["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert (facts["architecture"], facts["patch size"], facts["image size"]) == ("ViT/8", "8 × 8", "32 × 32")
    assert (facts["network"], facts["step"]) == ("teacher", "1200")
    assert (facts["mean"], facts["std"]) == ("0.4, 0.5, 0.6", "0.1, 0.2, 0.3")
    assert facts["sha256"] == model.provenance.sha256
    assert str(tmp_path) not in card.content


def test_the_lines_of_the_card_open_the_folder_wherever_it_is(tmp_path, monkeypatch):
    save_backbone(backbone(), "mine.safetensors", **STATISTICS)
    model = load_backbone("mine.safetensors")
    export_backbone(model, tmp_path / "far" / "vit", "huggingface")
    moved = (tmp_path / "far").rename(tmp_path / "farther") / "vit"
    monkeypatch.chdir(moved)
    (lines,) = blocks((moved / "README.md").read_text(), "python")
    smooth("RGB", (100, 75)).save("photo.jpg", quality=95)
    torch.testing.assert_close(features(lines)[0], model.embed("photo.jpg"), atol=1e-3, rtol=1e-3)

"""The lines that `export` prints give our own embedding of an image, in the library of the export."""

import logging
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from PIL import Image
from timm.models import VisionTransformer as TimmTransformer
from torch import nn

from dino_vit import VisionTransformer, load_backbone, save_backbone
from dino_vit.cli import main
from dino_vit.data.sources.open import open_source
from dino_vit.views.eval_transform import eval_transform_of
from tests.support.images import smooth

FORMATS = ["timm", "huggingface", "reference", "onnx"]
SIZES = [(128, 128), (100, 75), (61, 90), (500, 48)]  # none is at three pixels of four off, see usage.py
UPRIGHT, ON_ITS_SIDE = 1, 6


class ReferenceTransformer(TimmTransformer):
    """The class of the DINO repository, which is no package, by that of timm, which has its tensors."""

    def __init__(self, *, img_size, **keywords):
        super().__init__(img_size=img_size[0], num_classes=0, **keywords)


@pytest.fixture(autouse=True)
def in_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("vision_transformer")
    module.VisionTransformer = ReferenceTransformer
    monkeypatch.setitem(sys.modules, "vision_transformer", module)


@pytest.fixture
def exported(capsys, caplog):
    """Return a function that exports by the command, and returns the backbone and what was printed."""
    return partial(export, capsys, caplog)


def export(capsys, caplog, format, *, suffix=".pth", **changes):
    statistics = {name: changes.pop(name) for name in ("mean", "std", "bits", "range") if name in changes}
    keywords = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 4, **changes}
    model = VisionTransformer(**keywords)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    save_backbone(model, "mine.safetensors", **{"mean": (0.4, 0.5, 0.6), "std": (0.1, 0.2, 0.3)} | statistics)
    out = {"huggingface": "out", "onnx": "out.onnx"}.get(format, f"out{suffix}")
    with caplog.at_level(logging.INFO):
        assert main(["export", "mine.safetensors", out, "--format", format]) == 0
    said = capsys.readouterr()
    assert ".out" not in said.err + said.out + caplog.text, "the name of a temporary file"
    return load_backbone("mine.safetensors"), said.out


def write_photo(size, mode="RGB", orientation=UPRIGHT):
    exif = Image.Exif()
    exif[274] = orientation
    if mode in ("RGB", "L"):
        smooth(mode, size).save("photo.jpg", exif=exif, quality=95)
    else:
        smooth(mode, size).save("photo.jpg", "PNG")


@torch.no_grad()
def difference(model, lines):
    """Return the largest difference of the photo's features to ours, relative to the largest feature."""
    names = {}
    exec(lines, names)
    transform = eval_transform_of(model)
    image = transform.read(open_source("photo.jpg"), 0)[None]
    ours = model(transform.normaliser(torch.device("cpu"))(image))
    theirs = torch.as_tensor(names["cls"]) if "cls" in names else names["output"]
    assert theirs.shape == ours.shape
    return ((theirs - ours).abs().max() / ours.abs().max()).item()


@pytest.mark.parametrize("format", FORMATS)
def test_the_printed_lines_give_our_embedding_of_a_photo(exported, format):
    model, lines = exported(format)
    for size in SIZES:
        write_photo(size)
        assert difference(model, lines) < 1e-3, size
    write_photo((100, 75), orientation=ON_ITS_SIDE)
    assert difference(model, lines) < 1e-3


@pytest.mark.parametrize(
    ("format", "changes"),
    [
        ("timm", {"suffix": ".safetensors", "registers": 2, "layer_scale": 1.0, "mlp_ratio": 2.5}),
        ("timm", {"channels": 1, "mean": (0.4,), "std": (0.1,), "qkv_bias": False}),
        ("timm", {"positions": "rotary", "registers": 2, "layer_scale": 1.0, "norm_eps": 1e-5}),
        ("onnx", {"mean": None, "std": None}),
        ("reference", {"suffix": ".safetensors", "image_size": 56}),  # 64 pixels before the crop
        ("huggingface", {"registers": 2, "layer_scale": 1.0}),
    ],
)
def test_the_lines_fit_the_backbone(exported, format, changes):
    model, lines = exported(format, **changes)
    write_photo((100, 75), {1: "L"}.get(changes.get("channels"), "RGB"))
    assert difference(model, lines) < 1e-3


@pytest.mark.parametrize(
    ("format", "changes"),
    [("timm", {"bits": 16}), ("huggingface", {"range": (0.0, 100.0)}), ("reference", {"bits": 16})],
)
def test_where_photos_are_not_what_it_takes_the_lines_leave_the_images_to_the_user(exported, format, changes):
    model, lines = exported(format, **changes)
    images = torch.randn(2, 3, 32, 32)
    lines = lines.replace("images = ...", "images = given")
    assert "images = given  # (n, 3, 32, 32), float32" in lines
    names = {"given": images}
    exec(lines, names)
    torch.testing.assert_close(names["output"], model(images), atol=1e-4, rtol=1e-4)

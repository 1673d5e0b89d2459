"""Graphs for ONNX and torch.export: they give the features of the backbone, for any batch and size."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import dino_vit
from dino_vit import VisionTransformer, export_backbone, load_backbone, save_backbone
from dino_vit.weights import WeightsError
from dino_vit.weights.exporting import graphs
from tests.support.backbones import KEYWORDS

KINDS = {
    "learned": {"registers": 2},
    "rotary": {"positions": "rotary", "registers": 1, "layer_scale": 0.1},
    "swiglu": {"mlp": "swiglu"},
}


def features(path, images):
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(images)
    session = onnxruntime.InferenceSession(path)
    return [torch.from_numpy(one) for one in session.run(None, {"images": images.numpy()})]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_graph_gives_the_features(tmp_path, kind, dynamic, suffix):
    torch.manual_seed(0)
    model, path = VisionTransformer(**KEYWORDS, **KINDS[kind]).train(), tmp_path / f"vit.{suffix}"
    summary = export_backbone(model, path, suffix, dynamic=dynamic)
    assert "checked with onnxruntime" in summary or suffix == "pt2"
    assert model.training, "it is left as it was"
    model.eval()
    for count, height, width in [(1, 32, 32), (5, 32, 32), *([(2, 48, 40), (3, 16, 64)] if dynamic else [])]:
        images = torch.randn(count, 3, height, width)
        cls, patches = features(path, images)
        with torch.no_grad():
            tokens = model.forward_features(images)
        assert_close(cls, tokens[:, 0], rtol=0, atol=1e-4)
        assert_close(patches, tokens[:, 1 + model.registers :], rtol=0, atol=1e-4)


def test_the_file_says_what_it_is(tmp_path):
    save_backbone(VisionTransformer(**KEYWORDS), tmp_path / "a.safetensors", mean=(0.1,) * 3, std=(0.2,) * 3)
    model = load_backbone(tmp_path / "a.safetensors")
    export_backbone(model, tmp_path / "vit.onnx", "onnx")
    about = {one.key: one.value for one in onnx.load(tmp_path / "vit.onnx").metadata_props}
    found = json.loads(about[graphs.ABOUT])
    assert (found["mean"], found["image_size"], found["format"]) == ([0.1] * 3, [32, 32], "onnx")
    export_backbone(model, tmp_path / "vit.pt2", "pt2")
    files = {graphs.ABOUT: ""}
    torch.export.load(tmp_path / "vit.pt2", extra_files=files)
    assert json.loads(files[graphs.ABOUT])["outputs"] == ["cls", "patches"]


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_the_printed_lines_embed_a_photo_as_we_do(tmp_path, suffix, monkeypatch):
    """A real file, from its bytes to the features."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("photo.jpg")
    save_backbone(VisionTransformer(**KEYWORDS), tmp_path / "a.safetensors")
    written = dino_vit.export("a.safetensors", f"vit.{suffix}", format=suffix, dynamic=True, verbose=False)
    names = {}
    exec(str(written), names)
    found = torch.as_tensor(names["cls"])[0]
    assert_close(found, load_backbone("a.safetensors").embed("photo.jpg"), rtol=0, atol=1e-3)


def test_what_cannot_be_a_graph_is_said(tmp_path, monkeypatch):
    model = VisionTransformer(**KEYWORDS, position_mode="dino")
    with pytest.raises(WeightsError, match="positions in mode dino are resampled by constant factors"):
        export_backbone(model, tmp_path / "a.onnx", "onnx", dynamic=True)
    with pytest.raises(WeightsError, match=r"must end in \.onnx"):
        export_backbone(model, tmp_path / "a.pth", "onnx")
    with pytest.raises(ValueError, match=r"--dynamic is for onnx and pt2; timm takes images of any size"):
        dino_vit.export("a.safetensors", "b.pth", format="timm", dynamic=True)
    monkeypatch.setattr(graphs, "LARGEST_ONNX", 1e5)
    with pytest.raises(WeightsError, match=r"an ONNX file holds 0\.0001 GB, but these weights have"):
        export_backbone(model, tmp_path / "a.onnx", "onnx")
    monkeypatch.setattr(graphs, "find_spec", lambda _: None)
    with pytest.raises(WeightsError, match=r"pip install 'dino-vit\[onnx\]'"):
        export_backbone(model, tmp_path / "a.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []

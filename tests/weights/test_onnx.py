"""ONNX graphs give the features of the backbone, for any batch and size."""

import json

import onnx
import onnxruntime
import torch
from torch.testing import assert_close

from dino_vit import VisionTransformer, export_backbone, load_backbone, save_backbone
from dino_vit.weights.exporting.onnx import METADATA_KEY
from tests.support.backbones import KEYWORDS


def test_a_graph_of_any_size_gives_the_features_and_says_what_it_is(tmp_path):
    torch.manual_seed(0)
    rotary = VisionTransformer(**KEYWORDS, positions="rotary", registers=1, layer_scale=0.1, mlp="swiglu")
    save_backbone(rotary, tmp_path / "a.safetensors", mean=(0.1,) * 3, std=(0.2,) * 3)
    model, path = load_backbone(tmp_path / "a.safetensors").train(), tmp_path / "vit.onnx"
    assert "checked with onnxruntime" in export_backbone(model, path, "onnx", dynamic=True)
    assert model.training, "it is left as it was"
    model.eval()
    session = onnxruntime.InferenceSession(path)
    for count, height, width in [(1, 32, 32), (2, 48, 40), (3, 16, 64)]:
        images = torch.randn(count, 3, height, width)
        cls, patches = map(torch.from_numpy, session.run(None, {"images": images.numpy()}))
        with torch.no_grad():
            tokens = model.forward_features(images)
        assert_close(cls, tokens[:, 0], rtol=0, atol=1e-4)
        assert_close(patches, tokens[:, 1 + model.registers :], rtol=0, atol=1e-4)
    metadata = json.loads({entry.key: entry.value for entry in onnx.load(path).metadata_props}[METADATA_KEY])
    assert (metadata["mean"], metadata["image_size"], metadata["format"]) == ([0.1] * 3, [32, 32], "onnx")

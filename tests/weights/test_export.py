"""What is exported opens in the real libraries and gives our features there."""

import json
import resource

import onnx
import onnxruntime
import pytest
import timm
import torch
import torch.nn.functional as F
from onnxruntime.transformers.float16 import convert_float_to_float16
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from dino_vit import VisionTransformer, WeightsError, export_backbone, load_backbone, save_backbone
from dino_vit.weights import export
from dino_vit.weights.export import METADATA_KEY
from dino_vit.weights.formats.builders import model_arguments
from dino_vit.weights.formats.layouts import Layout
from tests.support.backbones import KEYWORDS, backbone
from tests.support.close import assert_close_to_scale
from tests.support.peers import HEADS, PEERS

FORMATS = {name: name.split("-")[0] for name in PEERS}


@pytest.mark.parametrize("name", [name for name in PEERS if name != "torchvision"])
def test_from_the_library_to_ours_and_back_changes_no_tensor(name, tmp_path):
    peer, format = PEERS[name](), FORMATS[name]
    source, classes = peer.model.state_dict(), 0 if "dinov2" in name else 5
    if format == "huggingface":
        peer.model.save_pretrained(tmp_path / "peer")
        source, classes = tmp_path / "peer", 0
    model = load_backbone(source, heads=HEADS, num_classes=classes)
    path = tmp_path / ("out" if format == "huggingface" else "out.safetensors")
    library = "transformers" if format == "huggingface" else format
    assert f"checked with {library}" in export_backbone(model, path, format)
    if format == "huggingface":
        pooler = {} if "dinov2" in name else {"add_pooling_layer": False}
        written = AutoModel.from_pretrained(path, **pooler).state_dict()
    else:
        written = load_file(path)
    expected = peer.model.state_dict()
    assert written.keys() == expected.keys()
    for key, tensor in expected.items():
        if "mask_token" not in key and not ("registers" in name and key == "cls_token"):
            assert torch.equal(written[key], tensor), key


def test_the_mask_token_goes_to_hugging_face_and_not_to_others(tmp_path):
    model = backbone(mask_token=True, layer_scale=1.0, position_mode="dinov2")
    nn.init.normal_(model.mask_token)
    export_backbone(model, tmp_path / "hf", "huggingface")
    written = load_file(tmp_path / "hf/model.safetensors")["embeddings.mask_token"]
    assert torch.equal(written, model.mask_token)
    assert torch.equal(load_backbone(tmp_path / "hf", mask_token=True).mask_token, model.mask_token)
    assert load_backbone(tmp_path / "hf").mask_token is None
    export_backbone(model, tmp_path / "timm.safetensors", "timm")
    assert "mask_token" not in load_file(tmp_path / "timm.safetensors")


@pytest.mark.parametrize("changes", [{}, {"registers": 2}, {"positions": "rotary", "layer_scale": 0.1}])
def test_timm_gives_the_maps_of_blocks_to_detectors(changes, tmp_path):
    """At another size and shape than the trained one; timm leaves out the last LayerNorm."""
    torch.manual_seed(0)
    model, path = backbone(patch_size=16, image_size=64, depth=3, **changes).eval(), tmp_path / "vit.pth"
    export_backbone(model, path, "timm")
    pyramid = timm.create_model(
        "vit_small_patch16_dinov3" if model.rotary else "vit_small_patch16_224",
        features_only=True,
        out_indices=(0, 2),
        pretrained=True,
        pretrained_cfg_overlay={"file": str(path)},
        **(model_arguments(model, "timm") | {"dynamic_img_size": True}),
    ).eval()
    images = torch.randn(2, 3, 480, 640)
    with torch.no_grad():
        ours, maps = load_backbone(path).get_intermediate_layers(images, [0, 2]), pyramid(images)
        for tokens, feature_map in zip(ours, maps, strict=True):
            assert feature_map.shape == (2, model.width, 30, 40)
            theirs = model.norm(feature_map.flatten(2).transpose(1, 2))
            assert_close_to_scale(theirs, tokens[:, model.first_patch :])


def test_a_graph_gives_the_features_of_any_number_of_images_and_says_what_it_is(tmp_path):
    torch.manual_seed(0)
    changes = {"depth": 1, "positions": "rotary", "registers": 1, "layer_scale": 0.1, "mlp": "swiglu"}
    save_backbone(backbone(**changes), tmp_path / "a.safetensors", mean=(0.1,) * 3, std=(0.2,) * 3)
    model, path = load_backbone(tmp_path / "a.safetensors").train(), tmp_path / "vit.onnx"
    assert "checked with onnxruntime" in export_backbone(model, path, "onnx")
    assert model.training, "it is left as it was"
    model.eval()
    session = onnxruntime.InferenceSession(path)
    for count in (1, 3):
        images = torch.randn(count, 3, 32, 32)
        cls, patches = map(torch.from_numpy, session.run(None, {"images": images.numpy()}))
        with torch.no_grad():
            tokens = model.forward_features(images)
        assert_close_to_scale(cls, tokens[:, 0])
        assert_close_to_scale(patches, tokens[:, 1 + model.registers :])
    metadata = json.loads({entry.key: entry.value for entry in onnx.load(path).metadata_props}[METADATA_KEY])
    assert (metadata["mean"], metadata["image_size"], metadata["format"]) == ([0.1] * 3, [32, 32], "onnx")


def test_the_rotations_of_a_graph_are_constants_that_float16_holds(tmp_path):
    """As of DINOv3; compilers of graphs that compute them in float16 return NaN or other features."""
    model = backbone(positions="rotary", registers=4, layer_scale=0.1, width=192, heads=3).eval()
    export_backbone(model, tmp_path / "vit.onnx", "onnx")
    graph = onnx.load(tmp_path / "vit.onnx")
    assert not {"Cos", "Sin", "Range"} & {node.op_type for node in graph.graph.node}
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
    halved = convert_float_to_float16(onnx.load(tmp_path / "vit.onnx"), keep_io_types=True)
    for given, least in ((graph, 0.9999), (halved, 0.999)):
        session = onnxruntime.InferenceSession(given.SerializeToString())
        cls = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
        assert F.cosine_similarity(cls, expected).min() > least


def test_weights_that_no_onnx_file_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LARGEST_GRAPH", 1e3)
    with pytest.raises(WeightsError, match="an ONNX file holds weights of up to 2 GB"):
        export_backbone(backbone(depth=1), tmp_path / "vit.onnx", "onnx")


@pytest.mark.parametrize(
    ("change", "format", "what"),
    [
        ({"registers": 2}, "reference", "registers=2"),
        ({"positions": "rotary"}, "reference", "positions=rotary"),
        ({"image_size": (32, 48)}, "huggingface", "non-square images or patches"),
        ({"layer_scale": 1.0, "mlp_ratio": 2.5}, "huggingface", "mlp_ratio=2.5"),
    ],
)
def test_an_architecture_that_the_other_library_lacks_is_refused(change, format, what, tmp_path):
    with pytest.raises(WeightsError, match=f"does not support {what}"):
        export_backbone(VisionTransformer(**{**KEYWORDS, **change}), tmp_path / "out.pth", format)


def test_an_export_that_disagrees_is_not_kept(tmp_path, monkeypatch):
    model = backbone()
    nn.init.normal_(model.blocks[0].norm1.weight)
    real, other = Layout.to_theirs, {"norm1": "norm2", "norm2": "norm1"}

    def swapped(layout, name):
        return real(layout, ".".join(other.get(part, part) for part in name.split(".")))

    monkeypatch.setattr(Layout, "to_theirs", swapped)
    with pytest.raises(WeightsError, match="relative difference of the CLS features"):
        export_backbone(model, tmp_path / "out.pth", "timm")
    assert not list(tmp_path.iterdir())


def test_a_graph_whose_patches_disagree_is_not_kept(tmp_path, monkeypatch):
    def reversed_patches(graph, images):
        tokens = graph.model.forward_features(images)
        return tokens[:, 0], tokens[:, graph.model.first_patch :].flip(1)

    monkeypatch.setattr(export._Graph, "forward", reversed_patches)
    with pytest.raises(WeightsError, match="relative difference of the CLS and patch features"):
        export_backbone(backbone(depth=1), tmp_path / "vit.onnx", "onnx")
    assert not list(tmp_path.iterdir())


def test_only_older_exports_are_replaced_and_only_if_allowed(tmp_path):
    model = backbone()
    save_backbone(model, tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match="already exists"):
        export_backbone(model, tmp_path / "a.safetensors", "timm")
    export_backbone(model, tmp_path / "a.safetensors", "timm", overwrite=True)
    (tmp_path / "folder").mkdir()
    for _ in range(2):
        export_backbone(model, tmp_path / "folder", "huggingface", overwrite=True)
    assert (tmp_path / "folder" / "config.json").exists()
    (tmp_path / "folder" / "thesis.tex").write_text("all my work")
    with pytest.raises(WeightsError, match=r"existing folder with thesis\.tex"):
        export_backbone(model, tmp_path / "folder", "huggingface", overwrite=True)
    assert (tmp_path / "folder" / "thesis.tex").exists()


def test_a_full_disk_is_a_sentence_and_leaves_what_was_there(tmp_path):
    """A limit on the size of files stands in for the full disk."""
    path, limits = tmp_path / "x.pth", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text("an older export")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(WeightsError) as caught:
            export_backbone(backbone(), path, "reference", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == f"{path} could not be written: File too large"
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "an older export"


@pytest.mark.parametrize(
    ("format", "suffix"),
    [("timm", ".pth"), ("timm", ".safetensors"), ("reference", ".pth"), ("huggingface", "")],
)
def test_an_export_loads_by_its_path_alone_with_what_was_known(format, suffix, tmp_path):
    facts = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "bits": 8, "range": (0.0, 9.0)}
    changes = {"image_size": (32, 48)} if format == "timm" else {}
    model = backbone(heads=4, **changes)
    save_backbone(model, tmp_path / "mine.safetensors", **facts, network="student", step=7)
    model = load_backbone(tmp_path / "mine.safetensors")
    export_backbone(model, tmp_path / f"out{suffix}", format)
    loaded = load_backbone(tmp_path / f"out{suffix}")
    images = torch.randn(2, 3, *model.image_size)
    assert_close_to_scale(loaded(images), model(images))
    known = loaded.provenance
    assert (loaded.heads, known.format, known.network, known.step) == (4, format, "student", 7)
    assert {name: getattr(known, name) for name in facts} == facts

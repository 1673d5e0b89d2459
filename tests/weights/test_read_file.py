"""Every kind of file that holds a backbone, and every kind that does not."""

import argparse
import io
import json
import os
import pickle

import pytest
import torch
from transformers import (
    AutoImageProcessor,
    BitImageProcessor,
    CLIPImageProcessor,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from dino_vit import WeightsError, export_backbone, load_backbone, save_backbone
from dino_vit.cli import main
from dino_vit.core.storage import write_tensors
from tests.support.backbones import IMAGES, backbone
from tests.support.images import smooth
from tests.support.peers import HF_VIT


def reference_checkpoint(student, teacher):
    """What the 2021 training code saves: DDP's prefix on the student, heads, centre, pickled arguments."""

    def net(model, prefix):
        head = {"head.mlp.0.weight": torch.randn(8, 32), "head.last_layer.weight_g": torch.ones(16, 1)}
        named = {f"backbone.{name}": tensor for name, tensor in model.state_dict().items()}
        return {prefix + name: tensor for name, tensor in {**named, **head}.items()}

    return {
        "student": net(student, "module."),
        "teacher": net(teacher, ""),
        "optimizer": {"state": {}, "param_groups": []},
        "epoch": 3,
        "args": argparse.Namespace(arch="vit_small", patch_size=8, lr=5e-4),
        "dino_loss": {"center": torch.zeros(1, 16)},
    }


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_a_reference_checkpoint_with_a_pickled_namespace(tmp_path, network):
    models = {"student": backbone(), "teacher": backbone()}
    torch.save(reference_checkpoint(**models), tmp_path / "checkpoint.pth")
    loaded = load_backbone(tmp_path / "checkpoint.pth", heads=2, network=network)
    models[network].position_mode = "dino"
    assert torch.equal(loaded(IMAGES), models[network](IMAGES))
    assert (loaded.position_mode, loaded.provenance.network) == ("dino", network)


@pytest.mark.parametrize(
    ("prefix", "old_style"), [("", True), ("module.backbone.", False), ("_orig_mod.module.", False)]
)
def test_prefixes_and_wrappers_are_removed(tmp_path, prefix, old_style):
    model = backbone(position_mode="dino")
    named = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    for content in (named, {"state_dict": named}, {"model": named, "epoch": 3}):
        torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=not old_style)
        assert torch.equal(load_backbone(tmp_path / "a.pth", heads=2)(IMAGES), model(IMAGES))


def test_training_checkpoints_of_ours_hold_both_networks(tmp_path):
    networks = {"student": backbone(), "teacher": backbone()}
    tensors = {
        f"{network}.backbone.{name}": tensor
        for network, model in networks.items()
        for name, tensor in model.state_dict().items()
    }
    tensors["teacher.head.last_layer.weight_g"] = torch.ones(4, 1)
    architecture = networks["teacher"].architecture
    metadata = {"kind": "checkpoint", "version": 1, "architecture": architecture, "mean": None, "std": None}
    write_tensors(tmp_path / "step.safetensors", tensors, json.dumps(metadata))
    for network, model in networks.items():
        loaded = load_backbone(tmp_path / "step.safetensors", network=network)
        assert torch.equal(loaded(IMAGES), model(IMAGES))
        assert loaded.provenance.network == network


class Bomb:
    """What a hostile file does: it asks for a command to be run while it is read."""

    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        return os.system, (f"touch {self.flag}",)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (torch.save, r"would run posix\.system.*Nothing in it was executed"),
        (lambda content, path: path.write_bytes(pickle.dumps(content)), "Nothing in it was executed"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(tmp_path, write, message):
    flag, path = tmp_path / "executed", tmp_path / "evil.pth"
    write({"state_dict": backbone().state_dict(), "args": Bomb(flag)}, path)
    with pytest.raises(WeightsError, match=message):
        load_backbone(path)
    assert not flag.exists()


def bad_files():
    checkpoint = io.BytesIO()
    torch.save(dict(backbone().state_dict()), checkpoint)
    return {
        "empty": b"",
        "a page": b"<!doctype html><title>404</title>",
        "half a checkpoint": checkpoint.getvalue()[: len(checkpoint.getvalue()) // 2],
    }


@pytest.mark.parametrize(
    ("name", "suffix"), [("empty", "pth"), ("a page", "safetensors"), ("half a checkpoint", "pth")]
)
def test_files_that_hold_no_weights(tmp_path, name, suffix):
    path = tmp_path / f"file.{suffix}"
    path.write_bytes(bad_files()[name])
    with pytest.raises(WeightsError, match=rf"file\.{suffix}"):
        load_backbone(path)


def test_what_holds_no_backbone(tmp_path):
    with pytest.raises(WeightsError, match=r"2 entries without a tensor \(epoch, loss\)"):
        load_backbone({"epoch": 3, "loss": 0.1})
    with pytest.raises(WeightsError, match="not a supported vision transformer"):
        load_backbone({"conv1.weight": torch.ones(2)})
    with pytest.raises(WeightsError, match="does not exist"):
        load_backbone(tmp_path / "nowhere.pth")
    with pytest.raises(WeightsError, match="holds no weights"):
        load_backbone(tmp_path)
    (tmp_path / "vit.onnx").touch()
    with pytest.raises(WeightsError, match=r"vit\.onnx is an ONNX graph, which has no weights to load"):
        load_backbone(tmp_path / "vit.onnx")
    with pytest.raises(WeightsError, match="choose from teacher, student"):
        load_backbone(backbone().state_dict(), network="ema")


def test_weights_in_several_files(tmp_path):
    """As transformers writes large ones: with an index."""
    peer = ViTModel(ViTConfig(**HF_VIT), add_pooling_layer=False).eval()
    peer.save_pretrained(tmp_path / "one")
    peer.save_pretrained(tmp_path / "several", max_shard_size="50KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    model = load_backbone(tmp_path / "several")
    assert torch.equal(model(IMAGES), load_backbone(tmp_path / "one")(IMAGES))
    index = tmp_path / "several" / "model.safetensors.index.json"
    assert load_backbone(index).provenance.sha256 == model.provenance.sha256
    next((tmp_path / "several").glob("*2-of*")).unlink()
    with pytest.raises(WeightsError, match=r"00002-of-00\d+\.safetensors, which is no file beside it"):
        load_backbone(index)
    for name in ("../elsewhere.safetensors", "", "..", 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(WeightsError, match=rf"names {name}, which is no file beside it"):
            load_backbone(index)


@pytest.mark.parametrize("known", [True, False])
def test_a_processor_that_is_missing_is_said(tmp_path, caplog, known):
    ViTModel(ViTConfig(**HF_VIT), add_pooling_layer=False).save_pretrained(tmp_path)
    if known:
        (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3]}')
    assert load_backbone(tmp_path).provenance.mean == ((0.1, 0.2, 0.3) if known else None)
    assert ("has no preprocessor_config.json" in caplog.text) != known


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        ({"crop_size": {"height": 16, "width": 24}, "size": {"shortest_edge": 18}}, (16, 24)),
        ({"crop_size": 16, "do_center_crop": False, "size": {"height": 24, "width": 24}}, (24, 24)),
        ({"size": {"shortest_edge": 18}}, (32, 32)),
    ],
)
def test_images_have_the_size_of_the_processor_and_positions_their_own(tmp_path, processor, size):
    """As DINOv2 on the Hugging Face hub: its positions are for 518 pixels, its processor crops to 224."""
    export_backbone(backbone(), tmp_path / "hub", "huggingface")
    path = tmp_path / "hub" / "preprocessor_config.json"
    stated = json.loads(path.read_text())
    del stated["crop_size"]
    path.write_text(json.dumps({**stated, **processor}))
    model = load_backbone(tmp_path / "hub")
    assert (model.image_size, model.transform.size) == ((32, 32), size)
    save_backbone(model, tmp_path / "a.safetensors")
    export_backbone(model, tmp_path / "a.pth", "timm")
    for copy in ("a.safetensors", "a.pth"):
        assert load_backbone(tmp_path / copy).transform.size == size
    assert load_backbone(tmp_path / "hub", image_size=48).transform.size == (48, 48)
    if size[0] == size[1]:
        export_backbone(model, tmp_path / "again", "huggingface")
        stated = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
        assert stated["crop_size"] == {"height": size[0], "width": size[1]}


@pytest.mark.parametrize(
    "processor",
    [
        BitImageProcessor(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}),
        CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1] * 3),
    ],
    ids=["as ours", "the shorter side whole", "all of it, bilinear"],
)
def test_a_processor_of_hugging_face_prepares_photos_as_evaluations_then_do(tmp_path, processor):
    ViTModel(ViTConfig(**HF_VIT), add_pooling_layer=False).save_pretrained(tmp_path / "hub")
    processor.save_pretrained(tmp_path / "hub")
    model = load_backbone(tmp_path / "hub")
    save_backbone(model, tmp_path / "ours.safetensors")
    export_backbone(model, tmp_path / "again", "huggingface")
    again = AutoImageProcessor.from_pretrained(tmp_path / "again")
    tolerance = {}
    if model.transform.interpolation == "bilinear" and "AVX" not in torch.backends.cpu.get_cpu_capability():
        # There torchvision resizes in float32 and rounds: a value of 255 beside PyTorch's integers.
        tolerance = {"atol": 1.01 / 255 / min(model.provenance.std), "rtol": 0}
    for size in ((60, 41), (35, 78), (40, 40), (20, 23)):
        photo = smooth("RGB", size)
        expected = processor(photo, return_tensors="pt").pixel_values[0]
        for transform in (model.transform, load_backbone(tmp_path / "ours.safetensors").transform):
            torch.testing.assert_close(transform(photo), expected, **tolerance)
        torch.testing.assert_close(again(photo, return_tensors="pt").pixel_values[0], expected)


def test_what_an_error_advises_works(tmp_path, capsys, monkeypatch):
    """Of a width that several networks have, no tensor shows the number of heads."""
    monkeypatch.chdir(tmp_path)
    torch.save(backbone(width=40, heads=2).state_dict(), "FILE")
    assert main(["inspect-weights", "FILE"]) == 2
    assert "load_backbone takes heads=N, and save_backbone writes" in capsys.readouterr().err
    save_backbone(load_backbone("FILE", heads=2), "new.safetensors")
    assert main(["inspect-weights", "new.safetensors"]) == 0

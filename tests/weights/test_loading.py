"""Every kind of file that holds a backbone, and every kind that does not."""

import argparse
import io
import json
import logging
import os
import pickle
import zipfile

import pytest
import safetensors.torch
import torch

from dino_vit import VisionTransformer, WeightsError, load_backbone, save_backbone
from dino_vit.core.storage import read_metadata, write_tensors
from dino_vit.data.images.pixels import Pixels
from dino_vit.views.preparation import preparation_of

KEYWORDS = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}
IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(5))


def backbone(**changes) -> VisionTransformer:
    return VisionTransformer(**{**KEYWORDS, **changes}).eval()


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


def test_our_own_file_says_what_it_is(tmp_path):
    model = backbone(
        channels=5, registers=2, positions="sinusoidal", stem="unfold", position_mode="timm", heads=4
    )
    path = tmp_path / "mine.safetensors"
    statistics = {"mean": (0.5,) * 5, "std": (0.2,) * 5, "bits": 16, "range": (0.0, 4095.0)}
    save_backbone(model, path, **statistics, network="teacher", step=700, config={"seed": 3})
    loaded = load_backbone(path)
    assert {**loaded.architecture, "image_size": 32, "patch_size": 8} == model.architecture
    known = loaded.provenance
    assert (known.format, known.network, known.step, known.config) == (
        "dino-vit",
        "teacher",
        700,
        {"seed": 3},
    )
    assert (known.mean, known.std) == ((0.5,) * 5, (0.2,) * 5)
    assert (known.bits, known.range) == (16, (0.0, 4095.0))
    assert preparation_of(loaded).pixels == Pixels(channels=5, bits=16, range=(0.0, 4095.0))
    assert not loaded.training
    assert not loaded.pos_embed.requires_grad
    images = torch.randn(2, 5, 24, 40)
    assert torch.equal(loaded(images), model(images))
    save_backbone(loaded, tmp_path / "again.safetensors")
    saved, again = read_metadata(path), read_metadata(tmp_path / "again.safetensors")
    assert again["sha256"] == saved["sha256"], "nothing is lost on the way"


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_a_reference_checkpoint_with_a_pickled_namespace(tmp_path, network):
    models = {"student": backbone(), "teacher": backbone()}
    torch.save(reference_checkpoint(**models), tmp_path / "checkpoint.pth")
    loaded = load_backbone(tmp_path / "checkpoint.pth", heads=2, network=network)
    models[network].position_mode = "dino"
    assert torch.equal(loaded(IMAGES), models[network](IMAGES))
    assert (loaded.position_mode, loaded.provenance.network) == ("dino", network)


@pytest.mark.parametrize("old_style", [True, False])
@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 3}]
)
@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "module.backbone.", "_orig_mod."])
def test_prefixes_and_wrappers_are_peeled_off(tmp_path, wrap, prefix, old_style):
    model = backbone()
    named = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save(wrap(named), tmp_path / "a.pth", _use_new_zipfile_serialization=not old_style)
    loaded = load_backbone(tmp_path / "a.pth", heads=2)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(loaded(images), model(images))


def test_heads_of_early_and_later_official_files_are_left_out(caplog):
    named = {
        **backbone().state_dict(),
        "projection_head.0.weight": torch.zeros(2),
        "prototypes.weight_v": torch.zeros(2),
        "head.last_layer.parametrizations.weight.original0": torch.zeros(2),
    }
    with caplog.at_level(logging.INFO, "dino_vit"):
        load_backbone({f"module.{name}": tensor for name, tensor in named.items()}, heads=2)
    assert "left out DINO head (3 tensors)" in caplog.text


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("chunked", [True, False])
def test_dinov2_files(registers, chunked):
    model = backbone(layer_scale=1.0, registers=registers, mlp="swiglu")
    named = {"mask_token": torch.zeros(1, 32), "dino_head.mlp.0.weight": torch.zeros(1)}
    for name, tensor in model.state_dict().items():
        name = name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")
        parts = name.split(".")
        if chunked and parts[0] == "blocks":
            name = ".".join(["blocks", str(int(parts[1]) // 2), *parts[1:]])
        named[name] = tensor
    content = (
        {"teacher": {f"backbone.{name}": tensor for name, tensor in named.items()}} if chunked else named
    )
    loaded = load_backbone(content, heads=2)
    assert loaded.position_mode == ("timm" if registers else "dinov2")
    assert loaded.provenance.format == "dinov2"
    model.position_mode = loaded.position_mode
    assert torch.equal(loaded(IMAGES), model(IMAGES))


def test_separate_queries_keys_and_values_are_fused():
    model = backbone(qkv_bias=False)
    named = dict(model.state_dict())
    for index in range(3):
        fused = named.pop(f"blocks.{index}.attn.qkv.weight")
        for third, rows in zip(("query", "key", "value"), fused.chunk(3), strict=True):
            named[f"blocks.{index}.attn.{third}.weight"] = rows
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(load_backbone(named, heads=2)(images), model(images))
    del named["blocks.1.attn.key.weight"]
    with pytest.raises(WeightsError, match=r"1 missing: blocks.1.attn.qkv.weight; 2 surplus: .*query.*value"):
        load_backbone(named, heads=2)


def test_run_folders_give_their_newest_checkpoint(tmp_path):
    old, new = backbone(), backbone()
    for step, model in ((100, old), (2000, new)):
        save_backbone(model, tmp_path / "checkpoints" / f"step-{step:08d}.safetensors")
    assert torch.equal(load_backbone(tmp_path)(IMAGES), new(IMAGES))


def test_training_checkpoints_of_ours_hold_both_networks(tmp_path):
    networks = {"student": backbone(), "teacher": backbone()}
    tensors = {
        f"{network}.backbone.{name}": tensor
        for network, model in networks.items()
        for name, tensor in model.state_dict().items()
    }
    metadata = {
        "kind": "checkpoint",
        "architecture": networks["teacher"].architecture,
        "mean": None,
        "std": None,
    }
    tensors["teacher.head.last_layer.weight_g"] = torch.ones(4, 1)
    write_tensors(tmp_path / "step.safetensors", tensors, json.dumps(metadata))
    for network, model in networks.items():
        loaded = load_backbone(tmp_path / "step.safetensors", network=network)
        assert torch.equal(loaded(IMAGES), model(IMAGES))
        assert loaded.provenance.network == network


def test_another_image_size_resamples_the_positions_and_says_so(caplog):
    model = backbone(position_mode="dino")
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(model.state_dict(), heads=2, image_size=(32, 48))
    assert "positions resampled from 4 × 4 to 4 × 6 (mode dino)" in caplog.text
    assert loaded.trained_grid == (4, 6)
    assert torch.allclose(loaded(IMAGES), model(IMAGES), atol=1e-6)


def test_files_whose_positions_are_no_square():
    model = backbone(image_size=(16, 48))
    with pytest.raises(WeightsError, match=r"12 positions.*give the trained_size"):
        load_backbone(model.state_dict(), heads=2)
    with pytest.raises(WeightsError, match=r"12 positions, but trained_size=\(16, 40\) means 2 × 5"):
        load_backbone(model.state_dict(), heads=2, trained_size=(16, 40))
    loaded = load_backbone(model.state_dict(), heads=2, trained_size=(16, 48))
    assert loaded.trained_grid == (2, 6)
    assert torch.equal(loaded(torch.ones(1, 3, 16, 48)), model(torch.ones(1, 3, 16, 48)))


@pytest.mark.parametrize("channels", [1, 2, 13])
def test_channels_are_inflated_by_the_stated_rule(channels, caplog):
    model = backbone()
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(model.state_dict(), heads=2, channels=channels)
    assert f"patch embedding from 3 to {channels} channels" in caplog.text
    assert loaded.provenance.mean is None, "RGB statistics say nothing about other channels"
    grey = torch.randn(2, 1, 32, 32)
    inflated, rgb = (m(grey.expand(-1, n, -1, -1)) for m, n in ((loaded, channels), (model, 3)))
    assert torch.allclose(inflated, rgb, atol=1e-5)


def test_half_precision_files_become_float32(caplog):
    named = {name: tensor.half() for name, tensor in backbone().state_dict().items()}
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(named, heads=2)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert "converted float16 to float32" in caplog.text


def test_the_log_names_count_format_and_hash(tmp_path, caplog):
    torch.save(backbone().state_dict(), tmp_path / "dino.pth")
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(tmp_path / "dino.pth", heads=2)
    (record,) = caplog.records
    assert "dino.pth: 42 tensors (reference, backbone, sha256" in record.getMessage()
    assert loaded.provenance.sha256[:12] in record.getMessage()


def test_loading_is_strict_and_names_what_does_not_fit():
    named = backbone().state_dict()
    moved = {**named, "blocks.0.attn.q_norm.weight": torch.ones(8)}
    del moved["norm.bias"]
    moved["norm.weight"] = torch.ones(31)
    with pytest.raises(WeightsError) as caught:
        load_backbone(moved, heads=2)
    said = str(caught.value)
    assert "1 missing: norm.bias" in said
    assert "1 surplus: blocks.0.attn.q_norm.weight" in said
    assert "1 of another shape: norm.weight (31,) instead of (32,)" in said
    with pytest.raises(WeightsError, match=r"surplus: head\.3\.weight"):
        load_backbone({**named, "head.3.weight": torch.ones(1)}, heads=2)


def test_what_the_tensors_cannot_tell_is_asked_for():
    with pytest.raises(WeightsError, match="width of 32, and no tensor shows how many heads"):
        load_backbone(backbone().state_dict())
    assert load_backbone(backbone(width=192, heads=3).state_dict()).heads == 3


def test_the_format_decides_between_look_alikes():
    named = backbone().state_dict()
    assert load_backbone(named, heads=2).position_mode == "dino"
    assert load_backbone(named, heads=2, format="timm").position_mode == "timm"
    assert load_backbone(named, heads=2, format="dino-vit").position_mode == "hf"
    with pytest.raises(WeightsError, match="none of dino-vit, reference"):
        load_backbone(named, heads=2, format="jax")
    with pytest.raises(WeightsError, match="is in the reference format, not in torchvision"):
        load_backbone(named, heads=2, format="torchvision")


class Bomb:
    """What a hostile file does: it asks for a command to be run while it is read."""

    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        return os.system, (f"touch {self.flag}",)


@pytest.mark.parametrize(
    ("writer", "said"),
    [
        ("torch", r"would have to run posix\.system.*Nothing in it was executed"),
        ("old torch", r"would have to run posix\.system.*Nothing in it was executed"),
        ("pickle", "Nothing in it was executed"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(tmp_path, writer, said):
    flag, path = tmp_path / "executed", tmp_path / "evil.pth"
    content = {"state_dict": backbone().state_dict(), "args": Bomb(flag)}
    if writer == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=writer == "torch")
    with pytest.raises(WeightsError, match=said):
        load_backbone(path)
    assert not flag.exists()


def zip_of_text() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("notes.txt", "no weights here")
    return buffer.getvalue()


def bytes_of(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


BAD_FILES = {
    "empty": b"",
    "a page": b"<!doctype html><title>404</title>",
    "a zip of text": zip_of_text(),
    "half a checkpoint": bytes_of(dict(VisionTransformer(**KEYWORDS).state_dict()))[: 200_000 // 2],
}


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_weights(tmp_path, name, suffix):
    path = tmp_path / f"file.{suffix}"
    path.write_bytes(BAD_FILES[name])
    with pytest.raises(WeightsError, match=rf"file\.{suffix}"):
        load_backbone(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.ones(2)], "holds a list, not a dict"),
        ({}, "it is empty"),
        ({"epoch": 3, "loss": 0.1}, r"2 other entries \(epoch, loss\)"),
        ({"conv1.weight": torch.ones(2)}, "no vision transformer that is known here"),
        ({"cls_token": torch.ones(1, 1, 8), "pos_embed": torch.ones(1, 5, 8)}, "lacks a tensor"),
        ({"teacher": {"a": torch.ones(1)}}, "no student; it holds teacher"),
    ],
)
def test_checkpoints_of_something_else(tmp_path, content, said):
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=said):
        load_backbone(tmp_path / "other.pth", network="student")


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(WeightsError, match="does not exist"):
        load_backbone(tmp_path / "nowhere.pth")
    with pytest.raises(WeightsError, match="holds no weights"):
        load_backbone(tmp_path)
    with pytest.raises(WeightsError, match="neither of teacher and student"):
        load_backbone(backbone().state_dict(), network="ema")


def test_a_damaged_file_of_ours_is_refused(tmp_path):
    path = tmp_path / "mine.safetensors"
    save_backbone(backbone(), path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="damaged"):
        load_backbone(path)


def test_saving_refuses_what_would_mislead(tmp_path):
    with pytest.raises(WeightsError, match=r"must end in \.safetensors"):
        save_backbone(backbone(), tmp_path / "a.pth")
    with pytest.raises(WeightsError, match="mean has 1 values for 3 channels"):
        save_backbone(backbone(), tmp_path / "a.safetensors", mean=(0.5,), std=(0.5,))


def test_plain_safetensors_of_the_reference_layout(tmp_path):
    model = backbone(position_mode="dino")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "a.safetensors")
    assert torch.equal(load_backbone(tmp_path / "a.safetensors", heads=2)(IMAGES), model(IMAGES))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: (100 * t).to(torch.int8), "holds int8, but weights are floating-point"),
        (lambda t: t.to(torch.complex64), "holds complex64"),
        (lambda t: t.to_sparse(), "meta or sparse"),
        (lambda t: t.to("meta"), "meta or sparse"),
    ],
)
def test_tensors_that_would_become_other_numbers_are_refused(spoil, said):
    named = dict(backbone().state_dict())
    named["blocks.1.mlp.fc2.weight"] = spoil(named["blocks.1.mlp.fc2.weight"])
    with pytest.raises(WeightsError, match=rf"blocks.1.mlp.fc2.weight .*{said}|{said}"):
        load_backbone(named, heads=2)


def test_integers_in_a_head_do_no_harm():
    model = backbone()
    named = {f"backbone.{name}": tensor for name, tensor in model.state_dict().items()}
    named["head.mlp.1.num_batches_tracked"] = torch.tensor(7)
    model.position_mode = "dino"
    assert torch.equal(load_backbone({"teacher": named}, heads=2)(IMAGES), model(IMAGES))


@pytest.mark.parametrize("prefix", ["_orig_mod.module.", "module._orig_mod.", "_orig_mod.module.backbone."])
def test_prefixes_in_any_order(prefix):
    named = {prefix + name: tensor for name, tensor in backbone().state_dict().items()}
    assert load_backbone(named, heads=2).position_mode == "dino"


def test_a_prefix_of_ddp_alone_does_not_make_a_file_dinos():
    named = {f"module.{name}": tensor for name, tensor in backbone(num_classes=5).state_dict().items()}
    assert load_backbone(named, heads=2).provenance.format == "timm"


def test_names_that_fall_together_are_not_chosen_from():
    named = dict(backbone().state_dict())
    with pytest.raises(WeightsError, match="more than one network"):
        load_backbone({**named, "backbone.cls_token": torch.ones(1, 1, 32)}, heads=2)
    with pytest.raises(
        WeightsError, match=r"holds blocks.1.norm1.weight twice, .* as blocks.0.1.norm1.weight"
    ):
        load_backbone({**named, "blocks.0.1.norm1.weight": torch.ones(32)}, heads=2)
    parts = {f"blocks.0.attn.{part}.weight": torch.ones(32, 32) for part in "qkv"}
    with pytest.raises(WeightsError, match="3 surplus"):
        load_backbone({**named, **parts}, heads=2)


def test_a_gap_in_the_blocks_is_named_however_high_it_reaches():
    named = {k.replace("blocks.1.", "blocks.99999999."): t for k, t in backbone().state_dict().items()}
    with pytest.raises(WeightsError, match=r"12 missing: blocks\.1\..* 12 surplus: blocks\.99999999\."):
        load_backbone(named, heads=2)


@pytest.mark.parametrize(
    "name", ["cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc2.weight"]
)
@pytest.mark.parametrize("reshape", [lambda t: t.sum(), lambda t: t[..., :0], lambda t: t.flatten()])
def test_shapes_that_lie_are_refused(name, reshape):
    named = dict(backbone().state_dict())
    named[name] = reshape(named[name])
    with pytest.raises(WeightsError):
        load_backbone(named, heads=2)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ("{", "does not say what it holds"),
        ("[]", "does not say what it holds"),
        ('{"kind": "backbone", "mean": null, "std": null}', "does not say what it holds"),
        (
            '{"kind": "", "mean": null, "std": null, "architecture": {}, "version": 2}',
            "written by another dino-vit",
        ),
        ('{"kind": "", "mean": null, "std": null, "architecture": {"soup": 1}}', "not known here: soup"),
    ],
)
def test_a_file_of_ours_that_says_nonsense_of_itself(tmp_path, metadata, said):
    write_tensors(tmp_path / "a.safetensors", backbone().state_dict(), metadata)
    with pytest.raises(WeightsError, match=said):
        load_backbone(tmp_path / "a.safetensors")


def test_a_pickle_names_what_it_would_run(tmp_path):
    torch.save({"model": backbone().state_dict(), "place": tmp_path}, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"would have to run pathlib\S*Path"):
        load_backbone(tmp_path / "a.pth", heads=2)


def test_a_config_of_something_else_in_the_same_folder_is_not_read(tmp_path):
    torch.save(backbone().state_dict(), tmp_path / "dino.pth")
    (tmp_path / "config.json").write_text(
        '{"model_type": "vit", "layer_norm_eps": 0.1, "num_attention_heads": 4}'
    )
    loaded = load_backbone(tmp_path / "dino.pth", heads=2)
    assert (loaded.position_mode, loaded.architecture["norm_eps"]) == ("dino", 1e-6)

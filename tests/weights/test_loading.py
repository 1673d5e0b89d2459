"""What loading converts, resamples, inflates, logs and refuses; what saving keeps."""

import logging

import pytest
import torch

from dino_vit import WeightsError, load_backbone, save_backbone
from dino_vit.core.storage import read_metadata
from dino_vit.data.images.pixels import Pixels
from dino_vit.views.preparation import preparation_of
from tests.support.backbones import IMAGES, backbone


def test_our_own_file_has_all_that_loading_needs(tmp_path):
    model = backbone(
        channels=5, registers=2, positions="sinusoidal", stem="unfold", position_mode="timm", heads=4
    )
    path = tmp_path / "mine.safetensors"
    statistics = {"mean": (0.5,) * 5, "std": (0.2,) * 5, "bits": 16, "range": (0.0, 4095.0)}
    save_backbone(model, path, **statistics, network="teacher", step=700, config={"seed": 3})
    loaded = load_backbone(path)
    assert {**loaded.architecture, "image_size": 32, "patch_size": 8} == model.architecture
    known = loaded.provenance
    assert (known.format, known.network, known.step) == ("dino-vit", "teacher", 700)
    assert known.config == {"seed": 3}
    assert {name: getattr(known, name) for name in statistics} == statistics
    assert preparation_of(loaded).pixels == Pixels(channels=5, bits=16, range=(0.0, 4095.0))
    assert not loaded.training
    assert not loaded.pos_embed.requires_grad
    images = torch.randn(2, 5, 24, 40)
    assert torch.equal(loaded(images), model(images))
    save_backbone(loaded, tmp_path / "again.safetensors")
    saved, again = read_metadata(path), read_metadata(tmp_path / "again.safetensors")
    assert again["sha256"] == saved["sha256"]


def test_saving_refuses_what_would_mislead(tmp_path):
    with pytest.raises(WeightsError, match=r"must end in \.safetensors"):
        save_backbone(backbone(), tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"mean needs one value per channel \(3\), not 1"):
        save_backbone(backbone(), tmp_path / "a.safetensors", mean=(0.5,), std=(0.5,))


def test_another_image_size_resamples_the_positions(caplog):
    model = backbone(position_mode="dino")
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(model.state_dict(), heads=2, image_size=(32, 48))
    assert "resampled positions from 4 × 4 to 4 × 6 (mode dino)" in caplog.text
    assert loaded.trained_grid == (4, 6)
    assert torch.allclose(loaded(IMAGES), model(IMAGES), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 2, 13])
def test_inflated_channels_answer_equal_ones_as_before(channels, caplog):
    model = backbone()
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(model.state_dict(), heads=2, channels=channels)
    assert f"inflated patch embedding from 3 to {channels} channels" in caplog.text
    assert loaded.provenance.mean is None, "RGB statistics do not apply to other channels"
    grey = torch.randn(2, 1, 32, 32)
    inflated, rgb = (m(grey.expand(-1, n, -1, -1)) for m, n in ((loaded, channels), (model, 3)))
    assert torch.allclose(inflated, rgb, atol=1e-5)


def test_half_precision_files_become_float32(caplog):
    named = {name: tensor.half() for name, tensor in backbone().state_dict().items()}
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(named, heads=2)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert "converted float16 to float32" in caplog.text


def test_one_log_line_has_count_format_and_hash(tmp_path, caplog):
    torch.save(backbone().state_dict(), tmp_path / "dino.pth")
    with caplog.at_level(logging.INFO, "dino_vit"):
        loaded = load_backbone(tmp_path / "dino.pth", heads=2)
    (record,) = caplog.records
    assert "dino.pth: loaded 42 tensors (reference, backbone, sha256" in record.getMessage()
    assert loaded.provenance.sha256[:12] in record.getMessage()


def test_loading_is_strict():
    named = backbone().state_dict()
    moved = {**named, "blocks.0.attn.q_norm.weight": torch.ones(8)}
    del moved["norm.bias"]
    moved["norm.weight"] = torch.ones(31)
    with pytest.raises(WeightsError, match="does not fit") as caught:
        load_backbone(moved, heads=2)
    for message in (
        'Missing key(s) in state_dict: "norm.bias".',
        'Unexpected key(s) in state_dict: "blocks.0.attn.q_norm.weight".',
        "size mismatch for norm.weight",
    ):
        assert message in str(caught.value)
    with pytest.raises(WeightsError, match=r'Unexpected.*"head\.3\.weight"'):
        load_backbone({**named, "head.3.weight": torch.ones(1)}, heads=2)


def test_a_gap_in_the_blocks_is_named_however_high_it_reaches():
    named = {k.replace("blocks.1.", "blocks.99999999."): t for k, t in backbone().state_dict().items()}
    with pytest.raises(WeightsError, match=r'(?s)Missing.*"blocks\.1\..*Unexpected.*"blocks\.99999999\.'):
        load_backbone(named, heads=2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: (100 * t).to(torch.int8), "is int8; weights must be floating-point"),
        (lambda t: t.to(torch.complex64), "is complex64"),
        (lambda t: t.to_sparse(), "is a meta or sparse tensor"),
        (lambda t: t.to("meta"), "is a meta or sparse tensor"),
    ],
)
def test_tensors_that_would_become_other_numbers_are_refused(spoil, message):
    named = dict(backbone().state_dict())
    named["blocks.1.mlp.fc2.weight"] = spoil(named["blocks.1.mlp.fc2.weight"])
    with pytest.raises(WeightsError, match=rf"blocks\.1\.mlp\.fc2\.weight {message}"):
        load_backbone(named, heads=2)

"""The command that compares backbones: its figures are those of the evaluators."""

import json

import numpy as np
import pytest
import torch

import dino_vit
from dino_vit import VisionTransformer, save_backbone

SETTINGS = {"precision": "no", "verbose": False}


@pytest.fixture
def others(tmp_path, weights):
    """Weights of two backbones, in folders of their own."""
    torch.manual_seed(1)
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=3, heads=2)
    save_backbone(model, tmp_path / "b.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return [str(weights), str(tmp_path / "b.safetensors")]


def test_figures_are_those_of_the_evaluators(tmp_path, others, trained):
    paths = [others[1], str(trained)]
    found = dino_vit.compare(
        "synthetic:60:16", weights=paths, output=tmp_path / "out", cache=tmp_path, **SETTINGS
    )
    assert list(found.figures) == ["k-NN top-1", "linear top-1"]
    for path in paths:
        shared = {"weights": path, "output": tmp_path / "one.json", "cache": tmp_path, **SETTINGS}
        knn = dino_vit.knn("synthetic:60:16", k=20, **shared)
        assert found.figures["k-NN top-1"][path].percent == pytest.approx(knn.top1.percent)
    linear = dino_vit.linear("synthetic:60:16", select="train", **shared)  # of the last
    assert found.figures["linear top-1"][path].percent == pytest.approx(linear.top1.percent)
    written = json.loads(found.path.read_text())
    assert written["figures"]["k-NN top-1"][path] == vars(found.figures["k-NN top-1"][path])
    assert len(found.pairs) == 2
    assert found.verdict in found.text
    assert all(path in found.text for path in paths)


def test_masks_are_judged_and_an_untrained_network_joins(tmp_path, weights):
    found = dino_vit.compare(
        "synthetic:scenes:12:16",
        weights=[weights],
        untrained=True,
        measures=["dense"],
        output=tmp_path / "out",
        **SETTINGS,
    )
    of_masks = dino_vit.dense(
        "synthetic:scenes:12:16", weights=weights, output=tmp_path / "one.json", **SETTINGS
    )
    assert found.figures["mIoU, linear layer"][str(weights)] == of_masks.linear.mean_iou
    untrained = dino_vit.load_backbone(tmp_path / "out" / "untrained.safetensors")
    trained = dino_vit.load_backbone(weights)
    assert untrained.architecture == trained.architecture
    assert not torch.equal(untrained.state_dict()["cls_token"], trained.state_dict()["cls_token"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": ["a"]}, "give two weights or more, or one and untrained=true"),
        ({"weights": ["a", "a"]}, "weights are given twice"),
        ({"weights": ["a", "b"], "measures": ["dense"]}, "measures=dense: .* has no masks"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        dino_vit.compare("synthetic:60:16", output=tmp_path / "out", **settings, **SETTINGS)
    assert not (tmp_path / "out").exists()


def test_weights_that_cannot_be_loaded_are_said_before_anything_is_measured(tmp_path, weights):
    paths = [weights, tmp_path / "missing.safetensors"]
    with pytest.raises(ValueError, match=r"missing\.safetensors does not exist"):
        dino_vit.compare("synthetic:60:16", weights=paths, output=tmp_path / "out", **SETTINGS)
    assert not (tmp_path / "out").exists()


def test_images_without_labels_and_masks_cannot_be_judged(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((6, 16, 16, 3), np.uint8))
    with pytest.raises(ValueError, match="measures=knn: the images need labels of two classes or more"):
        dino_vit.compare(tmp_path / "a.npy", weights=["a", "b"], output=tmp_path / "out", **SETTINGS)

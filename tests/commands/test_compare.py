"""The command that compares backbones: its figures are those of the evaluators, its page loads no more."""

import json

import numpy as np
import pytest
import torch

import dino_vit
from dino_vit import VisionTransformer, save_backbone
from dino_vit.commands.compare import names_of
from dino_vit.data.sources.synthetic import SyntheticSource
from tests.support.reports import ParsedPage, picture_of

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
    names = list(found.ranks)
    for name, path in zip(names, paths, strict=True):
        shared = {"weights": path, "output": tmp_path / "one.json", "cache": tmp_path, **SETTINGS}
        knn = dino_vit.knn("synthetic:60:16", k=20, **shared)
        assert found.figures["k-NN top-1"][name].percent == pytest.approx(knn.top1.percent)
        assert 1 <= found.ranks[name] <= 32
    linear = dino_vit.linear("synthetic:60:16", select="train", **shared)  # of the last
    assert found.figures["linear top-1"][name].percent == pytest.approx(linear.top1.percent)
    assert json.loads(found.path.read_text()) == found.details
    assert len(found.pairs) == 2
    page = ParsedPage(found.page.read_text())
    assert found.verdict in page.text
    assert all(name in page.text for name in names)
    loaded = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    assert all(value.startswith(("data:", "#")) for value in loaded)
    assert not any(name.startswith("on") or name == "style" for _, name, _ in page.attributes)
    assert page.data["charts"] == []  # the run has no evaluations


def test_images_on_which_they_differ_are_shown_with_what_each_says(tmp_path, others):
    found = dino_vit.compare(
        "synthetic:60:16", weights=others, measures=["knn"], output=tmp_path / "out", **SETTINGS
    )
    text = ParsedPage(found.page.read_text()).text
    predictions = [
        dino_vit.knn(
            "synthetic:60:16", weights=one, k=20, output=tmp_path / "one.json", **SETTINGS
        ).predictions
        for one in others
    ]
    right = [one.right for one in predictions]
    best = int(right[1].sum() > right[0].sum())
    only = right[best] & ~right[1 - best]
    missed = right[1 - best] & ~right[best]
    assert f"is right: {only.sum()} of 60 images" in text
    assert f"another right: {missed.sum()} of 60 images" in text
    classes = SyntheticSource(length=60).classes
    first = int(missed.nonzero()[0][0])
    assert f"✗ {'ab'[best]}.safetensors: {classes[predictions[best].ranked[first, 0]]}" in text


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
    assert found.figures["mIoU, linear layer"]["a.safetensors"] == of_masks.linear.mean_iou
    untrained = dino_vit.load_backbone(tmp_path / "out" / "untrained.safetensors")
    trained = dino_vit.load_backbone(weights)
    assert untrained.architecture == trained.architecture
    assert not torch.equal(untrained.state_dict()["cls_token"], trained.state_dict()["cls_token"])


def test_images_of_other_channels_are_shown_too(tmp_path):
    generator = np.random.default_rng(0)
    np.save(tmp_path / "scenes.npy", generator.integers(0, 255, (6, 16, 16, 5), dtype=np.uint8))
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=2, heads=2, channels=5)
    save_backbone(model, tmp_path / "five.safetensors", mean=(0.5,) * 5, std=(0.5,) * 5)
    found = dino_vit.compare(
        tmp_path / "scenes.npy",
        weights=tmp_path / "five.safetensors",
        untrained=True,
        output=tmp_path / "out",
        **SETTINGS,
    )
    assert not found.figures
    assert "no labels" in found.verdict
    pictures = [value for tag, name, value in ParsedPage(found.page.read_text()).attributes if name == "src"]
    assert len(pictures) == 4 * (1 + 2 * 2)
    assert all(np.ptp(picture_of(uri)) > 0 for uri in pictures)  # none is an empty frame


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


def test_names_are_short_and_differ():
    steps = ["runs/a/checkpoints/step-00000100.safetensors", "runs/a/checkpoints/step-00001200.safetensors"]
    assert names_of(steps) == ["a, step 100", "a, step 1,200"]
    assert names_of(["runs/a", "runs/b/c"]) == ["a", "b/c"]
    assert names_of(["runs/a", "hf:facebook/dinov2-small"]) == ["a", "hf:facebook/dinov2-small"]
    assert names_of(["runs/a", "./runs/a"]) == ["runs/a", "./runs/a"]

"""The command that compares backbones: its figures are those of the evaluators."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import dino_vit
from dino_vit import VisionTransformer, save_backbone
from dino_vit.config.commands import BackboneConfig
from dino_vit.data.open import open_source
from dino_vit.eval.compare import (
    names_of,
    untrained_like,
)
from dino_vit.eval.features import frozen_backbone
from dino_vit.eval.online import rankme
from tests.support.runs import arguments, command_here

pytestmark = pytest.mark.usefixtures("few_penalties")
SETTINGS = {"precision": "no", "verbose": False}


@pytest.fixture
def others(tmp_path, weights):
    """Weights of two backbones, in folders of their own."""
    torch.manual_seed(1)
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=3, heads=2)
    save_backbone(model, tmp_path / "b.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return [str(weights), str(tmp_path / "b.safetensors")]


def test_baselines_are_compared_as_backbones_are(tmp_path, weights):
    names = [str(weights), "gradients", "pixels", "untrained"]
    found = dino_vit.compare("synthetic:60:16", weights=names, cache=tmp_path, **SETTINGS)
    assert [*found.ranks] == ["a.safetensors", "gradients", "pixels", "untrained"]
    alone = dino_vit.knn("synthetic:60:16", "gradients", k=[20], cache=tmp_path, **SETTINGS)
    assert found.figures["k-NN top-1"]["gradients"] == alone.figure
    best = max(found.figures["k-NN top-1"].values(), key=lambda figure: figure.value)
    assert f"{best}" in str(found)
    assert "k-NN top-1, 60 images   linear top-1, 12 images   effective rank\n" in str(found)


def test_figures_are_those_of_the_evaluators(tmp_path, others):
    command_here(*arguments(tmp_path / "run", {"budget.steps": 5, "optim.warmup_epochs": 0}))
    paths = [others[1], str(tmp_path / "run")]
    found = dino_vit.compare(
        "synthetic:60:16", weights=paths, output=tmp_path / "out", cache=tmp_path, **SETTINGS
    )
    assert list(found.figures) == ["k-NN top-1", "linear top-1"]
    names = list(found.ranks)
    for name, path in zip(names, paths, strict=True):
        shared = {"weights": path, "cache": tmp_path, **SETTINGS}
        knn = dino_vit.knn("synthetic:60:16", k=20, **shared)
        compared = found.figures["k-NN top-1"][name]
        for part in ("value", "low", "high"):
            assert getattr(compared, part) == pytest.approx(getattr(knn.figure, part))
        frozen = frozen_backbone(BackboneConfig(source="synthetic", weights=path, precision="no"))
        (batch,) = frozen.features(open_source("synthetic:60:16"), [range(60)])
        assert found.ranks[name] == pytest.approx(rankme(batch.values), rel=1e-3)
    linear = dino_vit.linear("synthetic:60:16", **shared)  # of the last
    assert found.figures["linear top-1"][name].value == pytest.approx(linear.figure.value)
    written = json.loads(found.path.read_text())
    assert written["figures"]["k-NN top-1"][name] == found.figures["k-NN top-1"][name].as_json()
    assert written["effective_rank"] == found.ranks
    assert written["weights"] == dict(zip(names, paths, strict=True))
    assert len(found.pairs) == 2
    assert found.verdict in found.text
    assert all(name in found.text for name in names)
    assert found.text.endswith(f"{found.picture}\n{found.path}")
    with Image.open(found.picture) as picture:
        assert picture.width > picture.height > 100


def test_each_line_is_said_once_and_the_title_names_what_is_compared(tmp_path, others, caplog):
    caplog.set_level("INFO", "dino_vit")
    found = dino_vit.compare(
        "synthetic:40:16",
        [*others, "untrained"],
        train="synthetic:60:16",
        measures=["knn", "linear"],
        output=tmp_path / "out",
        cache=tmp_path,
        precision="no",
    )
    assert sum("one class for each of 40 images" in message for message in caplog.messages) == 1
    assert len(set(caplog.messages)) == len(caplog.messages)
    images = "on 40 images of synthetic:40:16, learned from synthetic:60:16"
    assert found.text.startswith(f"a.safetensors, b.safetensors, untrained {images}\n")


def test_an_untrained_network_joins(weights):
    settings = {"measures": ["knn"], **SETTINGS}
    found = dino_vit.compare("synthetic:60:16", weights=["untrained", weights], **settings)
    assert list(found.ranks) == ["untrained", "a.safetensors"]
    assert found.ranks["untrained"] != found.ranks["a.safetensors"]


def test_an_untrained_network_sees_images_as_the_trained_one_does(tmp_path, weights):
    model = dino_vit.load_backbone(weights)
    told = {"size": (12, 12), "preparation": {"interpolation": "bilinear"}}
    model.provenance = replace(model.provenance, **told)
    save_backbone(model, tmp_path / "other.safetensors")
    config = {"source": "synthetic", "weights": str(tmp_path / "other.safetensors"), "precision": "no"}
    trained = frozen_backbone(BackboneConfig(**config))
    untrained = untrained_like(trained, seed=0)
    assert untrained.transform == trained.transform
    assert untrained.transform.size == (12, 12)
    assert untrained.model.architecture == trained.model.architecture
    assert untrained.weights_digest != trained.weights_digest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": ["a"]}, "give two weights or more, such as a gradients pixels untrained"),
        ({"weights": ["a", "a"]}, "weights are given twice"),
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


def test_images_without_labels_are_compared_by_the_rank_which_does_not_tell(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (6, 16, 24, 5), dtype=np.uint8)
    np.save(tmp_path / "scenes.npy", images)
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=2, heads=2, channels=5)
    save_backbone(model, tmp_path / "five.safetensors", mean=(0.5,) * 5, std=(0.5,) * 5)
    found = dino_vit.compare(
        tmp_path / "scenes.npy",
        weights=[tmp_path / "five.safetensors", "untrained"],
        output=tmp_path / "out",
        **SETTINGS,
    )
    assert not found.figures
    assert list(found.ranks) == ["five.safetensors", "untrained"]
    assert "The effective rank alone does not tell which features are better." in found.verdict
    assert found.picture is None, "there are no figures to draw"
    with pytest.raises(ValueError, match="measures=knn: the images need labels of two classes or more"):
        dino_vit.compare(tmp_path / "scenes.npy", weights=["a", "b"], measures=["knn"], **SETTINGS)


def test_names_are_short_and_differ():
    steps = ["runs/a/checkpoints/step-00000100.safetensors", "runs/a/checkpoints/step-00001200.safetensors"]
    assert names_of(steps) == ["a (step 100)", "a (step 1200)"]
    assert names_of(["runs/a", "runs/b/c"]) == ["a", "b/c"]
    assert names_of(["runs/a", "hf:facebook/dinov2-small"]) == ["a", "hf:facebook/dinov2-small"]
    assert names_of(["runs/a", "./runs/a"]) == ["runs/a", "./runs/a"]
    assert names_of(["runs/a", "runs/untrained"]) == ["runs/a", "runs/untrained"]  # not those of the seed
    assert names_of(["a", "./gradients", "gradients"]) == ["a", "./gradients", "gradients"]
    assert names_of(["runs/a", "gradients", "untrained"]) == ["a", "gradients", "untrained"]

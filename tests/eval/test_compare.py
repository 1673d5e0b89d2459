"""The command that compares backbones: its figures are those of the evaluators."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import dino_vit
from dino_vit import VisionTransformer, save_backbone
from dino_vit.config.commands import BackboneConfig
from dino_vit.data.open import open_source
from dino_vit.eval.compare import compare_pairs, standings, untrained_like, verdict
from dino_vit.eval.online import rankme
from dino_vit.eval.statistics import measured_share
from dino_vit.features.frozen import frozen_backbone
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
    names = [str(weights), "edges", "pixels", "untrained"]
    found = dino_vit.compare("synthetic:60:16", weights=names, cache=tmp_path, **SETTINGS)
    assert [*found.ranks] == names
    alone = dino_vit.knn("synthetic:60:16", "edges", k=[20], cache=tmp_path, **SETTINGS)
    assert found.figures["k-NN top-1"]["edges"] == alone.figure
    best = max(found.figures["k-NN top-1"].values(), key=lambda figure: figure.value)
    assert f"{best}" in str(found)
    assert "k-NN top-1, 60 images   linear top-1, 12 images   effective rank\n" in str(found)


def test_figures_are_those_of_the_evaluators(tmp_path, others):
    command_here(*arguments(tmp_path / "run", {"budget.steps": 5, "optim.warmup_epochs": 0}))
    paths = [others[1], str(tmp_path / "run")]
    found = dino_vit.compare(
        "synthetic:60:16", weights=paths, output=tmp_path / "out.json", cache=tmp_path, **SETTINGS
    )
    assert list(found.figures) == ["k-NN top-1", "linear top-1"]
    assert list(found.ranks) == paths
    for path in paths:
        shared = {"weights": path, "cache": tmp_path, **SETTINGS}
        knn = dino_vit.knn("synthetic:60:16", k=20, **shared)
        compared = found.figures["k-NN top-1"][path]
        for part in ("value", "low", "high"):
            assert getattr(compared, part) == pytest.approx(getattr(knn.figure, part))
        frozen = frozen_backbone(BackboneConfig(source="synthetic", weights=path, precision="no"))
        (batch,) = frozen.features(open_source("synthetic:60:16"), [range(60)])
        assert found.ranks[path] == pytest.approx(rankme(batch.values), rel=1e-3)
    linear = dino_vit.linear("synthetic:60:16", **shared)  # of the last
    assert found.figures["linear top-1"][path].value == pytest.approx(linear.figure.value)
    written = json.loads(found.path.read_text())
    assert written["figures"]["k-NN top-1"][path] == found.figures["k-NN top-1"][path].as_json()
    assert written["effective_rank"] == found.ranks
    assert len(found.pairs) == 2
    assert found.verdict in found.text
    assert all(path in found.text for path in paths)
    assert found.text.endswith(f"\n{found.path}")


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
        ({"weights": ["a"]}, "give two weights or more, such as a edges pixels untrained"),
        ({"weights": ["long" * 99]}, r"such as (long)+ \.\.\. edges pixels untrained"),
        ({"weights": ["a", "a"]}, "weights are given twice"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        dino_vit.compare("synthetic:60:16", output=tmp_path / "out.json", **settings, **SETTINGS)
    assert not (tmp_path / "out.json").exists()


def test_weights_that_cannot_be_loaded_are_said_before_anything_is_measured(tmp_path, weights):
    paths = [weights, tmp_path / "missing.safetensors"]
    with pytest.raises(ValueError, match=r"missing\.safetensors does not exist"):
        dino_vit.compare("synthetic:60:16", weights=paths, output=tmp_path / "out.json", **SETTINGS)
    assert not (tmp_path / "out.json").exists()


def test_images_without_labels_are_compared_by_the_rank_which_does_not_tell(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (6, 16, 24, 5), dtype=np.uint8)
    np.save(tmp_path / "scenes.npy", images)
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=2, heads=2, channels=5)
    save_backbone(model, tmp_path / "five.safetensors", mean=(0.5,) * 5, std=(0.5,) * 5)
    found = dino_vit.compare(
        tmp_path / "scenes.npy",
        weights=[tmp_path / "five.safetensors", "untrained"],
        output=tmp_path / "out.json",
        **SETTINGS,
    )
    assert not found.figures
    assert list(found.ranks) == [str(tmp_path / "five.safetensors"), "untrained"]
    assert "The effective rank alone does not tell which features are better." in found.verdict


def figures_of(**right):
    """One figure of several backbones: the images that each gets right, of a hundred."""
    images = np.arange(100)
    shares = {name: torch.from_numpy(np.isin(images, rows)) for name, rows in right.items()}
    return {"k-NN": {name: measured_share("k-NN", images, share) for name, share in shares.items()}}


def test_a_backbone_is_as_good_as_the_best_unless_pairs_of_images_say_otherwise():
    figures = figures_of(a=range(40), b=range(60), c=range(2, 60))
    pairs = compare_pairs(figures)
    assert [(pair.better, pair.other) for pair in pairs] == [("b", "c"), ("b", "a"), ("c", "a")]
    assert all(pair.difference.points > 0 and pair.difference.low <= pair.difference.high for pair in pairs)
    assert pairs[1].difference.p < 1e-4
    assert pairs[0].difference.p == 0.5  # two images that only one of them gets right
    assert [pair.corrected_p for pair in pairs] == [min(1, 3 * pair.difference.p) for pair in pairs]
    assert standings(figures, pairs) == {"k-NN": ("b", "c")}


def test_the_verdict_names_who_is_best_everywhere_or_says_that_it_depends():
    knn, linear = ("a",), ("b", "a")
    assert verdict({"k-NN": knn, "linear": linear}) == (
        "Take a: no other is significantly better on these images by k-NN and linear."
    )
    assert verdict({"linear": linear}) == (
        "Take b; a may be as good: no significant difference on these images by linear."
    )
    assert verdict({"k-NN": ("a", "b"), "linear": linear}) == (
        "Take a or b: no significant difference on these images by k-NN and linear."
    )
    assert "rank alone does not tell which features are better" in verdict({})
    assert verdict({"k-NN": knn, "linear": ("b",)}) == (
        "It depends on the figure. The best is by k-NN a; by linear b."
    )


def test_the_smallest_p_of_the_bootstrap_is_no_limit_to_how_many_are_compared():
    """Twenty-seven backbones, of which one is better on every image by far."""
    shares = torch.rand(100, generator=torch.Generator().manual_seed(0)).double()
    figures = {f"{n}": measured_share("mAP", np.arange(100), shares / 4) for n in range(27)}
    figures["5"] = measured_share("mAP", np.arange(100), shares / 4 + 0.7)
    assert standings({"mAP": figures}, compare_pairs({"mAP": figures})) == {"mAP": ("5",)}

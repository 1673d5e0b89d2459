import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from dino_vit.data.sources.open import FolderSource
from dino_vit.data.sources.synthetic import SyntheticSource
from dino_vit.eval.features.extraction import extract_features, pixel_features
from dino_vit.eval.knn import weighted_knn
from dino_vit.eval.online import OnlineEvaluation, rankme
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import Preparation
from tests.support.backbones import backbone
from tests.support.images import write_synthetic
from tests.support.naive import ranked_classes

PREPARATION = Preparation(size=(32, 32), mean=(0.5,) * 3, std=(0.25,) * 3)
SETTINGS = {"preparation": PREPARATION}


@pytest.mark.parametrize("shape", [(50, 8), (5, 12), (9, 9)])
def test_rankme_is_the_exponential_of_the_entropy_of_the_singular_values(shape):
    features = torch.randn(*shape) @ torch.diag(torch.logspace(-2, 1, shape[1]))
    product = features.double().T @ features.double()
    singular = [math.sqrt(value) for value in torch.linalg.eigvalsh(product).tolist() if value > 1e-12]
    shares = [value / sum(singular) for value in singular]
    expected = math.exp(-sum(share * math.log(share) for share in shares))
    assert rankme(features) == pytest.approx(expected, rel=1e-6)


def test_rankme_counts_directions():
    basis = torch.linalg.qr(torch.randn(20, 20)).Q
    assert rankme(basis[:, :6]) == pytest.approx(6)
    assert rankme(torch.ones(20, 6)) == pytest.approx(1)
    assert rankme(torch.zeros(20, 6)) == 1


def test_figures_are_those_of_each_image_among_the_others():
    source, model = SyntheticSource(length=500), backbone()
    evaluation = OnlineEvaluation(source=source, **SETTINGS, seed=3, images=120, batch_size=50)
    figures = evaluation(model)
    features = extract_features(model, source, evaluation.indices, **SETTINGS, batch_size=50).values
    similar = F.normalize(features) @ F.normalize(features).T
    labels, right = [source.label(index) for index in evaluation.indices], 0
    for query in range(120):
        others = [i for i in range(120) if i != query]
        classes = ranked_classes(similar[query, others].tolist(), [labels[i] for i in others], 20)
        right += classes[0] == labels[query]
    assert set(figures) == {"knn", "rankme"}
    assert figures["knn"] == pytest.approx(100 * right / 120)
    assert figures["rankme"] == pytest.approx(rankme(features))
    assert evaluation(model) == figures


def test_the_images_are_a_function_of_the_seed():
    def indices(seed, **changes):
        source = SyntheticSource(length=300)
        return OnlineEvaluation(source=source, **SETTINGS, seed=seed, **{"images": 50, **changes}).indices

    assert indices(0) == indices(0)
    assert sorted(set(indices(0))) == sorted(indices(0))
    assert len(indices(0)) == 50
    assert indices(1) != indices(0)
    assert sorted(indices(0, images=5000)) == list(range(300))


class SpectrumBackbone(VisionTransformer):
    """A stand-in that knows something: the amplitude spectrum, blind to place, as its class token."""

    def __init__(self):
        super().__init__(image_size=32, patch_size=8, width=544, depth=1, heads=1)

    def forward_cls(self, images):
        grey = images[:, 0] - images[:, 0].mean((1, 2), keepdim=True)
        return torch.fft.rfft2(grey).abs().sqrt().flatten(1)


def test_good_features_score_above_raw_pixels():
    source = SyntheticSource(length=1200)
    evaluation = OnlineEvaluation(source=source, **SETTINGS, seed=0)
    pixels, figures = evaluation.raw_pixels(), evaluation(SpectrumBackbone())
    assert 0 < pixels < 26
    assert figures["knn"] > pixels + 20


def test_raw_pixels_of_large_images_are_shrunk():
    source = SyntheticSource(length=300, size=128)
    wide, small = (replace(PREPARATION, size=size) for size in ((128, 64), (32, 16)))
    large = OnlineEvaluation(source=source, preparation=wide, seed=0, images=250)
    pixels = pixel_features(source, large.indices, preparation=small).values
    labels = torch.tensor(large.indices) % 10
    ranked = weighted_knn(pixels, labels, pixels, k=[20], own=0)[20]
    assert large.raw_pixels() == pytest.approx(100 * float((ranked[:, 0] == labels).float().mean()))


class PartlyLabelled(SyntheticSource):
    def __init__(self, length, labels):
        super().__init__(length=length)
        self.labels = labels

    def label(self, index):
        return self.labels.get(index)


@pytest.mark.parametrize("labels", [{}, dict.fromkeys(range(100), 7)], ids=["no labels", "one class"])
def test_without_labels_the_rank_is_what_there_is(labels):
    evaluation = OnlineEvaluation(source=PartlyLabelled(100, labels), **SETTINGS, seed=0, images=40)
    assert set(evaluation(backbone())) == {"rankme"}
    assert len(evaluation.indices) == 40
    assert evaluation.raw_pixels() is None


def test_images_with_labels_are_preferred():
    labels = {index: index // 50 for index in range(0, 100, 5)}
    evaluation = OnlineEvaluation(source=PartlyLabelled(100, labels), **SETTINGS, seed=0, images=40)
    assert sorted(evaluation.indices) == sorted(labels)
    assert 0 <= evaluation(backbone())["knn"] <= 100  # k is what so few images allow


def test_a_broken_network_has_no_figures():
    model = backbone()
    nn.init.constant_(model.norm.weight, torch.nan)
    figures = OnlineEvaluation(source=SyntheticSource(length=30), **SETTINGS, seed=0)(model)
    assert all(math.isnan(figure) for figure in figures.values())
    assert set(figures) == {"knn", "rankme"}


def test_unreadable_images_are_left_out_with_a_warning(tmp_path, caplog):
    for number in range(12):
        write_synthetic(tmp_path / "ab"[number % 2] / f"{number}.png", number)
    for number in range(2):
        (tmp_path / "ab"[number] / f"{number}.png").write_bytes(b"")
    evaluation = OnlineEvaluation(source=FolderSource(tmp_path), **SETTINGS, seed=0)
    assert math.isfinite(evaluation(backbone())["knn"])
    assert "leaves out unreadable images: 2, first b/1.png" in caplog.text
    assert "the file is empty" in caplog.text


def test_two_processes_have_the_figures_of_one(tmp_path):
    torch.manual_seed(1)
    model = backbone()
    expected = [
        OnlineEvaluation(source=SyntheticSource(length=length), **SETTINGS, seed=0)(model)
        for length in (101, 2)
    ]
    mp.spawn(_evaluate, args=(f"file://{tmp_path / 'rendezvous'}", model.state_dict()), nprocs=2)
    for number in range(2):
        figures = torch.load(tmp_path / f"rendezvous{number}")
        for of_group, alone in zip(figures, expected, strict=True):
            assert of_group == pytest.approx(alone, rel=1e-5)


def _evaluate(number, rendezvous, weights):
    dist.init_process_group("gloo", init_method=rendezvous, rank=number, world_size=2)
    try:
        model = backbone()
        model.load_state_dict(weights)
        figures = [
            OnlineEvaluation(source=SyntheticSource(length=length), **SETTINGS, seed=0)(model)
            for length in (101, 2)
        ]
    finally:
        dist.destroy_process_group()
    torch.save(figures, f"{rendezvous.removeprefix('file://')}{number}")

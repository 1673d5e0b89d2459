"""A file with a backbone and a classifier is read strictly, and what it states is checked."""

import json
from dataclasses import replace

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dino_vit.core.storage import OWN_KEY, read_tensors, write_tensors
from dino_vit.models.backbone import FeatureSpec
from dino_vit.models.classifiers import LinearScores, NeighbourScores
from dino_vit.models.readings import Levelling
from dino_vit.weights import WeightsError, load_backbone, save_backbone
from dino_vit.weights.classifier import (
    ClassifierFacts,
    ImageClassifier,
    load_classifier,
    save_classifier,
)
from dino_vit.weights.export import export_backbone

FACTS = {"task": "multiclass", "classes": ("a", "b", "c"), "tokens": "cls", "blocks": 1}


@pytest.fixture
def classifier(weights):
    backbone = load_backbone(weights, verbose=False)
    scores = LinearScores(torch.randn(3, 32), torch.randn(3))
    return ImageClassifier(backbone, scores, ClassifierFacts(kind="linear", temperature=2.0, **FACTS))


def changed(path, *, tensors=None, **facts):
    """Write a file again with other tensors and facts, and compute its digest again."""
    old, texts = read_tensors(path)
    metadata = json.loads(texts[OWN_KEY])
    metadata["classifier"] |= facts
    write_tensors(path, {**old, **(tensors or {})}, json.dumps(metadata))


def test_what_was_saved_is_loaded(classifier, tmp_path):
    path = tmp_path / "c.safetensors"
    save_classifier(classifier, path, classifier.transform)
    loaded, images = load_classifier(path), torch.randn(4, 3, 16, 16)
    assert torch.equal(loaded(images), classifier.eval()(images))
    features = classifier.backbone(images)
    expected = ((features @ classifier.scores.weight.T + classifier.scores.bias) / 2).softmax(1)
    torch.testing.assert_close(loaded(images), expected)
    assert not loaded.training
    assert loaded.facts == classifier.facts


def test_files_have_no_paths_of_the_run(classifier, weights, tmp_path):
    """As exports, they are for others."""
    model, config = load_backbone(weights, verbose=False), {"data": {"source": "/home/ada/photos"}}
    save_backbone(model, tmp_path / "run.safetensors", config=config)
    backbone = load_backbone(tmp_path / "run.safetensors", verbose=False)
    assert backbone.provenance.config == config
    path = tmp_path / "c.safetensors"
    save_classifier(
        ImageClassifier(backbone, classifier.scores, classifier.facts), path, classifier.transform
    )
    assert b"/home/ada" not in path.read_bytes()
    assert str(tmp_path).encode() not in path.read_bytes()
    assert load_backbone(path, verbose=False).provenance.mean == (0.5,) * 3


def test_votes_are_those_of_the_neighbours():
    bank, targets = torch.randn(20, 8), torch.arange(20) % 3
    queries, values = torch.randn(5, 8), torch.nn.functional.one_hot(targets, 3)
    found = NeighbourScores(F.normalize(bank), targets, k=4, classes=3)(queries)
    for query, row in zip(queries, found, strict=True):
        cosines = torch.cosine_similarity(query[None], bank)
        near = cosines.argsort(descending=True)[:4]
        votes = (cosines[near] / 0.07).softmax(0) @ values[near].float()
        torch.testing.assert_close(row, (votes + 1 / 12).log())


@pytest.fixture
def reading(weights):
    """A classifier that reads CLS, cells and edges, levelled by random matrices."""
    backbone, spec = load_backbone(weights, verbose=False), FeatureSpec(tokens="cls+cells+edges")
    widths = spec.widths(backbone)
    level = Levelling(torch.randn(sum(widths)), [torch.randn(width, width) for width in widths])
    facts = ClassifierFacts(kind="linear", levelled=True, **FACTS | {"tokens": spec.tokens})
    return ImageClassifier(backbone, LinearScores(torch.randn(3, sum(widths)), torch.randn(3)), facts, level)


def test_what_is_read_is_kept_and_exported(reading, tmp_path):
    path, graph = tmp_path / "c.safetensors", tmp_path / "c.onnx"
    save_classifier(reading, path, reading.transform)
    loaded, images = load_classifier(path, verbose=False), torch.randn(5, 3, 16, 16)
    assert torch.equal(loaded(images), reading.eval()(images))
    parts = torch.split(reading.spec.extract(reading.backbone, images), [32, 9 * 32, 900], dim=1)
    means = torch.split(reading.reading.mean, [32, 9 * 32, 900])
    level = [(x - m) @ a for x, m, a in zip(parts, means, reading.reading.matrices, strict=True)]
    joined = torch.cat([F.normalize(part) for part in level], 1)
    torch.testing.assert_close(loaded(images), reading.scores(joined).softmax(1))
    changed(path, tensors={"classifier.reading.matrix2": torch.randn(900, 899)})
    with pytest.raises(WeightsError, match="does not fit its backbone and classes"):
        load_classifier(path)
    export_backbone(reading, graph, "onnx")
    found = onnxruntime.InferenceSession(graph).run(None, {"images": images.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), loaded(images), rtol=1e-4, atol=1e-5)


def test_a_classifier_of_edges_alone_is_exported(tmp_path):
    """For any number of images."""
    backbone = load_backbone("edges", verbose=False)
    backbone.provenance = replace(backbone.provenance, mean=(0.5,) * 3, std=(0.5,) * 3)
    scores = LinearScores(torch.randn(3, 900), torch.randn(3))
    classifier = ImageClassifier(backbone, scores, ClassifierFacts(kind="linear", **FACTS))
    export_backbone(classifier, tmp_path / "c.onnx", "onnx")
    images = torch.randn(5, 3, 48, 48)
    found = onnxruntime.InferenceSession(tmp_path / "c.onnx").run(None, {"images": images.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), classifier.eval()(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "neighbours"}, "does not fit its backbone and classes"),
        ({"classes": ["a", "b"]}, "does not fit its backbone and classes"),
        ({"blocks": 2}, "does not fit its backbone and classes"),
        ({"temperature": float("nan")}, "temperature"),
        ({"tensors": {"classifier.weight": torch.randn(3, 7)}}, "does not fit its backbone and classes"),
        ({"tensors": {"classifier.bias": torch.full((3,), torch.nan)}}, "NaN or infinite"),
        ({"tensors": {"backbone.norm.weight": torch.full((32,), torch.nan)}}, "NaN or infinite"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(classifier, tmp_path, changes, message):
    path = tmp_path / "c.safetensors"
    save_classifier(classifier, path, classifier.transform)
    changed(path, **changes)
    with pytest.raises(WeightsError, match=message):
        load_classifier(path)


def test_a_damaged_file_is_refused(classifier, tmp_path):
    path = tmp_path / "c.safetensors"
    save_classifier(classifier, path, classifier.transform)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="damaged"):
        load_classifier(path)
    (tmp_path / "none.safetensors").write_bytes(b"none")
    with pytest.raises(WeightsError):
        load_classifier(tmp_path / "none.safetensors")
    with pytest.raises(WeightsError, match="does not exist"):
        load_classifier(tmp_path / "nowhere.safetensors")


def test_its_backbone_is_read_as_any_weights(classifier, weights, tmp_path):
    path = tmp_path / "c.safetensors"
    save_classifier(classifier, path, classifier.transform)
    ours, theirs = load_backbone(path), load_file(weights)
    assert {*ours.state_dict()} == {*theirs}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())
    assert ours.provenance.mean == (0.5,) * 3

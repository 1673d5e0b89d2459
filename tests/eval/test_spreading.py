"""Labels spread along a graph of similar images, as a loop says, and label those that are there."""

import math

import torch
import torch.nn.functional as F

import dino_vit
from dino_vit.eval import spreading
from dino_vit.eval.cross_validation import SPREADING, Trials
from dino_vit.eval.spreading import similarity_graph, spread
from tests.support.coloured_photos import colour_of


def spread_naive(features, rows, targets, classes, neighbours):
    """Return the shares of classes by plain numbers."""
    unit = F.normalize(features.double()).tolist()
    count = len(unit)
    cosines = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in unit] for x in unit]
    weights = [[0.0] * count for _ in range(count)]
    for i in range(count):
        others = sorted((j for j in range(count) if j != i), key=lambda j: -cosines[i][j])
        for j in others[:neighbours]:
            weight = math.exp((cosines[i][j] - 1) / 0.07)
            weights[i][j] += weight
            weights[j][i] += weight
    sums = [sum(row) for row in weights]
    given = [[0.0] * classes for _ in range(count)]
    for row, target in zip(rows, targets, strict=True):
        given[row][target] = 1.0
    found = given
    for _ in range(100):
        found = [
            [
                0.95 * sum(weights[i][j] / math.sqrt(sums[i] * sums[j]) * found[j][c] for j in range(count))
                + 0.05 * given[i][c]
                for c in range(classes)
            ]
            for i in range(count)
        ]
    return torch.tensor([[value / sum(row) for value in row] for row in found])


def test_labels_spread_as_by_a_loop(monkeypatch):
    monkeypatch.setattr(spreading, "NEIGHBOURS", 3)
    features = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    rows, targets = torch.tensor([0, 7, 11, 20]), torch.tensor([0, 1, 2, 1])
    found = spread(similarity_graph(features), rows, targets, 3)
    expected = spread_naive(features, rows.tolist(), targets.tolist(), 3, 3)
    torch.testing.assert_close(found.exp() - 1e-3 / 3, expected.float(), rtol=1e-3, atol=1e-5)


def test_an_image_without_a_way_to_a_label_has_none():
    """Two groups that are no neighbours, and labels in one."""
    features = torch.zeros(30, 4)
    features[:15, 0], features[15:, 1] = 1, 1
    features += 0.01 * torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    found = spread(similarity_graph(features), torch.tensor([0, 1]), torch.tensor([0, 1]), 2)
    assert found.isfinite().all()
    assert found[15:].softmax(1).tolist() == [[0.5, 0.5]] * 15


def prefer_spreading(monkeypatch):
    best = Trials.best

    def prefer(trials, rows):
        kinds = [each.kind for each in trials.tried]
        return kinds.index(SPREADING) if SPREADING in kinds else best(trials, rows)

    monkeypatch.setattr(Trials, "best", prefer)


def test_labels_spread_to_the_images_that_are_there(photos, weights, monkeypatch, few_penalties):
    """A classifier for others does without, and says so."""
    given = {"labels": photos / "labels.csv", "precision": "no", "verbose": False}
    prefer_spreading(monkeypatch)
    head = photos / "head.safetensors"
    found = dino_vit.predict(photos / "photos", weights, classifier=head, **given)
    assert "\nRead by CLS + cells, levelled; labelled by label spreading (k = 10)\n" in str(found)
    assert found.labels == [found.classes[number] for number in found.outputs.argmax(1)]
    assert found.details["tried"]["label spreading (k = 10) of CLS + cells, levelled"] == 100
    colours = dict(zip(found.names, found.labels, strict=True))
    same = [colours[name] == colour_of(name) for name in found.names]
    assert sum(same) >= 0.9 * len(same)
    kept = str(found).splitlines()[-1]
    assert (
        f"{head}: the classifier with its backbone, as weights of predict and of export; it labels by "
        in kept
    )
    assert ", as labels spread among these images only: " in kept
    facts = dino_vit.load_classifier(head, verbose=False).facts
    assert any(line.startswith("Read by ") and "spreading" not in line for line in facts.tested)


def test_labels_do_not_spread_among_too_many_images(photos, weights, monkeypatch, few_penalties, caplog):
    monkeypatch.setattr(spreading, "MOST", 95)
    prefer_spreading(monkeypatch)
    found = dino_vit.predict(photos / "photos", weights, labels=photos / "labels.csv", precision="no")
    assert "label spreading" not in str(found.details)
    assert "labels do not spread among 96 images: they are more than 95" in caplog.text

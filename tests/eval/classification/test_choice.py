"""A classifier is chosen by cross-validation, and its confidences are calibrated."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from dino_vit.config.commands import STANDARD_CS
from dino_vit.eval.classification.choice import (
    NEIGHBOURS,
    Candidate,
    calibrate,
    calibration_error,
    candidates,
    cross_validate,
    folds_of,
)
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.sets import LabelledFeatures


def features(*, task="multiclass", images=60, classes=3, width=8):
    """Features of classes that overlap."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(images) % classes
    values = torch.randn(images, width, generator=generator)
    values[torch.arange(images), targets] += 1.5
    names = tuple("abcdefgh"[:classes])
    return LabelledFeatures(values, targets, np.arange(images), names, task)


def test_all_penalties_and_numbers_of_neighbours_are_tried():
    tried = candidates("multiclass", 300)
    assert {(each.kind, each.value) for each in tried} == {
        *(("logistic regression", c) for c in STANDARD_CS),
        *(("k-NN", k) for k in NEIGHBOURS),
    }
    assert len(tried) == 13 + 6


def test_cross_validation_is_that_of_scikit_learn():
    train = features()
    folds, c = folds_of(train), 0.3
    found, neighbours = cross_validate(train, [Candidate("logistic regression", c), Candidate("k-NN", 5)], "")
    x, y = train.features.numpy(), train.targets.numpy()
    for fold in range(5):
        held = folds == fold
        scaler = StandardScaler().fit(x[~held])
        peer = LogisticRegression(C=c, tol=1e-8, max_iter=1000).fit(scaler.transform(x[~held]), y[~held])
        np.testing.assert_allclose(
            found.scores[held].softmax(1), peer.predict_proba(scaler.transform(x[held])), atol=1e-3
        )
        bank, rows = torch.from_numpy(~held), torch.from_numpy(held)
        voted = weighted_knn(train.features[bank], train.targets[bank], train.features[rows], k=[5])[5][:, 0]
        assert torch.equal(neighbours.scores[rows].argmax(1), voted)
    assert found.figure.value == pytest.approx(
        100 * float((found.scores.argmax(1) == train.targets).float().mean())
    )


def test_folds_have_stretches_of_every_class():
    train = features(images=63)
    folds = folds_of(train)
    for target in range(3):
        members = folds[train.targets.numpy() == target]
        assert set(np.bincount(members, minlength=5).tolist()) <= {4, 5}
        assert (np.diff(members) != 0).sum() == 4, "neighbours are in one fold"


def test_a_temperature_makes_confidences_true():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 5, generator=generator) * 1.5
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    (tested,) = cross_validate(features(), [Candidate("k-NN", 3)], "")
    over = tested.__class__(tested.candidate, tested.figure, 0.0, 4 * logits, torch.arange(4000))
    temperature = calibrate(over, targets, "multiclass")
    assert temperature == pytest.approx(4, rel=0.15)
    losses = [torch.nn.functional.cross_entropy(4 * logits / t, targets) for t in (0.9, 1, 1.1)]
    assert losses[1] > losses[2], "a higher temperature is better at first"
    before = calibration_error(4 * logits, targets, "multiclass", 1.0)
    after = calibration_error(4 * logits, targets, "multiclass", temperature)
    assert before > 15
    assert after < 3

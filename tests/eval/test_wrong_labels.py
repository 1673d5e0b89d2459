"""Labels that were swapped are listed, if the folds say that at least half of the list is wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dino_vit.eval.cross_validation import Candidate, Trials, cross_validate
from dino_vit.eval.sets import LabelledFeatures
from dino_vit.eval.wrong_labels import SWAPPED, TEMPERATURES, explain, find_wrong_labels, suspects

CLASSES = tuple("abcdefgh")
POOR = "Mistakes in the given labels cannot be found reliably"


def labelled(images, *, apart, share=0.0, seed=0):
    """Return images of classes that are so far apart, a share of them with swapped labels, and which."""
    random = np.random.default_rng(seed)
    true = torch.arange(images) % len(CLASSES)
    features = torch.from_numpy(random.normal(size=(images, 16))).float()
    features[torch.arange(images), true] += apart
    wrong = torch.from_numpy(random.permutation(images)[: round(share * images)])
    given = true.clone()
    given[wrong] = (true[wrong] + torch.from_numpy(random.integers(1, len(CLASSES), len(wrong)))) % len(
        CLASSES
    )
    return LabelledFeatures(features, given, np.arange(images), CLASSES), {*wrong.tolist()}


def doubts_about(train):
    folds = torch.arange(len(train)) // len(CLASSES) % 5
    trials = cross_validate(train, folds, [Candidate("logistic regression", 0.1), Candidate("k-NN", 5)], "")
    return find_wrong_labels(trials, CLASSES, [*map(str, range(len(train)))])


@pytest.mark.parametrize("images", [200, 800])
def test_swapped_labels_are_listed(images):
    train, wrong = labelled(images, apart=4, share=0.05)
    doubts = doubts_about(train)
    listed = [*map(int, doubts.columns["name"])]
    assert len(wrong.intersection(listed)) >= max(0.5 * len(listed), 0.6 * len(wrong))
    assert doubts.line.startswith(f"{len(listed)} of {images} given labels may be wrong, and probably half")
    true = [CLASSES[row % len(CLASSES)] for row in listed if row in wrong]
    assert [other for row, other in zip(listed, doubts.columns["other"], strict=True) if row in wrong] == true
    assert doubts.columns["label"] == [CLASSES[train.targets[row]] for row in listed]
    assert [*doubts.columns["probability"]] == sorted(doubts.columns["probability"])


@pytest.mark.parametrize("images", [200, 800])
@pytest.mark.parametrize("seed", range(3))
def test_right_labels_are_not_listed(images, seed):
    train, _ = labelled(images, apart=4, seed=seed)
    doubts = doubts_about(train)
    assert doubts.columns == {}
    assert doubts.line.startswith("No given label looks wrong (of 100 wrong ones about ")


@pytest.mark.parametrize(("images", "apart"), [(800, 0.5), (40, 4)])
@pytest.mark.parametrize("share", [0, 0.05])
def test_poor_features_and_few_labels_tell_nothing(images, apart, share):
    doubts = doubts_about(labelled(images, apart=apart, share=share)[0])
    assert (doubts.line, doubts.columns) == (POOR, {})


def test_nothing_is_said_of_labels_that_were_not_looked_at():
    train, _ = labelled(200, apart=4, share=0.05)
    folds = torch.arange(200) // len(CLASSES) % 5
    neighbours = cross_validate(train, folds, [Candidate("k-NN", 5)], "")
    assert find_wrong_labels(neighbours, CLASSES, []).line == ""
    tried = [Candidate("logistic regression", 0.1)]
    trials = cross_validate(train, folds, tried, "")
    assert find_wrong_labels(replace(trials, tested=torch.zeros_like(trials.tested)), CLASSES, []).line == ""
    several = Trials(
        tried, [trials.scores[0]], torch.ones(200, 8), "multilabel", folds, trials.tested, range(200)
    )
    assert find_wrong_labels(several, CLASSES, []).line == ""


def test_probabilities_and_suspects_are_those_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    scores = 5 * torch.randn(30, 4, generator=generator, dtype=torch.double)
    given = torch.randint(4, (30,), generator=generator)

    def swapped(p, share):
        return (1 - share) * p + share * (1 - p) / 3

    def likelihood(temperature, share):
        probabilities = (scores / temperature).softmax(1)
        return sum(
            math.log(swapped(float(row[y]), share)) for row, y in zip(probabilities, given, strict=True)
        )

    outputs, evidence = explain(scores, given)
    best = max(TEMPERATURES, key=lambda each: likelihood(each, SWAPPED))
    torch.testing.assert_close(outputs, (scores / best).softmax(1))
    without = max(likelihood(each, 0.0) for each in TEMPERATURES)
    assert evidence == pytest.approx(likelihood(best, SWAPPED) - without)

    def looks_wrong(p):
        return SWAPPED * (1 - p) / 3 >= (1 - SWAPPED) * p

    suspected, share = suspects(outputs, given)
    assert suspected.tolist() == [looks_wrong(float(row[y])) for row, y in zip(outputs, given, strict=True)]
    others = [
        looks_wrong(float(row[y]))
        for row, true in zip(outputs, given, strict=True)
        for y in range(4)
        if y != true
    ]
    assert share == pytest.approx(np.mean(others))

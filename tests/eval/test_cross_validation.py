"""A classifier is chosen by cross-validation, judged on what did not choose it, and calibrated."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from torch.utils._python_dispatch import TorchDispatchMode

from dino_vit.eval.cross_validation import (
    FOLDS,
    Candidate,
    Trials,
    calibrate,
    cross_validate,
    smoothed,
    train_candidate,
)
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.statistics import accuracy
from tests.support.overlapping import features, in_turn


def trials_of(right, *, targets=None, classes=2):
    """Return trials of candidates that are right on given images, (candidates, n); the folds are in turn."""
    right = torch.as_tensor(right)
    targets = torch.zeros(right.shape[1], dtype=torch.long) if targets is None else targets
    told = torch.where(right, targets, (targets + 1) % classes)
    scores = [*torch.nn.functional.one_hot(told, classes).float()]
    folds, tested = torch.arange(len(targets)) % 5, torch.ones(len(targets), dtype=torch.bool)
    tried = [Candidate("k-NN", k) for k in range(1, len(right) + 1)]
    return Trials(tried, scores, targets, "multiclass", folds, tested, range(len(targets)))


def test_cross_validation_is_that_of_scikit_learn():
    train, c = features(), 0.3
    folds, tried = in_turn(60), [Candidate("logistic regression", c), Candidate("k-NN", 5)]
    found, neighbours = cross_validate(train, folds, tried, "").scores
    x, y = train.features.numpy(), train.targets.numpy()
    for fold in range(5):
        held = (folds == fold).numpy()
        size = x[~held].std(0) @ x[~held].std(0) / x.shape[1]
        scaled = (x - x[~held].mean(0)) / size**0.5
        peer = LogisticRegression(C=c, tol=1e-8, max_iter=1000).fit(scaled[~held], y[~held])
        np.testing.assert_allclose(found[held].softmax(1), peer.predict_proba(scaled[held]), atol=1e-3)
        bank, rows = torch.from_numpy(~held), torch.from_numpy(held)
        voted = weighted_knn(train.features[bank], train.targets[bank], train.features[rows], k=[5])[5][:, 0]
        assert torch.equal(neighbours[rows].argmax(1), voted)


def test_what_is_announced_is_chosen_on_the_other_folds():
    folds = np.arange(50) % 5
    trials = trials_of(np.stack([folds != 0, folds == 0]))
    assert trials.best(trials.tested) == 0
    assert trials.figure.correct == 40, "not the 50 of the best of each fold"
    lucky = trials_of(np.stack([folds < 2, (folds > 1) & (folds < 4)]))
    assert lucky.chosen.tolist() == [[1, 1, 0, 0, 0][fold] for fold in folds]
    assert lucky.figure.correct == 0


def test_the_interval_is_wider_as_folds_learn_from_the_same_images():
    found, plain = trials_of(np.arange(50)[None] % 5 > 1).figure, accuracy(30, 50)
    assert (found.value, found.correct, found.images) == (60, 30, 50)
    for mine, other in ((found.low, plain.low), (found.high, plain.high)):
        assert (mine - 60) / (other - 60) == pytest.approx((1 + FOLDS * (1 / FOLDS) / (1 - 1 / FOLDS)) ** 0.5)
    assert trials_of(np.ones((1, 50), bool)).figure.high == 100


def test_the_candidate_with_the_lowest_loss_is_chosen():
    """The last is right about an image less of 100 than the second, and then unsure of mistakes."""
    right = np.stack([np.arange(100) % 2 > 0, np.arange(100) % 10 > 0, np.arange(100) % 10 > 0])
    right[2, 5] = False
    trials = trials_of(right)
    assert trials.best(trials.tested) == 1
    trials.scores[2][~torch.from_numpy(right[2])] /= 100
    assert trials.best(trials.tested) == 2


def test_the_best_of_many_that_guess_is_announced_as_a_guess():
    random, announced, best = np.random.default_rng(0), [], []
    for _ in range(100):
        right = random.random((19, 100)) < 0.5
        announced.append(trials_of(right).figure.value)
        best.append(right.sum(1).max())
    assert np.mean(announced) == pytest.approx(50, abs=2)
    assert np.mean(best) > 57, "this test would see it"


def test_scores_of_candidates_on_other_scales_are_ranked_alike():
    """What one candidate says a hundred times as loudly is the same, so the mAP is that of the one."""
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(40, 3, generator=generator) < 0.4).long()
    scores = targets + torch.randn(40, 3, generator=generator)
    folds = torch.arange(40) % 2
    tried, everywhere = [Candidate("k-NN", 5), Candidate("k-NN", 1)], torch.ones(40, dtype=torch.bool)
    trials = Trials(tried, [scores, 100 * scores + 7], targets, "multilabel", folds, everywhere, range(40))
    trials.__dict__["chosen"] = folds  # each candidate for half of the images
    alone = Trials(tried[:1], [scores], targets, "multilabel", folds, everywhere, range(40))
    assert trials.figure == alone.figure


def test_several_labels_are_judged_by_their_ranking():
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(60, 3, generator=generator) > 0.6).float()
    scores = [targets + torch.randn(60, 3, generator=generator) * noise for noise in (0.5, 2)]
    tried, tested = [Candidate("k-NN", 1), Candidate("k-NN", 3)], torch.ones(60, dtype=torch.bool)
    trials = Trials(tried, scores, targets, "multilabel", torch.arange(60) % 5, tested, range(60))
    expected = [100 * average_precision_score(targets, each) for each in scores]
    assert [100 * share for share in trials.figures(tested)] == pytest.approx(expected)
    assert trials.figure.value == pytest.approx(expected[0]), "the first is the better in all folds"
    assert trials.right.tolist() == ((scores[0] > 0) == (targets > 0)).all(1).tolist()


def test_a_temperature_makes_confidences_true():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 5, generator=generator) * 1.5
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    temperature = float(calibrate(4 * logits, targets, "multiclass"))
    assert temperature == pytest.approx(4, rel=0.15)
    confidences, told = (4 * logits / temperature).softmax(1).max(1)
    assert confidences.mean() == pytest.approx(float((told == targets).float().mean()), abs=0.02)
    assert (4 * logits).softmax(1).amax(1).mean() > confidences.mean() + 0.1


@pytest.mark.parametrize("size", [1e-5, 1, 1e4])
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_the_temperature_is_the_best_of_a_fine_grid_whatever_the_size_of_scores(task, size):
    generator = torch.Generator().manual_seed(0)
    scores = size * torch.randn(40, 4, generator=generator).double()
    targets = (scores / size + torch.randn(40, 4, generator=generator)).argmax(1)
    if task == "multilabel":
        targets = (scores / size + torch.randn(40, 4, generator=generator) > 0).double()

    def loss(temperature):
        """Return the cross-entropy, image by image, with targets as Platt's."""
        losses = []
        for row, target in zip((scores / temperature).tolist(), targets.tolist(), strict=True):
            if task == "multilabel":
                for label, (score, there) in enumerate(zip(row, target, strict=True)):
                    alike = sum(other[label] == there for other in targets.tolist())
                    margin, sure = score if there else -score, (alike + 1) / (alike + 2)
                    losses.append(np.logaddexp(0, -margin) * sure + np.logaddexp(0, margin) * (1 - sure))
            else:
                second = max((each for each in range(4) if each != target), key=lambda each: row[each])
                total = np.log(np.exp(np.array(row) - max(row)).sum()) + max(row)
                losses.append(total - (41 * row[target] + row[second]) / 42)
        return np.mean(losses)

    best = size * min(np.geomspace(0.05, 20, 200), key=lambda each: loss(size * each))
    found = calibrate(torch.stack([scores, scores / 7]), targets, task)
    assert found.tolist() == pytest.approx([best, best / 7], rel=0.04)


def test_with_a_margin_confidences_are_seldom_too_high():
    """The slope is so many standard errors past 0; few images then seldom promise more than is true."""
    generator = torch.Generator().manual_seed(0)
    gaps = {margin: list[float]() for margin in (0.0, 1.96)}
    for _ in range(100):
        logits = 2 * torch.randn(50, 4, generator=generator).double()
        targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
        for margin, each in gaps.items():
            outputs = (logits / (temperature := calibrate(logits, targets, "multiclass", margin))).softmax(1)
            each.append(float(outputs.amax(1).mean() - logits.softmax(1).amax(1).mean()))
    wrong = smoothed(logits, targets, "multiclass") - outputs
    slopes = [float(row @ score) for row, score in zip(wrong, logits, strict=True)]
    assert sum(slopes) == pytest.approx(1.96 * sum(slope**2 for slope in slopes) ** 0.5, rel=1e-4)
    assert temperature > 1
    too_high = {margin: sum(gap > 0 for gap in each) for margin, each in gaps.items()}
    assert too_high[0.0] > 30, "this test would see it"
    assert too_high[1.96] < 10


@pytest.mark.parametrize("images", [10, 100])
def test_right_answers_without_a_mistake_are_not_called_certain(images):
    targets = torch.arange(images) % 3
    scores = 1e-3 * F.one_hot(targets, 3).double()
    scores[:, 2] -= 1e4 * (targets != 2)  # a class that a fold has not
    confidences = (scores / calibrate(scores, targets, "multiclass")).softmax(1).amax(1)
    assert 1 - 3 / images < confidences.mean() < 1 - 0.5 / images


def test_scores_that_say_nothing_become_shares():
    generator = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(200, 4, generator=generator), torch.arange(200) % 4
    against = scores.scatter_add(1, targets[:, None], -torch.ones(200, 1))
    confidences, told = (against / float(calibrate(against, targets, "multiclass"))).softmax(1).max(1)
    assert confidences.max() < 0.26
    assert torch.equal(told, against.argmax(1)), "which label is the first is not lost"


class Allocations(TorchDispatchMode):
    """Notes how many bytes the largest tensor has, of those that are not the features themselves."""

    def __init__(self, features):
        super().__init__()
        self.features, self.largest = features.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.features:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return found


def test_features_of_very_many_labelled_images_are_not_copied(monkeypatch):
    monkeypatch.setattr("dino_vit.eval.neighbours._BANK", 2**12)
    monkeypatch.setattr("dino_vit.eval.cross_validation.JUDGED_SCORES", 600)
    train = features(images=4000, width=64)
    with Allocations(train.features) as seen:
        trials = cross_validate(train, in_turn(4000), [Candidate("k-NN", k) for k in (5, 1)], "")
        classifier = train_candidate(trials.tried[0], train)
    assert seen.largest <= 4 * 64 * 1024, (
        "of 1000 images that are judged, or less; of all it is four times that"
    )
    torch.testing.assert_close(classifier.bank.norm(dim=1), torch.ones(4000))

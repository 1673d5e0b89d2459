"""Figures, intervals, tests; metrics as of scikit-learn, for any weights of the images, and as of loops."""

import math
from fractions import Fraction
from math import comb

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, roc_auc_score

from dino_vit.eval.statistics import (
    RESAMPLES,
    PerImageMetric,
    Predictions,
    accuracy,
    auroc,
    average_precision,
    difference,
    f1,
    mcnemar,
    measure,
    measured_share,
    summed,
)

GENERATOR = np.random.default_rng(0)
N = 200
WEIGHTS = np.stack([np.ones(N), np.bincount(GENERATOR.integers(N, size=N), minlength=N)])
TRUE = (GENERATOR.random((N, 3)) < (0.5, 0.1, 0.03)).astype(float)
# Of two digits, so that scores tie; some do within a label, and some do across.
SCORES = (0.6 * GENERATOR.random((N, 3)) + 0.4 * TRUE).round(2)


@pytest.mark.parametrize(
    ("metric", "peer", "outputs", "targets"),
    [
        (average_precision, average_precision_score, SCORES, TRUE),
        (auroc, roc_auc_score, SCORES[:, :1], TRUE[:, :1]),
        (f1, lambda y, p, sample_weight: f1_score(y, p > 0.5, sample_weight=sample_weight), SCORES, TRUE),
    ],
)
def test_metrics_are_those_of_scikit_learn(metric, peer, outputs, targets):
    figures = metric(*map(torch.from_numpy, (WEIGHTS, outputs, targets)))
    for weights, values in zip(WEIGHTS, figures, strict=True):
        expected = [peer(targets[:, c], outputs[:, c], sample_weight=weights) for c in range(len(values))]
        assert values.numpy() == pytest.approx(expected, rel=1e-9)


def test_the_mean_and_the_interval_leave_out_what_cannot_be_judged():
    """No image has the last label; half of the resamples have the second, of one image, too."""
    true = torch.from_numpy(TRUE)
    true[:, 1:] = 0
    true[7, 1] = 1
    scores = torch.from_numpy(SCORES)
    measured = measure("multilabel", np.arange(N), scores, true)[0]
    first, second, last = measured.column_figures
    assert last is None
    assert 100 * measured.mean == pytest.approx((first.value + second.value) / 2)
    assert first.low < first.value < first.high
    resampled = measured.resampled()
    assert len(resampled) == 1000
    assert resampled.isfinite().all()
    assert measured.figure.low / 100 == pytest.approx(float(resampled.quantile(0.025)))
    assert measured.subset(np.arange(50)).mean == pytest.approx(
        float(average_precision(torch.ones(1, 50).double(), scores[:50], true[:50]).nanmean())
    )


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(("correct", "count"), [(0, 1), (1, 1), (0, 7), (3, 7), (81, 263), (49_999, 50_000)])
def test_the_ends_of_the_interval_are_where_the_score_test_turns(correct, count):
    """Wilson's bounds solve |share - p| = 1.96 * sqrt(p (1 - p) / count) for p: found here by bisection."""

    def excess(p):
        return abs(correct / count - p) - 1.959963984540054 * math.sqrt(p * (1 - p) / count)

    def root(outside, inside):
        for _ in range(200):
            middle = (outside + inside) / 2
            outside, inside = (middle, inside) if excess(middle) > 0 else (outside, middle)
        return inside

    found, share = accuracy(correct, count), correct / count
    assert found.low == pytest.approx(100 * root(0.0, share) if correct else 0.0, abs=1e-7)
    assert found.high == pytest.approx(100 * root(1.0, share) if correct < count else 100.0, abs=1e-7)


def test_figures_count_what_a_loop_counts():
    random = np.random.default_rng(0)
    ranked = random.random((40, 6)).argsort(axis=1)
    targets = random.integers(5, size=40)  # no image is of the last class
    predictions = Predictions(images=np.arange(40), ranked=ranked, targets=targets, classes="abcdef")
    rows = [*zip(ranked.tolist(), targets.tolist(), strict=True)]
    for k in (1, 5):
        top = predictions.top(k)
        assert (top.correct, top.images) == (sum(target in row[:k] for row, target in rows), 40)
        assert top.value == pytest.approx(100 * top.correct / 40)
        assert 0 <= top.low < top.value < top.high <= 100
    per_class = predictions.per_class()
    assert set(per_class) == {"abcdef"[target] for target in targets}
    for name, top1 in per_class.items():
        first = [row[0] == target for row, target in rows if "abcdef"[target] == name]
        assert (top1.correct, top1.images) == (sum(first), len(first))


def test_resampled_figures_are_those_of_images_drawn_with_replacement():
    values = torch.from_numpy(RANDOM.random((7, 2)))
    measured = PerImageMetric(
        title="", images=np.arange(7), parts=[values], metric=summed(lambda total: total[:, 0] / total[:, 1])
    )
    resampled = measured.resampled()
    generator = torch.Generator().manual_seed(0)
    assert len(resampled) == RESAMPLES
    for figure in resampled[:20]:
        rows = torch.randint(7, (7,), generator=generator)
        total = sum(values[row] for row in rows)
        assert float(figure) == pytest.approx(float(total[0] / total[1]))


def test_the_mean_of_classes_counts_each_class_alike():
    """As of scikit-learn's balanced accuracy."""
    targets = np.repeat([0, 1, 3], [30, 8, 2])
    ranked = np.where(np.arange(40) % 4, targets, 0)[:, None]
    found = Predictions(images=np.arange(40), ranked=ranked, targets=targets, classes="abcd")
    figure = found.mean_of_classes()
    assert figure.value == pytest.approx(100 * balanced_accuracy_score(targets, ranked[:, 0]))
    assert figure.low < figure.value <= figure.high


def by_definition(first, second):
    """The share of all ways to split the images that are at least as uneven."""
    count = first + second
    ways = sum(comb(count, k) for k in range(count + 1) if abs(2 * k - count) >= abs(first - second))
    return float(Fraction(ways, 2**count))


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 9), (9, 3), (5, 5), (40, 71), (0, 30)])
def test_mcnemar_is_the_exact_test(first, second):
    assert mcnemar(first, second) == pytest.approx(by_definition(first, second), rel=1e-9)


def rightly(title, images, right):
    return measured_share(title, np.array(images), torch.tensor(right, dtype=torch.bool))


def test_backbones_are_compared_on_the_images_that_both_judged():
    first = rightly("a", [4, 2, 9, 7], [1, 1, 0, 1])
    second = rightly("b", [9, 4, 7, 1], [1, 0, 1, 0])
    found = difference(first, second)  # on images 4, 7 and 9: 1, 1, 0 against 0, 1, 1
    assert found.points == pytest.approx(0)
    assert found.p == by_definition(1, 1)
    assert first.figure.value == pytest.approx(75)


def test_other_figures_are_compared_by_the_bootstrap():
    true = torch.full((50,), 10.0)
    noise = torch.from_numpy(RANDOM.random(50))

    def measured(right):
        return PerImageMetric(title="", images=np.arange(50), parts=[right, true], metric=summed(torch.div))

    worse, better = measured(5 + noise), measured(6 + noise)
    found = difference(better, worse)
    assert (found.points, found.low, found.high) == pytest.approx((10, 10, 10))
    assert 0 <= found.p <= 2 / (RESAMPLES + 1)
    assert difference(worse, better).points == pytest.approx(-10)
    assert difference(worse, worse).p == 1


def test_four_images_prove_little():
    shares = torch.rand(4, generator=torch.Generator().manual_seed(0)).double()
    few = [measured_share("mAP", np.arange(4), shares / 4 + more) for more in (0.5, 0)]
    assert difference(*few).p == pytest.approx(2 / (RESAMPLES + 1))

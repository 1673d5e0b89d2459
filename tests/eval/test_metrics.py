"""Metrics as of scikit-learn, for any weights of the images, and as of loops."""

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
)

from dino_vit.eval.figures import auroc, average_precision, correlation, f1, mae, measure, r2

GENERATOR = np.random.default_rng(0)
N = 200
WEIGHTS = np.stack([np.ones(N), np.bincount(GENERATOR.integers(N, size=N), minlength=N)])
TRUE = (GENERATOR.random((N, 3)) < (0.5, 0.1, 0.03)).astype(float)
# Of two digits, so that scores tie; some do within a label, and some do across.
SCORES = (0.6 * GENERATOR.random((N, 3)) + 0.4 * TRUE).round(2)
NUMBERS = GENERATOR.normal(size=(N, 3)) * (1, 1e-3, 10) + (0, 5, 2000)
PREDICTED = NUMBERS + GENERATOR.normal(size=(N, 3)) * (1, 1e-3, 30)


@pytest.mark.parametrize(
    ("metric", "peer", "outputs", "targets"),
    [
        (average_precision, average_precision_score, SCORES, TRUE),
        (auroc, roc_auc_score, SCORES[:, :1], TRUE[:, :1]),
        (f1, lambda y, p, sample_weight: f1_score(y, p > 0.5, sample_weight=sample_weight), SCORES, TRUE),
        (r2, r2_score, PREDICTED, NUMBERS),
        (mae, mean_absolute_error, PREDICTED, NUMBERS),
    ],
)
def test_metrics_are_those_of_scikit_learn(metric, peer, outputs, targets):
    figures = metric(*map(torch.from_numpy, (WEIGHTS, outputs, targets)))
    for weights, of_weights in zip(WEIGHTS, figures, strict=True):
        expected = [peer(targets[:, c], outputs[:, c], sample_weight=weights) for c in range(len(of_weights))]
        assert of_weights.numpy() == pytest.approx(expected, rel=1e-9)


def test_correlation_is_pearson_s():
    once, drawn = correlation(*map(torch.from_numpy, (WEIGHTS, PREDICTED, NUMBERS)))
    rows = np.repeat(np.arange(N), WEIGHTS[1].astype(int))
    for figures, chosen in ((once, slice(None)), (drawn, rows)):
        expected = [pearsonr(PREDICTED[chosen, c], NUMBERS[chosen, c]).statistic for c in range(3)]
        assert figures.numpy() == pytest.approx(expected, rel=1e-9)


def test_the_mean_and_the_interval_leave_out_what_cannot_be_judged():
    """No image has the last label; half of the resamples have the second, of one image, too."""
    true = torch.from_numpy(TRUE)
    true[:, 1:] = 0
    true[7, 1] = 1
    scores = torch.from_numpy(SCORES)
    measured = measure("multilabel", np.arange(N), scores, true)[0]
    first, second, last = measured.column_figures
    assert last is None
    assert measured.mean == pytest.approx((first.value + second.value) / 2)
    assert first.low < first.value < first.high
    resampled = measured.resampled()
    assert len(resampled) == 1000
    assert resampled.isfinite().all()
    assert measured.figure.low / 100 == pytest.approx(float(resampled.quantile(0.025)))
    assert measured.subset(np.arange(50)).mean == pytest.approx(
        float(average_precision(torch.ones(1, 50).double(), scores[:50], true[:50]).nanmean())
    )


def test_numbers_that_are_all_the_same_have_no_r2():
    numbers = torch.tensor([[3.1, 1], [3.1, 2]] * 2 + [[3.1, 5]])
    measured = measure("regression", np.arange(5), torch.rand(5, 2), numbers)[0]
    first, second = measured.column_figures
    assert first is None is not second


def test_a_label_that_no_image_has_is_in_no_figure():
    scores, targets = torch.tensor([[0.9, 0.9], [0.1, 0.1]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    for metric in (average_precision, f1):
        figures = metric(torch.ones(1, 2), scores, targets)[0]
        assert figures[0] == 1
        assert figures[1].isnan()

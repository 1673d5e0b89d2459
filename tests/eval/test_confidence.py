"""Confidence and comparisons, against the definitions computed in plain Python."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
import torch

from dino_vit.eval.confidence import RESAMPLES, Measured, difference, mcnemar, measured_share, resample

RANDOM = np.random.default_rng(0)


def by_definition(first, second):
    """The share of all ways to split the images that are at least as uneven."""
    count = first + second
    ways = sum(comb(count, k) for k in range(count + 1) if abs(2 * k - count) >= abs(first - second))
    return float(Fraction(ways, 2**count))


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 9), (9, 3), (5, 5), (40, 71), (0, 30)])
def test_mcnemar_is_the_exact_test(first, second):
    assert mcnemar(first, second) == pytest.approx(by_definition(first, second), rel=1e-9)


def test_mcnemar_of_many_images():
    assert 0 < mcnemar(40_000, 41_000) < 1e-3
    assert mcnemar(40_000, 40_000) == pytest.approx(1)


def test_resampled_figures_are_those_of_images_drawn_with_replacement():
    values = torch.from_numpy(RANDOM.random((7, 2)))
    found = list(resample([values], lambda total: total[0] / total[1]))
    generator = torch.Generator().manual_seed(0)
    assert len(found) == RESAMPLES
    for one in found[:20]:
        rows = torch.randint(7, (7,), generator=generator)
        total = sum(values[row] for row in rows)
        assert float(one) == pytest.approx(float(total[0] / total[1]))


def rightly(title, images, right):
    return measured_share(title, np.array(images), torch.tensor(right, dtype=torch.double))


def test_backbones_are_compared_on_the_images_that_both_judged():
    first = rightly("a", [4, 2, 9, 7], [1, 1, 0, 1])
    second = rightly("b", [9, 4, 7, 1], [1, 0, 1, 0])
    found = difference(first, second)  # on images 4, 7 and 9: 1, 1, 0 against 0, 1, 1
    assert found.points == pytest.approx(0)
    assert found.p == by_definition(1, 1)
    assert first.interval.percent == pytest.approx(75)


def test_pairing_sees_what_intervals_alone_do_not():
    hard = RANDOM.random(2000) < 0.5
    better = (~hard).astype(float)
    better[np.flatnonzero(hard)[:30]] = 1  # what the other gets, and 30 images more
    images = np.arange(2000)
    first, second = (rightly("", images, one) for one in (better, (~hard).astype(float)))
    found = difference(first, second)
    assert found.points == pytest.approx(1.5)
    assert found.low > 0
    assert found.p == pytest.approx(by_definition(30, 0))
    assert first.interval.low < second.interval.percent  # though the intervals overlap


def test_other_figures_are_compared_by_the_bootstrap():
    true = torch.full((50,), 10.0)
    noise = torch.from_numpy(RANDOM.random(50))

    def measured(right):
        return Measured(title="", images=np.arange(50), parts=[right, true], figure=lambda r, t: r / t)

    worse, better = measured(5 + noise), measured(6 + noise)
    found = difference(better, worse)
    assert (found.points, found.low, found.high) == pytest.approx((10, 10, 10))
    assert found.p == pytest.approx(2 / (RESAMPLES + 1))
    assert difference(worse, better).points == pytest.approx(-10)
    assert difference(worse, worse).p == 1

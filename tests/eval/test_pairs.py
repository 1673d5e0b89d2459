"""Pairs of backbones are compared image by image, by exact tests and by the bootstrap."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
import torch

from dino_vit.eval.figures import RESAMPLES, PerImageMetric, measured_share, summed
from dino_vit.eval.pairs import compare_pairs, difference, standings, verdict
from dino_vit.reports.significance import mcnemar

RANDOM = np.random.default_rng(0)


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


def test_pairing_sees_what_intervals_alone_do_not():
    hard = RANDOM.random(2000) < 0.5
    better = ~hard
    better[np.flatnonzero(hard)[:30]] = True  # what the other gets, and 30 images more
    images = np.arange(2000)
    first, second = (rightly("", images, one) for one in (better, ~hard))
    found = difference(first, second)
    assert found.points == pytest.approx(1.5)
    assert found.low > 0
    assert found.p == pytest.approx(by_definition(30, 0))
    assert first.figure.low < second.figure.value  # though the intervals overlap


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
        "Take a: no significant difference on these images by k-NN and linear."
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
    few = [measured_share("mAP", np.arange(4), shares[:4] / 4 + more) for more in (0.5, 0)]
    assert difference(*few).p == pytest.approx(2 / (RESAMPLES + 1)), "four images prove little"

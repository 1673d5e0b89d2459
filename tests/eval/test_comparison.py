"""Which backbone is said to be the best."""

import numpy as np
import torch

from dino_vit.eval.comparison import Standing, compare_pairs, standings, verdict
from dino_vit.eval.confidence import measured_share


def figures(**right):
    """One figure of several backbones: the images that each gets right, of a hundred."""
    images = np.arange(100)
    shares = {name: torch.from_numpy(np.isin(images, rows)).double() for name, rows in right.items()}
    return {"k-NN": {name: measured_share("k-NN", images, of) for name, of in shares.items()}}


def test_a_backbone_is_as_good_as_the_best_unless_pairs_of_images_say_otherwise():
    found = figures(a=range(40), b=range(60), c=range(2, 60))
    pairs = compare_pairs(found)
    assert [(pair.better, pair.other) for pair in pairs] == [("b", "a"), ("c", "a"), ("b", "c")]
    assert all(pair.difference.points > 0 and pair.difference.low <= pair.difference.high for pair in pairs)
    assert pairs[0].difference.p < 1e-4
    assert pairs[2].difference.p == 0.5  # two images that only one of them gets right
    assert standings(found, pairs) == {"k-NN": Standing("b", ("c",))}


def test_of_many_backbones_some_look_worse_by_chance():
    lower = range(6, 60)  # six images fewer, none more: p = 0.03
    for others in ({"b": lower}, {"b": lower, "c": lower}):
        found = figures(a=range(60), **others)
        tied = standings(found, compare_pairs(found))["k-NN"].tied
        assert tied == (() if len(others) == 1 else ("b", "c"))


def test_equal_backbones_are_tied():
    found = figures(a=range(40), b=range(40))
    assert standings(found, compare_pairs(found)) == {"k-NN": Standing("a", ("b",))}


def test_the_verdict_names_who_is_best_everywhere_or_says_that_it_depends():
    knn, linear = Standing("a", ()), Standing("b", ("a",))
    assert verdict({"k-NN": knn}) == "Take a: it is the best by k-NN."
    assert verdict({"k-NN": knn, "linear": linear}) == (
        "Take a: it is the best or as good as the best by k-NN and linear."
    )
    assert verdict({"linear": linear}) == (
        "Take b: it is the best by linear. On these images a cannot be told from it."
    )
    assert verdict({"k-NN": knn, "linear": Standing("b", ())}) == (
        "It depends on what you need. The best is by k-NN a; by linear b."
    )
    assert "no labels" in verdict({})

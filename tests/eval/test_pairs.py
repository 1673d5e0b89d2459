"""Pairs of backbones are compared image by image."""

import numpy as np
import torch

from dino_vit.eval.pairs import compare_pairs, standings, verdict
from dino_vit.eval.statistics import measured_share


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

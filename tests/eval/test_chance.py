"""Of labels and masks that were drawn at random, every evaluator says what chance says."""

from pathlib import Path

import numpy as np
import pytest

import dino_vit
from dino_vit.eval.statistics import accuracy
from tests.support.images import write_synthetic

DRAWS, LEARNED, JUDGED = 4, 80, 60
pytestmark = pytest.mark.usefixtures("few_penalties")
SETTINGS = {"precision": "no", "verbose": False}


@pytest.fixture
def drawn(tmp_path) -> list[dict[str, Path]]:
    """Images to learn from and others to judge by, and draws of one of two classes for each by itself.

    Without a training set each image is told by the others, of which fewer have its class than the other one:
    then chance is a little below a half.
    """
    folders = {"source": ("labels", JUDGED), "train": ("train_labels", LEARNED)}
    names = dict[str, list[str]]()
    for number, (folder, (_, count)) in enumerate(folders.items()):
        names[folder] = [f"{index}.png" for index in range(count)]
        for index, name in enumerate(names[folder]):
            write_synthetic(tmp_path / folder / name, 1000 * number + index, size=16)
    draws = []
    for seed in range(DRAWS):
        draw, random = {folder: tmp_path / folder for folder in folders}, np.random.default_rng(seed)
        for folder, (key, count) in folders.items():
            labels = random.integers(2, size=count)
            rows = (f"{name},{label}\n" for name, label in zip(names[folder], labels, strict=True))
            draw[key] = tmp_path / f"{folder}-{seed}.csv"
            draw[key].write_text("name,label\n" + "".join(rows))
        draws.append(draw)
    return draws


@pytest.mark.parametrize("evaluate", [dino_vit.knn, dino_vit.linear], ids=["knn", "linear"])
def test_random_classes_are_told_by_chance(drawn, weights, evaluate):
    results = [evaluate(weights=weights, **draw, **SETTINGS) for draw in drawn]
    interval = accuracy(sum(result.figure.correct for result in results), JUDGED * DRAWS)
    assert interval.low < 50 < interval.high


def test_no_backbone_is_called_better_by_random_classes(drawn, weights):
    """Neither a trained nor an untrained one, nor pixels; one draw of four may look like something."""
    seen, right = 0, dict.fromkeys(("untrained", "pixels"), 0)
    for draw in drawn:
        found = dino_vit.compare(weights=[str(weights), *right], **draw, **SETTINGS)
        for name in right:
            right[name] += round(found.figures["k-NN top-1"][name].value * JUDGED / 100)
        seen += any(pair.difference.p < 0.01 for pair in found.pairs)
    for correct in right.values():
        interval = accuracy(correct, JUDGED * DRAWS)
        assert interval.low < 50 < interval.high
    assert seen <= 1

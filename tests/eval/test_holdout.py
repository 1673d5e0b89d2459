"""Images that are split by us: neighbours stay together, and every series is on both sides."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from dino_vit.config.settings import Task
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.holdout import STRETCHES, choose_folds, find_runs, numbers_of, series_of
from dino_vit.eval.linear import hold_out
from dino_vit.eval.sets import LabelledFeatures, LabelledSubset


def series(names):
    return [series_of(name) for name in names]


def choose_blocks(*arguments, **settings):
    """Return what is held out: the first fold."""
    return choose_folds(*arguments, **settings) == 0


def apart(chosen):
    """How many neighbours lie on both sides."""
    return int((np.diff(np.asarray(chosen, int)) != 0).sum())


@pytest.mark.parametrize("share", [2, 5, 10])
def test_frames_of_one_place_lie_in_blocks(share):
    chosen = choose_blocks(series([f"place/frame_{number:04d}.png" for number in range(400)]), share, 0)
    assert chosen.sum() == 400 // share
    assert 2 <= apart(chosen) <= 2 * STRETCHES, "of every other image it is 399"
    for part in np.array_split(chosen, STRETCHES):
        assert part.sum() == 80 // share, "of every time"


@pytest.mark.parametrize("name", ["{}.png", "place/frame_{:04d}.png", "{} of 9.png"])
def test_neighbours_have_neighbouring_numbers_however_these_are_written(name):
    names = sorted(name.format(number) for number in range(400))
    chosen = choose_blocks(series(names), 5, 0, lambda row: numbers_of(names[row]))
    by_number = sorted(range(400), key=lambda row: int("".join(filter(str.isdigit, names[row]))))
    assert chosen.sum() == 80
    assert apart(chosen[by_number]) <= 2 * STRETCHES


@pytest.mark.parametrize("names", ["{}/{:03d}.jpg", "{}_{:d}.jpg", "set/{} ({}).jpg"])
def test_of_every_class_and_place_as_many_are_held_out(names):
    counts = {"cat": 50, "dog": 31, "dog hair": 7, "emu": 12}
    listed = sorted(names.format(kind, number) for kind, count in counts.items() for number in range(count))
    chosen = choose_blocks(series(listed), 5, seed=3)
    assert chosen.sum() == 20
    held = Counter(series([name for name, held in zip(listed, chosen, strict=True) if held]))
    sizes = Counter(series(listed))
    assert len(sizes) == 4
    for kind, count in sizes.items():
        assert abs(held[kind] - count / 5) <= 1 + count // 40
    assert apart(chosen) <= 2 * (4 + STRETCHES)


def test_images_that_are_no_series_are_drawn_by_the_seed():
    names = [f"{letter}{other}.png" for letter in "abcdefghij" for other in "klmnopqrst"]
    draws = [choose_blocks(series(names), 5, seed) for seed in range(4)]
    assert [draw.sum() for draw in draws] == [20] * 4
    assert len({draw.tobytes() for draw in draws}) == 4
    assert np.array_equal(draws[1], choose_blocks(series(names), 5, 1))
    assert all(apart(draw) > 20 for draw in draws)


def test_few_images_leave_one_to_judge_by():
    assert [choose_blocks(["a"] * count, 10, 0).sum() for count in (2, 3, 9, 10, 19, 20)] == [1] * 5 + [2]
    assert choose_blocks(["a", "b"], 2, 0).sum() == 1


def test_folds_are_as_large_and_have_blocks_of_every_class():
    for images, classes in ((400, None), (63, [row % 3 for row in range(63)]), (63, [*range(63)])):
        names = series([f"frame_{number:04d}.png" for number in range(images)])
        folds = choose_folds(names, 5, 0, classes=classes)
        assert {*np.bincount(folds)} <= {images // 5, images // 5 + 1}
        assert np.array_equal(folds == 0, choose_blocks(names, 5, 0, classes=classes))
        for kind in {*classes} if classes else [None]:
            members = folds if classes is None else folds[np.array(classes) == kind]
            sizes = np.bincount(members, minlength=5)
            assert sizes.max() - sizes.min() <= 1
            assert apart(members) <= 2 * 5 * (1 if classes else STRETCHES), "neighbours are in one fold"
    assert sorted(choose_folds(["a", "b"], 5, 0, classes=[0, 0])) == [0, 1], "no class is in one fold alone"


def bursts(size, count, *, step=1, name="IMG_{number:04d}.jpg"):
    """Return names and classes of labelled bursts, `count` of each of ten classes, among 2000 numbers."""
    starts = np.random.default_rng(0).permutation(np.arange(0, 2000, 20))[: 10 * count]
    rows = [(kind % 10, start + step * place) for kind, start in enumerate(starts) for place in range(size)]
    return [name.format(kind=kind, number=number) for kind, number in rows], [kind for kind, _ in rows]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("size", "settings"), [(5, {}), (8, {}), (5, {"step": 2}), (5, {"name": "{kind}/IMG_{number:04d}.jpg"})]
)
def test_a_burst_is_in_one_fold(size, count, settings):
    names, classes = bursts(size, count, **settings)
    images = len(names) if "name" in settings else 2000
    if (count, settings) == (3, {"step": 2}):
        images = 6000  # of 150 labels among 2000 images one in eight has a label two numbers on
    runs = find_runs(names, images, classes)
    assert len({*zip(runs.tolist(), classes, strict=True)}) == 10 * count
    folds = choose_folds(series(names), 5, 0, lambda row: numbers_of(names[row]), classes, runs)
    assert all(len({*folds[runs == run]}) == 1 for run in runs)
    held = [len({*folds[np.array(classes) == kind]}) for kind in range(10)]
    assert all((number > 1) == (count > 1) for number in held), "of two bursts one is learned from"


@pytest.mark.parametrize(("labelled", "longest"), [(60, 3), (200, 4), (1000, 15), (1500, 1), (2000, 1)])
@pytest.mark.parametrize("kinds", [None, np.arange(2000) // 100])
def test_numbers_that_follow_by_chance_are_no_long_runs(labelled, longest, kinds):
    """Of 2000 photos numbered in turn, in random order or sorted by class."""
    random = np.random.default_rng(1)
    rows = np.sort(random.permutation(2000)[:labelled])
    classes = (random.integers(0, 20, 2000) if kinds is None else kinds)[rows].tolist()
    runs = find_runs([f"IMG_{row:04d}.jpg" for row in rows], 2000, classes)
    assert np.bincount(runs).max() <= longest


def test_photos_with_several_labels_are_a_burst_only_where_these_are_the_same():
    source = replace(make_textures(length=240), names=lambda row: f"{row:03}.png")
    targets = np.array([[row % 3 == 0, row % 2, row >= 50] for row in range(60)], np.float32)
    images = LabelledSubset("", source, np.arange(60), targets, ("a", "b", "c"), "multilabel")
    assert len({*images.folds(10, 0, join=lambda found: found).tolist()}) == 10
    same = replace(images, targets=np.ones_like(targets))
    assert len({*same.folds(10, 0, join=lambda found: found).tolist()}) == 1


def test_folders_that_each_start_from_one_have_no_runs():
    names = [f"{kind}/{number:03d}.jpg" for kind in range(10) for number in range(1, 9)]
    assert len({*find_runs(names, 80, [row // 8 for row in range(80)])}) == 80


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_a_tenth_of_training_images_are_blocks(task: Task):
    targets = torch.arange(200) // 20  # sorted by class
    images = LabelledFeatures(torch.zeros(200, 1), targets, np.arange(200), tuple("abcdefghij"), task)
    rest, held = hold_out(images, 0)
    assert (len(rest), len(held)) == (180, 20)
    assert apart(np.isin(np.arange(200), held.indices)) <= 2 * (10 if task == "multiclass" else STRETCHES)
    assert (len(set(held.targets.tolist())) == 10) == (task == "multiclass")

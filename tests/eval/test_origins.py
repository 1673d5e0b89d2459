"""Which labels may judge a classifier, by how they came about."""

import csv

import numpy as np
import pytest
import torch

import dino_vit
from dino_vit.data.label_files import UNSURE
from dino_vit.eval import predict
from dino_vit.eval.classifier_training import describe_training
from dino_vit.eval.cross_validation import Candidate, Trials
from dino_vit.eval.origins import describe_judges, join_groups, may_judge
from dino_vit.eval.sets import LabelledFeatures
from tests.support.coloured_photos import COLOURS, IMAGES

SETTINGS = {"precision": "no", "verbose": False}
pytestmark = pytest.mark.usefixtures("few_penalties")


def test_runs_with_images_of_a_group_become_one_and_others_stay():
    origins = np.array(["group:1", "given", "given", "group:1", "group:2", "random"])
    runs = np.array([0, 0, 1, 2, 3, 4])
    assert join_groups(runs, origins).tolist() == [0, 0, 1, 0, 2, 3]
    assert join_groups(runs, np.full(6, "given")).tolist() == runs.tolist()


def test_enough_random_images_alone_judge_and_what_was_picked_by_its_guess_never_does():
    some = ["given", "chosen", "group:1", "checked", "corrected"]
    few, enough = np.array([*some, *["random"] * 49]), np.array([*some, *["random"] * 50])
    assert may_judge(few).tolist() == [True] * 3 + [False] * 2 + [True] * 49
    assert may_judge(enough).tolist() == [False] * 5 + [True] * 50


def write(photos, origin_of, wrong=()):
    """Label the first half: the colours that the photos have, but for some."""
    names = [*COLOURS]
    with (photos / "few.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["name", "label", "origin"])
        for row in range(3 * IMAGES // 4):
            shift = row in wrong
            table.writerow([f"{row:03}.png", names[(row // 2 + shift) % len(names)], origin_of(row)])
    return photos / "few.csv"


def test_predict_is_judged_by_the_random_ones(photos, weights):
    """What was corrected is learned from, but says nothing about the others, even where it is wrong."""
    picked = range(8)
    few = write(photos, lambda row: "corrected" if row in picked else "random", picked)
    found = dino_vit.predict(photos / "photos", weights, labels=few, **SETTINGS)
    assert found.details["cross_validated"]["images"] == 3 * IMAGES // 4 - len(picked)
    said = str(found).splitlines()[0]
    assert said.endswith(
        f" of 100 guesses will be right, by {3 * IMAGES // 4 - len(picked)} images that were drawn at random"
    )
    few = write(photos, lambda row: "chosen")
    every = dino_vit.predict(photos / "photos", weights, labels=few, **SETTINGS)
    assert every.details["cross_validated"]["images"] == 3 * IMAGES // 4
    assert " of 100 guesses will be right, or fewer: the labelled images were not drawn at random\n" in str(
        every
    )


def test_confidences_rest_on_all_labels_but_those_picked_by_their_guesses(photos, weights):
    """Fifty random ones are enough for an accuracy, and far fewer than there are for a temperature."""

    def temperature(origin_of):
        few = write(photos, origin_of, wrong=range(10))
        return dino_vit.predict(photos / "photos", weights, labels=few, **SETTINGS).details["temperature"]

    every = temperature(lambda row: "chosen")
    assert temperature(lambda row: "chosen" if row < 20 else "random") == every
    assert temperature(lambda row: "corrected" if row < 20 else "random") < every


def test_a_class_that_was_labelled_at_once_cannot_be_tested(photos, weights):
    blue = next(iter(COLOURS))
    few = write(photos, lambda row: "group:3" if row // 2 % len(COLOURS) == 0 else "chosen")
    found = dino_vit.predict(photos / "photos", weights, labels=few, **SETTINGS)
    assert found.details["untested"] == [blue]


def test_labels_of_a_choice_promise_too_much_and_of_others_nothing_is_known():
    chosen, given = "or fewer: the labelled images were not drawn at random", "if these images are like the"
    for origins, said in (
        (["given", "random", "corrected"], given),
        (["given", "chosen"], chosen),
        (["random", "group:1"], chosen),
    ):
        assert describe_judges(np.array(origins)).startswith(said)


def test_nothing_is_left_to_do_where_only_what_nobody_was_sure_of_has_guesses(photos, weights):
    few = write(photos, lambda row: "chosen")
    rest = range(3 * IMAGES // 4, IMAGES)
    with few.open("a", newline="") as file:
        csv.writer(file).writerows([f"{row:03}.png", "", UNSURE] for row in rest)
    found = dino_vit.predict(photos / "photos", weights, labels=few, output=photos / "rest.csv", **SETTINGS)
    assert len(found.names) == len(rest)
    said = str(found).splitlines()[-1]
    assert said == (
        f"You have looked at all images. Only {len(rest)} images that you were not sure of got a guess."
    )


def test_what_was_picked_by_its_guess_chooses_the_classifier_but_is_no_figure(photos, weights):
    few = write(photos, lambda row: "checked")
    found = dino_vit.predict(photos / "photos", weights, labels=few, **SETTINGS)
    assert found.details["cross_validated"] is None
    assert str(found).startswith(
        "How good these guesses are cannot be said: label images that were not picked"
    )
    given = dino_vit.predict(
        photos / "photos", weights, labels=write(photos, lambda row: "given"), **SETTINGS
    )
    assert found.details["classifier"] == given.details["classifier"]
    assert found.labels == given.labels


def test_the_origins_of_a_list_of_images_count_too(photos, weights):
    few = write(photos, lambda row: "corrected" if row < 8 else "random")
    listed = (photos / "photos" / "list.csv", photos / "photos" / "labelled.csv")
    more = "".join(f"{row:03}.png,,\n" for row in range(3 * IMAGES // 4, IMAGES))
    for path, rows in zip(listed, (more, ""), strict=True):
        path.write_text(few.read_text() + rows)
    given = dino_vit.predict(photos / "photos", weights, labels=few, **SETTINGS)
    found = dino_vit.predict(listed[0], weights, **SETTINGS)
    assert found.columns["origin"] == given.columns["origin"]
    assert str(found).splitlines()[0] == str(given).splitlines()[0]
    apart = dino_vit.predict(photos / "photos", weights, train=listed[1], **SETTINGS)
    assert apart.details["cross_validated"]["images"] == 3 * IMAGES // 4 - 8


def test_labels_that_are_replaced_meanwhile_leave_the_table_as_it_was_read(photos, weights, monkeypatch):
    few = write(photos, lambda row: "random")
    pool_features = predict.pool_features

    def pool(*arguments):
        few.write_text("name,label\n000.png,blue\n")
        return pool_features(*arguments)

    monkeypatch.setattr(predict, "pool_features", pool)
    found = dino_vit.predict(photos / "photos", weights, labels=few, **SETTINGS)
    assert found.columns["origin"].count("random") == 3 * IMAGES // 4
    assert found.details["cross_validated"]["images"] == 3 * IMAGES // 4


def test_exactly_right_labels_are_counted_among_the_images_that_may_judge():
    targets = (torch.rand(40, 3, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    judges = torch.arange(40) >= 10
    scores = torch.where(judges[:, None], 2 * targets - 1, 1 - 2 * targets)  # wrong about all others
    folds, tried = torch.arange(40) % 5, [Candidate("k-NN", 1)]
    trials = Trials(tried, [scores], targets, "multilabel", folds, torch.ones_like(judges), range(40), judges)
    train = LabelledFeatures(torch.zeros(40, 1), targets, np.arange(40), ("a", "b", "c"), "multilabel")
    assert describe_training(train, trials, {})[0].startswith("About 100 of 100 images will get exactly")

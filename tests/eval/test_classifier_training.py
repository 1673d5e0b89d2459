"""What the classifier of `predict` learns from, and what is said of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dino_vit
from dino_vit import VisionTransformer
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.classifier_training import describe_training, train_classifier, untested_classes
from dino_vit.eval.cross_validation import Candidate, Trials, candidates, cross_validate
from dino_vit.eval.origins import CHOSEN, GIVEN
from dino_vit.eval.pooled import PooledFeatures
from dino_vit.eval.sets import LabelledFeatures, LabelledSubset
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.features.readings import Reading
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import EvalTransform
from tests.support.coloured_photos import IMAGES, shuffled
from tests.support.overlapping import features, in_turn

SETTINGS = {"precision": "no", "verbose": False}
pytestmark = pytest.mark.usefixtures("few_penalties")


def test_tokens_and_blocks_are_those_of_knn(photos, weights):
    given = {"labels": photos / "labels.csv", **SETTINGS}
    widths = {(None, 2): 96, ("cls", 1): 32, ("mean", 2): 64, ("cls+mean", 2): 96}
    for (tokens, blocks), width in widths.items():
        found = dino_vit.predict(photos / "photos", weights, tokens=tokens, blocks=blocks, **given)
        assert found.features.shape[1] == width
        spec = found.classifier.spec
        assert (spec.tokens, spec.blocks) == (tokens or "cls+mean", blocks)
        assert not found.classifier.facts.levelled
    pixels = dino_vit.predict(photos / "photos", "pixels", **given)
    assert pixels.classifier.spec.tokens == "cls"
    head = photos / "head.safetensors"
    dino_vit.predict(photos / "photos", weights, classifier=head, tokens="mean", **given)
    assert dino_vit.load_classifier(head, verbose=False).facts.tokens == "mean"
    with pytest.raises(
        ValueError, match="tokens are of labels to learn from; the classifier in weights has its"
    ):
        dino_vit.predict(photos / "photos", head, tokens="cls", verbose=False)


def test_a_class_of_one_image_is_named(photos, weights):
    few = photos / "few.csv"
    few.write_text("\n".join([*(photos / "labels.csv").read_text().splitlines(), "001.png,odd"]))
    found = dino_vit.predict(photos / "photos", weights, labels=few, **SETTINGS)
    said = str(found)
    assert " like the labelled ones; classes that could not be tested count as wrong\n" in said
    assert "\nLabel more images: of 1 class with fewer than 5 labels (odd: 1)\n" in said
    assert f"on {IMAGES // 2 + 1} labelled images of 5 classes" in said
    assert found.details["untested"] == ["odd"]


def test_labels_at_random_are_said_to_be_chance(photos, weights):
    said, random = (
        str(dino_vit.predict(photos / "photos", weights, labels=labels, **SETTINGS))
        for labels in (photos / "labels.csv", shuffled(photos))
    )
    assert "no better than always guessing" not in said
    assert random.startswith("These guesses may be no better than always guessing blue: ")
    assert " of 100 were right in cross-validation, of 48 images; label more images\n" in random


def test_two_labels_are_enough(photos, weights):
    (photos / "two.csv").write_text("000.png,blue\n002.png,green")
    given = {"labels": photos / "two.csv", "output": photos / "rest.csv", "verbose": False}
    found = dino_vit.predict(photos / "photos", weights, **given)
    assert {*found.labels} <= {"blue", "green"}
    assert found.details["cross_validated"] is None, "each is left out once, with its class"
    assert "cannot be said: label two or more images of a class, not taken one after the other" in str(found)


def write_labels(path, numbers, kind_of):
    rows = [f"{number:03}.png,{kind_of(row)}" for row, number in enumerate(numbers)]
    path.write_text("\n".join(["name,label", *rows]))
    return path


def test_too_few_labels_have_no_confidence(photos, weights):
    """Nine labels; and four bursts of one class each, of which none is learned from when it is judged."""
    bursts = [start + row for start in (2, 20, 40, 60) for row in range(5)]
    kept = photos / "kept.safetensors"
    for labels, words in (
        (write_labels(photos / "nine.csv", range(9), lambda row: row // 2 % 3), "too few to say"),
        (write_labels(photos / "bursts.csv", bursts, lambda row: row // 5), "cannot be said"),
    ):
        given = {"labels": labels, "classifier": kept, "overwrite": True, **SETTINGS}
        given |= {"output": photos / "rest.csv", "confident": 0.5}
        found = dino_vit.predict(photos / "photos", weights, **given)
        assert (photos / "rest-sure.csv").read_text().count("\n") == 1 + found.details["labelled"]
        assert words in str(found)
        assert "mean confidence" not in str(found)
        assert "with a given label, as the labels are too few to tell how sure the others are" in str(found)
        assert {*found.columns} == {"name", "label", "origin", "guess", "second", "nearest", "similarity"}
    assert found.details["classifier"].startswith("k-NN (k = 1) of ")
    assert found.details["temperature"] is None
    again = dino_vit.predict(photos / "photos", kept, verbose=False)
    assert again.confidence is None
    assert "confidence" not in again.columns


def test_a_class_of_one_burst_is_named(photos, weights):
    """Its photos are held out together, so nothing can be said of it."""
    rows = (photos / "labels.csv").read_text().splitlines()[::2]
    burst = [f"{number:03}.png,burst" for number in range(41, 47)]
    names = {row.partition(",")[0] for row in burst}
    others = (row for row in rows if row.partition(",")[0] not in names)
    (photos / "more.csv").write_text("\n".join([*others, *burst]))
    found = dino_vit.predict(photos / "photos", weights, labels=photos / "more.csv", **SETTINGS)
    assert "of 1 class that cannot be tested, as their photos were taken or labelled together (burst)" in str(
        found
    )
    assert found.details["untested"] == ["burst"]


def pool_of_noise(seed, images=60, classes=3):
    """Features that say nothing of labels at random, as of images half of which are labelled."""
    random, source = np.random.default_rng(seed), make_textures(length=2 * images)
    model = VisionTransformer(image_size=16, patch_size=4, width=8, depth=1, heads=2)
    spec = FeatureSpec(tokens="cls+mean+cells")
    targets = random.integers(classes, size=images)
    rows, names = np.arange(2 * images), tuple("abc"[:classes])
    return PooledFeatures(
        frozen=FrozenBackbone(model=model, transform=EvalTransform(size=(16, 16), mean=(0.5,), std=(0.5,))),
        spec=spec,
        readings=[Reading("cls+mean", 0.5), Reading("cls+cells", 0.5)],
        features=torch.from_numpy(random.normal(size=(2 * images, sum(spec.widths(model))))).float(),
        learned=LabelledSubset("noise", source, rows[:images], targets, names),
        origins=np.full(images, GIVEN),
        rows=torch.from_numpy(rows[:images]),
        others=torch.from_numpy(rows[images:]),
        indices=rows[images:],
    )


def test_noise_is_seldom_said_to_be_better_than_guessing_whatever_is_chosen():
    pools = map(pool_of_noise, range(12))
    said = [train_classifier(pool).lines[0] for pool in pools]
    claims = [line for line in said if line.startswith("About ")]
    assert len(claims) <= 1


def noise(images, classes, seed):
    random = np.random.default_rng(seed)
    targets = torch.from_numpy(random.permutation(np.arange(images) % classes))
    values = torch.from_numpy(random.normal(size=(images, 16))).float()
    return LabelledFeatures(values, targets, np.arange(images), tuple(map(str, range(classes))))


def said_of(train, folds):
    tried = candidates(folds, neighbours_only=True)
    return describe_training(train, cross_validate(train, folds, tried, ""), {})[0]


def test_the_largest_share_among_labels_that_were_chosen_is_no_measure():
    """Whoever names whole rows of images that look alike may have labels of one class above all."""
    train, folds = noise(60, 3, 0), torch.arange(60) % 5
    trials = cross_validate(train, folds, candidates(folds, neighbours_only=True), "")
    assert describe_training(train, trials, {})[0].startswith("These guesses may be no better than always")
    said = describe_training(train, trials, {}, judges=CHOSEN)[0]
    assert said.startswith("About ")
    assert said.endswith(CHOSEN)


def test_noise_is_seldom_said_to_be_better_than_guessing():
    said = [said_of(noise(60, 3, seed), torch.arange(60) % 5) for seed in range(100)]
    may_be_guesses = sum(
        each.startswith("These guesses may be no better than always guessing") for each in said
    )
    assert may_be_guesses >= 95
    assert said_of(features(), in_turn(60)).startswith("About ")


@pytest.mark.parametrize(("images", "enough"), [(4, False), (8, False), (10, True), (20, True)])
def test_few_images_are_said_to_be_too_few(images, enough):
    """Two classes that features tell without a mistake."""
    targets = torch.arange(images) % 2
    train = LabelledFeatures(F.one_hot(targets, 8).float(), targets, np.arange(images), ("a", "b"))
    said = said_of(train, torch.arange(images) // 2 % 5)
    few = f"Only {images} of {images} labelled images can test the classifier, too few to say how many"
    assert said.startswith("About 100 of 100 guesses will be right" if enough else few)


def test_of_many_labels_those_that_may_judge_are_too_few():
    targets, folds = torch.arange(60) % 2, torch.arange(60) // 2 % 5
    train = LabelledFeatures(F.one_hot(targets, 8).float(), targets, np.arange(60), ("a", "b"))
    trials = cross_validate(train, folds, candidates(folds, neighbours_only=True), "")
    said = describe_training(train, replace(trials, judges=torch.arange(60) < 8), {})[0]
    few = (
        "Only 8 of 60 labelled images can test the classifier, too few to say how many guesses will be right"
    )
    assert said == f"{few}: label images that were not picked by their guesses, as the random ones of `label`"


def test_classes_that_cannot_be_tested_count_as_wrong():
    """Fifty of one image, and 50 images that are all told: others are of classes without a label too."""
    width, classes = 64, 55
    targets = torch.cat([torch.arange(50) % 5, torch.arange(5, 55)])
    values = torch.zeros(100, width)
    values[torch.arange(100), targets] = 1
    train = LabelledFeatures(values, targets, np.arange(100), tuple(f"{each:02}" for each in range(classes)))
    trials = cross_validate(train, torch.arange(100) // 5 % 5, [Candidate("k-NN", 5)], "")
    assert trials.tested.tolist() == [True] * 50 + [False] * 50
    assert (trials.figure.correct, trials.figure.images) == (50, 100)
    assert untested_classes(train, trials) == [f"{each:02}" for each in range(5, 55)]
    said = describe_training(train, trials, {})
    like = "if these images are like the labelled ones"
    assert (
        said[0]
        == f"About 50 of 100 guesses will be right, {like}; classes that could not be tested count as wrong"
    )
    assert "of 50 classes with fewer than 5 labels (05: 1, 06: 1, " in said[-2]
    assert "on 100 labelled images of 55 classes; k-NN 50.0 %, always guessing 00 10.0 %" in said[-1]


def test_sure_labels_and_weak_classes_are_counted():
    """Of ten classes the last is told wrong by all, and another has four labels."""
    classes = [*"abcdefgh", "few", "wrong"]
    targets = torch.cat([torch.arange(80) // 10, torch.full((4,), 8), torch.full((10,), 9)])
    told = targets.clone()
    told[84:], told[:2] = 0, 1
    scores = 4.0 * F.one_hot(told, 10)
    scores[::2] /= 100  # half of them are not sure
    folds, tested = torch.arange(94) % 5, torch.ones(94, dtype=torch.bool)
    trials = Trials([Candidate("k-NN", 1)], [scores], targets, "multiclass", folds, tested, range(94))
    train = LabelledFeatures(torch.zeros(94, 1), targets, np.arange(94), tuple(classes))
    said = describe_training(train, trials, {})
    assert said[0].startswith("About 87 of 100 guesses will be right, ")
    sure = "Of guesses with a confidence of 80 % or more, 69 to 97 of 100 will be right"
    assert said[1] == f"{sure} (41 of 47 were right in cross-validation)"
    few, wrong = (
        "of 1 class with fewer than 5 labels (few: 4)",
        "of 1 class that cross-validation mostly gets wrong (wrong: 0 of 10",
    )
    assert said[2] == f"Label more images: {few}; {wrong} right)"
    confidences = [
        (row.softmax(0).max(), row.argmax() == target) for row, target in zip(scores, targets, strict=True)
    ]
    sure = [bool(is_right) for confidence, is_right in confidences if confidence >= 0.8]
    assert (sum(sure), len(sure)) == (41, 47)
    scores[7:] /= 100
    said = describe_training(train, trials, {})[1]
    assert said.endswith("or more, too few could be tested (2 of 3 were right in cross-validation)")


def test_nothing_is_announced_where_no_image_can_be_tested():
    train = features(images=3)
    trials = cross_validate(train, torch.arange(3), candidates(torch.arange(3)), "")
    assert trials.figure is None
    assert trials.tried[trials.best(trials.tested)] == Candidate("k-NN", 1), "the nearest image decides"
    assert "cannot be said" in describe_training(train, trials, {})[0]


def test_several_labels_are_announced_by_those_that_may_judge():
    """Twenty images whose labels are all right judge; of the others no label is."""
    targets = (torch.arange(40)[:, None] + torch.arange(2)) // 2 % 2
    judges, folds = torch.arange(40) < 20, torch.arange(40) % 5
    scores = (targets - 0.5) * torch.where(judges, 1.0, -1.0)[:, None]
    trials = Trials(
        [Candidate("k-NN", 1)], [scores], targets, "multilabel", folds, folds >= 0, range(40), judges
    )
    train = LabelledFeatures(torch.zeros(40, 1), targets, np.arange(40), ("a", "b"), "multilabel")
    said = describe_training(train, trials, {})
    assert said[0].startswith("About 100 of 100 images will get exactly their labels, ")

"""What the classifier of `predict` learns from, and what is said of it."""

import numpy as np
import pytest
import torch

import dino_vit
from dino_vit import VisionTransformer
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.classifier_training import train_classifier
from dino_vit.eval.origins import GIVEN
from dino_vit.eval.pooled import PooledFeatures
from dino_vit.eval.sets import LabelledSubset
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.features.readings import Reading
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import EvalTransform
from tests.support.coloured_photos import IMAGES, shuffled

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

"""Features of labelled and unlabelled images are computed once, and read in several ways."""

import pytest
import torch

import dino_vit
from dino_vit.eval import pooled
from dino_vit.models.classifiers import Levelling
from dino_vit.views.eval_transform import EvalTransform
from tests.support.coloured_photos import IMAGES

SETTINGS = {"precision": "no", "verbose": False}
pytestmark = pytest.mark.usefixtures("few_penalties")


def test_more_labels_read_no_image_again(photos, weights, monkeypatch):
    """And neither does the page to label by."""
    read, names = EvalTransform.read, list[int]()
    monkeypatch.setattr(EvalTransform, "read", lambda *given: (names.append(given[2]), read(*given))[1])
    rows = (photos / "labels.csv").read_text().splitlines()
    for count in (20, 21):
        (photos / "few.csv").write_text("\n".join(rows[: count + 1]))
        found = dino_vit.predict(photos / "photos", weights, labels=photos / "few.csv", **SETTINGS)
        assert len(found.names) == IMAGES - count
        assert sorted(names) == [*range(IMAGES)]
    dino_vit.label(photos / "photos", weights, output=photos / "label.html", **SETTINGS)
    assert len(names) == IMAGES


def test_what_is_given_is_what_is_read(photos, weights):
    given = {"labels": photos / "labels.csv", **SETTINGS}
    for settings, levelled in (({"tokens": "cls"}, False), ({"tokens": "cls", "whiten": 0.5}, True)):
        found = dino_vit.predict(photos / "photos", weights, **settings, **given)
        reading = "CLS" + ", levelled" * levelled
        assert all(name.endswith(f" of {reading}") for name in found.details["tried"])
        assert f"\nRead by {reading}; labelled by " in str(found)
        assert isinstance(found.classifier.reading, Levelling) == levelled
    found = dino_vit.predict(photos / "photos", weights, **given)
    kinds = {name.partition(" of ")[2] for name in found.details["tried"]}
    assert kinds == {
        "CLS + mean patch, levelled",
        "CLS + cells, levelled",
        "CLS + cells + edges, levelled",
    }


def test_weights_side_by_side_are_read_together(photos, weights):
    given = {"labels": photos / "labels.csv", **SETTINGS}
    found = dino_vit.predict(photos / "photos", f"{weights}+edges", tokens="cls", **given)
    alone = [
        dino_vit.embed(photos / "photos", each, precision="no", verbose=False).values[1::2]
        for each in (str(weights), "edges")
    ]
    joined = torch.cat([torch.nn.functional.normalize(torch.from_numpy(each)) for each in alone], 1)
    torch.testing.assert_close(found.classifier.reading(found.features), joined)
    assert found.details["baselines"] == {}
    with pytest.raises(ValueError, match="classifier keeps one backbone in a file; give weights without"):
        dino_vit.predict(photos / "photos", f"{weights}+edges", classifier="a.safetensors", **given)


def test_of_very_many_images_the_usual_features_are_read(photos, weights, monkeypatch, caplog):
    monkeypatch.setattr(pooled, "MOST_NUMBERS", 1000)
    found = dino_vit.predict(photos / "photos", weights, labels=photos / "labels.csv", precision="no")
    assert found.features.shape[1] == 64
    assert "96 images are too many to choose what is read of them: it is cls+mean" in caplog.text


def test_a_photo_that_cannot_be_read_is_in_no_table(photos, weights):
    """Neither one with a label nor one without; origins stay beside their labels."""
    rows = (photos / "labels.csv").read_text().splitlines()
    origins = ["origin", *("chosen" if number % 2 else "random" for number in range(len(rows) - 1))]
    lines = [f"{row},{origin}" for row, origin in zip(rows, origins, strict=True)]
    (photos / "labels.csv").write_text("\n".join(lines))
    for name in ("000.png", "001.png"):
        (photos / "photos" / name).write_bytes(b"no image")
    found = dino_vit.predict(photos / "photos", weights, labels=photos / "labels.csv", **SETTINGS).columns
    assert found["name"] == [f"{number:03}.png" for number in range(2, IMAGES)]
    expected = {line.partition(",")[0]: line.rpartition(",")[2] for line in lines}
    told = dict(zip(found["name"], found["origin"], strict=True))
    assert told == {name: expected.get(name, "guessed") for name in found["name"]}

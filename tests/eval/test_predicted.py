"""Several labels an image, from files of labels to JSON."""

import json

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from sklearn.neighbors import KNeighborsRegressor
from torch.nn.functional import normalize

import dino_vit
from dino_vit.data.open import open_source
from dino_vit.eval.sets import open_subset
from tests.support.images import write_classes
from tests.support.runs import command_here

SETTINGS = {"precision": "no", "verbose": False}


@pytest.fixture
def photos(tmp_path):
    """Images whose labels are their brightest colours."""
    colours = np.random.default_rng(0).integers(256, size=(90, 3))
    tags = ["path,tags"]
    for split, rows in (("train", range(60)), ("val", range(60, 90))):
        (tmp_path / split).mkdir()
        for row in rows:
            name, colour = f"{split}/{row}.png", colours[row].tolist()
            Image.new("RGB", (16, 16), tuple(colour)).save(tmp_path / name)
            labels = [
                text for text, value in zip(("red", "green", "blue"), colour, strict=True) if value > 128
            ]
            labels += ["early"] * (row < 3) + ["late"] * (row > 87)  # each in one split only
            tags.append(f"{name},{';'.join(labels) or ';'}")
    (tmp_path / "tags.csv").write_text("\n".join(tags))
    return tmp_path


def features_of(photos, weights, labels):
    """Return features and targets of train and of val, and the names of the targets."""
    subset = open_subset(str(photos), open_source(str(photos), photos / labels, several=True))
    names = [subset.source.name(index) for index in subset.indices]
    features = normalize(dino_vit.load_backbone(weights).embed([photos / name for name in names]).double())
    val = np.array([name.startswith("val") for name in names])
    return features[~val], subset.targets[~val], features[val], subset.targets[val], subset.classes


def neighbours_mean(bank, targets, queries, k):
    peer = KNeighborsRegressor(k, weights=lambda far: np.exp(-far / 0.07), metric="cosine")
    return peer.fit(bank, targets).predict(queries)


def test_several_labels_are_judged_as_by_scikit_learn(photos, weights):
    output = photos / "tags.json"
    arguments = [
        "knn",
        photos,
        weights,
        f"labels={photos}/tags.csv",
        "several=true",
        f"output={output}",
        "k=[5,20]",
    ]
    said = command_here(*map(str, arguments), "precision=no")
    found = json.loads(output.read_text())
    bank, targets, queries, true, classes = features_of(photos, weights, "tags.csv")
    assert found["task"] == "multilabel"
    for k, result in zip((5, 20), found["results"], strict=True):
        scores = neighbours_mean(bank, targets, queries, k)
        judged = [c for c in range(len(classes)) if true[:, c].any()]
        aps = {classes[c]: 100 * average_precision_score(true[:, c], scores[:, c]) for c in judged}
        assert result["mAP"]["value"] == pytest.approx(np.mean(list(aps.values())), abs=1e-3)
        if k == 5:
            measured = {
                name: figures["AP"] and figures["AP"]["value"] for name, figures in found["per_class"].items()
            }
            assert measured == pytest.approx({**aps, "early": None}, abs=1e-3)
            f1s = [f1_score(true[:, c], scores[:, c] > 0.5) for c in judged]
            assert result["mean F1"]["value"] == pytest.approx(100 * np.mean(f1s), abs=1e-4)
    assert found["figure"]["title"] == "k-NN mAP, k=5"
    assert found["figure"]["low"] < found["figure"]["value"] < found["figure"]["high"]
    assert "several labels for each of 90 images" in said
    assert found["per_class"]["late"]["images"] == 2


@pytest.mark.usefixtures("few_penalties")
def test_linear_classifiers_learn_several_labels(photos, weights):
    result = dino_vit.linear(photos, weights, labels=photos / "tags.csv", several=True, **SETTINGS)
    red = result.details["per_class"]["red"]
    assert red["AP"]["value"] == pytest.approx(result.per_class["red"].value, abs=1e-4)
    assert red["AP"]["value"] > red["AP of a guess"] + 30
    assert result.details["per_class"]["early"]["AP"] is result.per_class["early"] is None
    assert ((result.outputs >= 0) & (result.outputs <= 1)).all()
    assert "held_out" in result.details["best"]


@pytest.mark.usefixtures("few_penalties")
def test_two_classes_have_an_auroc(tmp_path, weights):
    images = write_classes(tmp_path / "images", "ab", 30)
    result = dino_vit.knn(images, weights, k=[3, 9], **SETTINGS)
    features = normalize(dino_vit.load_backbone(weights).embed(sorted(images.rglob("*.png"))))
    similar = (features @ features.T).double().fill_diagonal_(-np.inf).numpy()
    true = np.repeat([0, 1], 30)

    def percent(cosines, k):
        nearest = np.argsort(-cosines, axis=1)[:, :k]
        votes = np.exp(np.take_along_axis(cosines, nearest, 1) / 0.07)
        return 100 * roc_auc_score(true, (votes * true[nearest]).sum(1) / votes.sum(1))

    # Of neighbours that are as near but for rounding those of the same class come last, or first.
    rounding = 1e-6 * np.where(true[:, None] == true, 1, -1)
    for figures, k in zip(result.details["results"], (3, 9), strict=True):
        worst, best = (percent(similar + sign * rounding, k) for sign in (-1, 1))
        assert worst - 1e-4 <= figures["AUROC"]["value"] <= best + 1e-4
        assert best - worst < 1
    assert "AUROC" in str(result)
    linear = dino_vit.linear(images, weights, **SETTINGS)
    assert 0 <= linear.figures["AUROC"].low <= linear.figures["AUROC"].value
    assert "AUROC" in str(linear)


def test_one_set_by_another_reads_labels_alike(photos, weights):
    (photos / "one.csv").write_text("path,tags\n" + "".join(f"{row}.png,red\n" for row in range(60, 90)))
    (photos / "two.csv").write_text(
        "path,tags\n" + "".join(f"{row}.png,red{';big' * (row % 2)}\n" for row in range(60))
    )
    sets = {"labels": photos / "one.csv", "train": photos / "train", "train_labels": photos / "two.csv"}
    settings = {"several": True, "k": 3, **SETTINGS}
    assert dino_vit.knn(photos / "val", weights, **sets, **settings).details["task"] == "multilabel"
    write_classes(photos / "sorted", "ab", 9)  # folders are classes, which are read as one label each
    (photos / "both.csv").write_text("".join(f"{row}.png,a{';b' * (row % 2)}\n" for row in range(60, 90)))
    sets = {"labels": photos / "both.csv", "train": photos / "sorted"}
    assert dino_vit.knn(photos / "val", weights, **sets, **settings).details["task"] == "multilabel"


@pytest.mark.usefixtures("few_penalties")
@pytest.mark.parametrize("command", ["knn", "linear"])
def test_labels_that_no_image_to_judge_by_has_are_an_error(photos, weights, command):
    tags = (photos / "tags.csv").read_text().splitlines()
    rows = [f"{line.split(',')[0]},;" if line.startswith("val") else line for line in tags]
    (photos / "none.csv").write_text("\n".join(rows))
    with pytest.raises(ValueError, match="the 30 images to judge by have no labels: give more images"):
        getattr(dino_vit, command)(photos, weights, labels=photos / "none.csv", several=True, **SETTINGS)


def test_backbones_are_compared_by_several_labels(photos, weights):
    sets = {"labels": photos / "tags.csv", "several": True}
    result = dino_vit.compare(photos, [weights, "untrained"], **sets, **SETTINGS)
    assert list(result.figures) == ["k-NN mAP", "linear mAP"]

"""From a few labels to a table of labels, and to a classifier that is kept."""

import csv
import json
import re

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import dino_vit
from dino_vit import VisionTransformer, save_backbone
from dino_vit.data.open import open_source
from dino_vit.weights import WeightsError, load_backbone
from tests.support.backbones import use_few_penalties
from tests.support.coloured_photos import COLOURS, IMAGES, colour_of
from tests.support.processes import command_in_two
from tests.support.runs import command_here

pytestmark = pytest.mark.usefixtures("few_penalties")


@pytest.fixture
def weights(tmp_path):
    """A file with a small backbone of one block."""
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=1, heads=2)
    save_backbone(model, tmp_path / "a.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return tmp_path / "a.safetensors"


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def guessed_in(path):
    return [row for row in rows_of(path) if row["origin"] == "guessed"]


def predict(photos, weights, *more, labels="labels.csv", code=0):
    given = ["predict", str(photos / "photos"), str(weights), f"labels={photos / labels}", "precision=no"]
    given += ["several=true"] * (labels == "tags.csv")
    return command_here(*given, "overwrite=true", *more, code=code)


def test_those_without_a_label_get_one_with_a_confidence(photos, weights):
    output = photos / "rest.csv"
    said = predict(photos, weights, f"output={output}")
    table, rows = rows_of(output), guessed_in(output)
    assert [row["name"] for row in table] == [f"{row:03}.png" for row in range(IMAGES)]
    assert {(row["origin"], row["confidence"], row["nearest"]) for row in table[::2]} == {("given", "", "")}
    assert all(row["label"] == colour_of(row["name"]) for row in table[::2])
    assert rows == table[1::2]
    right = [row["label"] == colour_of(row["name"]) for row in rows]
    assert sum(right) >= 0.9 * len(rows)
    for row in rows:
        assert 1 / len(COLOURS) <= float(row["confidence"]) <= 1
        assert row["second"] in {*COLOURS} - {row["label"]}
        assert float(row["confidence"]) + float(row["second_confidence"]) <= 1.0001
        assert int(row["nearest"][:3]) % 2 == 0
        assert -1 <= float(row["similarity"]) <= 1
    found = json.loads((photos / "rest.json").read_text())
    counts = [found[key] for key in ("labelled", "guessed", "images", "classes")]
    assert counts == [IMAGES // 2, IMAGES // 2, IMAGES, 4]
    percent = found["cross_validated"]["value"]
    assert percent <= max(found["tried"].values())
    assert f"\nAbout {percent:.0f} of 100 guesses will be right, if these images are like" in said
    assert f"\nCross-validated accuracy {percent:.1f} % (95 % interval" in said
    assert re.search(
        r"; k-NN [\d.]+ %, of pixels [\d.]+ %, of edges [\d.]+ %, always guessing \w+ 25.0 %\n", said
    )
    sure = sum(float(row["confidence"]) >= 0.8 for row in rows)
    assert f"{output}: {len(rows)} of {IMAGES} labels guessed: mean confidence " in said
    assert f" %, {sure} with 80 % or more; " in said
    page = f"labels={photos / 'labels.csv'} guesses={output} output=check.html: a page"
    assert f"\ndino-vit label {photos / 'photos'} {weights} {page} to check the guesses\n" in said
    assert "\nMistakes in the given labels cannot be found reliably\n" in said, "48 labels are too few"
    assert not output.with_name("rest-sure.csv").exists()
    before = output.read_bytes()
    predict(photos, weights, f"output={output}")
    assert output.read_bytes() == before, "the same again is the same"


def test_labelled_images_may_be_a_set_of_their_own(photos, weights):
    for part in ("new", "labelled"):
        (photos / part).mkdir()
    for row in range(IMAGES):
        folder = photos / "new" if row % 2 else photos / "labelled" / colour_of(f"{row:03}")
        folder.mkdir(exist_ok=True)
        (photos / "photos" / f"{row:03}.png").rename(folder / f"{row:03}.png")
    found = dino_vit.predict(photos / "new", weights, train=photos / "labelled", verbose=False)
    assert found.path is None
    assert not list(photos.glob("*.json"))
    assert len(found.names) == len(found.labels) == len(found.outputs) == IMAGES // 2
    assert found.columns["origin"] == ["guessed"] * len(found.names)
    assert found.labels == [found.classes[number] for number in found.outputs.argmax(1)]
    np.testing.assert_allclose(found.outputs.sum(1), 1, rtol=1e-5)
    assert found.columns["nearest"][0].endswith(".png")
    with pytest.raises(ValueError, match=r"are in train=.* too; give other images"):
        dino_vit.predict(photos / "labelled", weights, train=photos / "labelled", verbose=False)


@pytest.mark.parametrize(
    ("labels", "suffix"), [("labels.csv", "parquet"), ("tags.csv", "csv"), ("tags.csv", "parquet")]
)
def test_the_given_labels_in_a_table_are_labels_and_the_guesses_are_not(photos, weights, labels, suffix):
    table, several = photos / f"rest.{suffix}", labels == "tags.csv"
    said = predict(photos, weights, f"output={table}", labels=labels)
    assert ("Cross-validated mAP" in said) == several
    given, read = (
        open_source(str(photos / "photos"), each, several=several) for each in (photos / labels, table)
    )
    assert read.labels.names == given.labels.names
    assert read.codes().tolist() == given.codes().tolist()
    again = {"labels": table, "several": several, "precision": "no", "verbose": False}
    found = dino_vit.predict(photos / "photos", weights, **again)
    assert found.names == [f"{row:03}.png" for row in range(1, IMAGES, 2)]
    written = pq.read_table(table).to_pylist() if suffix == "parquet" else rows_of(table)
    columns = zip(*(found.columns[title] for title in ("name", "label", "origin")), strict=True)
    for row, (name, label, origin) in zip(written, columns, strict=True):
        text = row["label"] if suffix == "parquet" or not several else row["label"].split(";")
        assert (row["name"], text, row["origin"]) == (name, label, origin), "the same again"


def test_labels_with_a_semicolon_need_a_table_that_keeps_them(photos, weights):
    """In a CSV `a;b` would be read as two labels."""
    names = [f"{row:03}.png" for row in range(0, IMAGES, 2)]
    values = [["dark; a bit" if row % 3 else "light", colour_of(name)] for row, name in enumerate(names)]
    pq.write_table(pa.table({"name": names, "label": values}), photos / "tags.parquet")
    given = {"labels": photos / "tags.parquet", "verbose": False}
    with pytest.raises(ValueError, match=r"label 'dark; a bit' contains ';', .* give output=.*rest\.parquet"):
        dino_vit.predict(photos / "photos", weights, output=photos / "rest.csv", **given)
    found = dino_vit.predict(photos / "photos", weights, output=photos / "rest.parquet", **given)
    assert "dark; a bit" in found.classes
    written = pq.read_table(found.path).to_pylist()
    assert [row["label"] for row in written if row["origin"] == "guessed"] == found.labels
    given = [row for row in written if row["origin"] == "given"]
    assert [sorted(row["label"]) for row in given] == [sorted(each) for each in values]
    assert {row["confidence"] for row in given} == {None}


def test_mistakes_are_found_in_the_order_of_a_users_steps(photos):
    """First that there is no network, then what is wrong with the labels, and at last with the weights."""
    broken, folder = photos / "broken.safetensors", photos / "photos"
    broken.touch()
    (photos / "run").mkdir()
    for command in (dino_vit.predict, dino_vit.knn, dino_vit.linear):
        for absent, wrong in (("none", "does not exist; "), ("run", "holds no weights; ")):
            advice = rf"{absent} {wrong}train a network first \(`dino-vit pretrain IMAGES FOLDER`\)"
            with pytest.raises(WeightsError, match=advice):
                command(folder, photos / absent, labels=photos / "absent.csv", verbose=False)
        with pytest.raises(ValueError, match=r"absent\.csv does not exist"):
            command(folder, broken, labels=photos / "absent.csv", verbose=False)
    (photos / "rest.csv").touch()
    with pytest.raises(ValueError, match=r"rest\.csv already exists"):
        dino_vit.predict(folder, photos / "none", output=photos / "rest.csv", verbose=False)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_sure_labels_are_a_table_of_their_own(photos, weights, suffix):
    given = {"labels": photos / "labels.csv", "precision": "no", "verbose": False}
    least = float(np.quantile(dino_vit.predict(photos / "photos", weights, **given).confidence, 0.7))
    output, again = photos / f"rest.{suffix}", {**given, "confident": least}
    found = dino_vit.predict(photos / "photos", weights, output=output, **again)
    read = pq.read_table if suffix == "parquet" else pa.csv.read_csv
    rows, sure = (read(photos / f"{name}.{suffix}").to_pylist() for name in ("rest", "rest-sure"))
    assert sure == [row for row in rows if row["origin"] == "given" or row["confidence"] >= least]
    assert 10 < len(sure) - IMAGES // 2 < 20, len(rows)
    count = f"{len(sure)} images with a given label, or a confidence of {100 * least:.0f} % or more"
    assert f"rest-sure.{suffix}: {count}\n" in str(found)
    with pytest.raises(ValueError, match=r"rest\..* already exists, with 2 other files"):
        dino_vit.predict(photos / "photos", weights, output=output, **again)
    dino_vit.predict(photos / "photos", weights, output=output, overwrite=True, **given)
    assert not (photos / f"rest-sure.{suffix}").exists(), "it would be of an earlier call"
    with pytest.raises(ValueError, match="confident writes a table beside output, which is not given"):
        dino_vit.predict(photos / "photos", weights, **again)


@pytest.mark.parametrize(
    ("labels", "more"),
    [("labels.csv", {}), ("tags.csv", {}), ("labels.csv", {"size": 24, "resize_mode": "whole"})],
)
def test_a_classifier_that_was_kept_gives_the_same_labels(photos, weights, labels, more):
    head, table = photos / "classifier.safetensors", photos / "rest.csv"
    settings = [f"{key}={value}" for key, value in more.items()]
    for _ in range(2):  # the second takes the place of the first
        predict(photos, weights, f"output={table}", f"classifier={head}", *settings, labels=labels)
    rows = guessed_in(table)
    classifier = dino_vit.load_classifier(head, verbose=False)
    if more:
        assert (classifier.transform.size, classifier.transform.resize_mode) == ((24, 24), "whole")
    found = dino_vit.predict(
        photos / "photos",
        weights,
        labels=photos / labels,
        several=labels == "tags.csv",
        precision="no",
        verbose=False,
        **more,
    )
    assert classifier.facts.temperature == pytest.approx(found.details.get("temperature", 1.0), rel=1e-3)
    files = [photos / "photos" / row["name"] for row in rows]
    given, outputs = classifier.predict(files)
    written = [";".join(each) or ";" if isinstance(each, list) else each for each in given]
    assert written == [row["label"] for row in rows]
    if labels == "labels.csv":
        confidence = [float(row["confidence"]) for row in rows]
        np.testing.assert_allclose(outputs.max(dim=1).values, confidence, atol=1e-4)  # rounded in the table
    np.testing.assert_allclose(outputs, found.outputs, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        images = torch.stack([classifier.transform(file) for file in files[:3]])
        torch.testing.assert_close(classifier(images), outputs[:3])
    theirs, ours = load_backbone(weights).state_dict(), load_backbone(head).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    again = dino_vit.predict(photos / "photos", head, precision="no", verbose=False)
    assert len(again.names) == IMAGES
    assert again.classes == classifier.classes
    indices = [again.names.index(row["name"]) for row in rows]
    np.testing.assert_allclose(again.outputs[indices], outputs, rtol=1e-4, atol=1e-5)
    graph = photos / "classifier.onnx"
    said = str(dino_vit.export(head, graph, format="onnx", classifier=True, verbose=False))
    session = onnxruntime.InferenceSession(graph)
    # Images that are nearly even have features that are nearly alike, and rounding counts.
    np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], outputs[:3], atol=0.01)
    (photos / "photo.png").write_bytes(files[0].read_bytes())
    names = dict[str, object]()
    exec(said.replace("photo.jpg", str(photos / "photo.png")), names)  # the lines run, and prepare alike
    np.testing.assert_allclose(
        names["probabilities"], outputs[:1], atol=0.02
    )  # Pillow rounds to whole pixels


def test_neighbours_are_kept_too(photos, weights, monkeypatch):
    monkeypatch.setattr("dino_vit.eval.cross_validation.LOGISTIC_IMAGES", 1)
    head = photos / "classifier.safetensors"
    found = dino_vit.predict(
        photos / "photos", weights, labels=photos / "labels.csv", classifier=head, verbose=False
    )
    assert found.details["classifier"].startswith("k-NN")
    classifier = dino_vit.load_classifier(head, verbose=False)
    files = [photos / "photos" / name for name in found.names]
    assert classifier.predict(files)[0] == found.labels
    command_here("export", str(head), str(photos / "classifier.onnx"), "--format", "onnx", "--classifier")


def test_two_processes_say_the_same(photos, weights):
    arguments = [
        "predict",
        str(photos / "photos"),
        str(weights),
        f"labels={photos}/labels.csv",
        "precision=no",
    ]
    command_here(*arguments, f"output={photos}/one.csv")
    command_in_two(photos / "log", *arguments, f"output={photos}/two.csv", before=use_few_penalties)
    assert (photos / "one.csv").read_text() == (photos / "two.csv").read_text()


def test_mistakes_are_said(photos, weights):
    folder = photos / "photos"
    given = {"labels": photos / "labels.csv", "verbose": False}
    with pytest.raises(ValueError, match=r"none of the 96 images .* has a label"):
        dino_vit.predict(folder, weights, verbose=False)
    dino_vit.predict(folder, weights, classifier=photos / "classifier.safetensors", **given)
    with pytest.raises(ValueError, match="several are of labels to learn from"):
        dino_vit.predict(folder, photos / "classifier.safetensors", several=True, verbose=False)
    with pytest.raises(ValueError, match="classifier would overwrite weights"):
        dino_vit.predict(folder, weights, classifier=str(weights), **given)
    one = photos / "one.csv"
    one.write_text("000.png,blue\n002.png,blue")
    with pytest.raises(ValueError, match="are of one class, blue"):
        dino_vit.predict(folder, weights, labels=one, verbose=False)
    with pytest.raises(WeightsError, match="holds weights, but no classifier"):
        dino_vit.load_classifier(weights)
    with pytest.raises(ValueError, match="classifier is for format=onnx"):
        dino_vit.export(weights, photos / "a.pth", format="timm", classifier=True)
    other = photos / "mine.csv"
    other.write_text("mine")
    with pytest.raises(ValueError, match="already exists; give overwrite=true"):
        dino_vit.predict(folder, weights, output=other, **given)


def test_labels_that_are_sorted_by_name_are_learned_in_every_fold(photos, weights):
    """Of folds in the order of the names, each would hold one label, which the others never have."""
    random, lines = np.random.default_rng(0), ["name,tags"]
    (photos / "sorted").mkdir()
    for row in range(40):
        name, colour = [*(COLOURS | {"black": (20, 20, 20)}).items()][row // 8]
        pixels = np.array(colour) + random.normal(0, 12, (32, 32, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(photos / "sorted" / f"{row:03}.png")
        lines.append(f"{row:03}.png,{name};{name[0]}")
    (photos / "sorted.csv").write_text("\n".join(lines))
    sets = {"train": photos / "sorted", "labels": photos / "sorted.csv", "verbose": False}
    found = dino_vit.predict(photos / "photos", weights, **sets)
    assert found.details["cross_validated"]["value"] == 100

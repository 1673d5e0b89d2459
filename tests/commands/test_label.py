"""The file that `dino-vit label` writes: which images it shows, and what it knows of them."""

import csv
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

import dino_vit
from dino_vit.cli import main
from dino_vit.commands.label import as_number
from tests.support.labelling import NAMES, write_images
from tests.support.reports import ParsedPage, picture_of


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("label")
    return folder, write_images(folder / "photos")


@pytest.fixture
def label(colours, tmp_path, monkeypatch):
    """Have the page written, and return its data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(colours[0] / "photos")

    def written(**settings):
        result = dino_vit.label("photos", "pixels", overwrite=True, verbose=False, **settings)
        return ParsedPage(result.path.read_text()).data

    return written


def write_rows(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def test_every_image_is_shown_once_with_its_photo_and_neighbours(label, colours, tmp_path):
    data = label()
    assert sorted(data["names"]) == sorted(colours[1])
    assert data["total"] == len(NAMES)
    count = len(data["names"])
    assert sorted(data["queue"]) == list(range(count))
    assert {picture_of(uri).shape for uri in data["photos"]} == {(24, 32, 3)}
    assert all(number not in near for number, near in enumerate(data["neighbours"]))
    assert sorted(n for row in data["clusters"] for n in row["images"]) == list(range(count))
    assert sum(row["size"] for row in data["clusters"]) == count
    colour = [colours[1][name] for name in data["names"]]
    same = [colour[near[0]] == colour[number] for number, near in enumerate(data["neighbours"])]
    assert sum(same) / count > 0.9
    assert {colour[number] for number in data["queue"][:10]} == {"red", "blue"}
    assert data["given"] == data["guesses"] == [None] * count
    page = (tmp_path / "label.html").read_text()
    assert "<script>alert" not in page
    assert page.count("</script>") == 2


def test_fewer_images_are_shown_if_asked_for_and_the_random_ones_are_a_fifth(label):
    data = label(images=20)
    assert len(data["names"]) == 20
    assert len(data["sample"]) == 4
    assert label(images=20)["names"] == data["names"], "the same call, the same page"
    assert label(images=20)["digest"] == data["digest"]
    other = label(images=20, seed=1)
    first, second = (dict(zip(each["names"], each["ids"], strict=True)) for each in (data, other))
    shared = first.keys() & second.keys()
    assert {first[name] for name in shared} == {second[name] for name in shared}
    assert len({*(first | second).values()}) == len(first | second)
    assert other["names"] != data["names"]
    assert other["digest"] != data["digest"]
    assert label(images=30)["sample"] == [0, 1, 2, 3, 4, 5], "drawn first, whatever is typical"


def test_of_a_large_source_some_are_looked_at_the_labelled_ones_too(label, colours, tmp_path, monkeypatch):
    monkeypatch.setattr("dino_vit.commands.label.MOST", 24)
    labelled = list(colours[1].items())[5:10]
    write_rows(tmp_path / "few.csv", [("name", "label"), *labelled])
    data = label(labels="few.csv")
    assert len(data["names"]) == data["looked_at"] == 24
    assert data["total"] == len(NAMES)
    assert {name for name, _ in labelled} < {*data["names"]}
    assert label()["names"] != label(seed=1)["names"]


def test_labels_so_far_keep_their_origins_and_cover_their_clusters(label, tmp_path):
    rows = [("name", "label", "origin"), ("plain.png", "red", "group:4"), ("gone.png", "blue", "random")]
    write_rows(tmp_path / "few-2.csv", [*rows, ("IMG_0001.png", " Red ")])  # without its last cell
    data = label(labels="few-2.csv")
    given = dict(zip(data["names"], data["given"], strict=True))
    assert given["plain.png"] == ["red", "group:4"]
    assert given["IMG_0001.png"] == ["Red", ""]
    assert data["others"] == [["gone.png", "blue", "random"]], "of no image here, but not lost"
    assert data["after"] == "few-2"
    labelled = {number for number, row in enumerate(data["given"]) if row}
    assert not labelled & {*data["sample"]}
    assert data["command"] == "dino-vit predict photos pixels output=rest.csv"
    assert data["labels"] == ["red", "blue", "Red"]
    (tmp_path / "rest.csv").touch()
    again = label(labels="few-2.csv")
    assert again["command"] == "dino-vit predict photos pixels output=rest.csv overwrite=true"
    assert again["digest"] == data["digest"], "what was done on the page is kept"
    few = label(labels="few-2.csv", images=4)
    assert "plain.png" in few["names"] or ["plain.png", "red", "group:4"] in few["others"]


@pytest.mark.parametrize("name", ["rest.csv", "rest.parquet"])
def test_guesses_are_those_of_predict_the_least_sure_first(label, colours, tmp_path, name):
    few, unsure = list(colours[1].items())[20:36], [*colours[1]][40]
    write_rows(tmp_path / "few.csv", [("name", "label", "origin"), *few, (unsure, "", "unsure")])
    predicted = dino_vit.predict("photos", "pixels", labels="few.csv", output=name, verbose=False)
    data = label(labels="few.csv", guesses=name)
    by_name = dict(
        zip(predicted.names, zip(predicted.labels, predicted.confidence, strict=True), strict=True)
    )
    assert unsure in by_name
    assert data["given"][data["names"].index(unsure)] == ["", "unsure"], "also with a guess"
    alone = label(guesses=name)
    assert alone["given"][alone["names"].index(unsure)] == ["", "unsure"], "the table remembers it"
    for shown, guess in zip(data["names"], data["guesses"], strict=True):
        assert (guess is None) == (shown in {**dict(few), unsure: ""})
        if guess:
            assert guess == [by_name[shown][0], pytest.approx(by_name[shown][1])]
    least = sorted(range(len(predicted.names)), key=lambda row: predicted.confidence[row])[:3]
    few = label(labels="few.csv", guesses=name, images=12)["names"]
    assert {predicted.names[row] for row in least} <= {*few}, "a quarter of twelve"


@pytest.mark.parametrize("name", ["whole.csv", "whole.parquet"])
def test_a_table_with_given_and_guessed_labels_is_both(label, tmp_path, name):
    rows = [("plain.png", "red", "chosen", None), ("IMG_0001.png", "blue", "guessed", 0.7)]
    titles = "name", "label", "origin", "confidence"
    write_rows(tmp_path / "whole.csv", [titles, *rows])
    columns = dict(zip(titles, map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(pa.table(columns), tmp_path / "whole.parquet")
    data = label(guesses=name)
    by_name = dict(zip(data["names"], zip(data["given"], data["guesses"], strict=True), strict=True))
    assert by_name["plain.png"] == (["red", "chosen"], None)
    assert by_name["IMG_0001.png"] == (None, ["blue", 0.7])
    alone = label(labels=name)
    assert alone["guesses"] == [None] * len(alone["names"]), "as labels= the guesses are none"
    assert [row for row in alone["given"] if row] == [["red", "chosen"]]


def test_numbers_are_labels_and_none_is_not(label, tmp_path):
    labels = {"plain.png": 0, "IMG_0001.png": -1, "IMG_0002.png": None, "IMG_0003.png": 2.5}
    (tmp_path / "few.json").write_text(json.dumps(labels))
    data = label(labels="few.json")
    given = {name: row[0] for name, row in zip(data["names"], data["given"], strict=True) if row}
    assert given == {"plain.png": "0", "IMG_0003.png": "2.5"}


def test_an_image_that_a_list_names_twice_is_shown_once(label, colours, tmp_path):
    names = [name for name in colours[1] if name.startswith("IMG")]
    (tmp_path / "list.txt").write_text("".join(f"photos/{name}\n" for name in [*names, *names[:3]]))
    page = dino_vit.label("list.txt", "pixels", verbose=False)
    data = ParsedPage(page.path.read_text()).data
    assert sorted(data["names"]) == sorted(f"photos/{name}" for name in names)
    assert data["total"] == len(names)


def test_mistakes_are_explained_before_the_work(label, tmp_path, capsys):
    write_rows(tmp_path / "none.csv", [("name", "label"), ("other.png", "red")])
    write_rows(tmp_path / "few.csv", [("name", "label"), ("plain.png", "red")])
    write_rows(tmp_path / "page.csv", [("name", "label", "origin"), ("plain.png", "red", "chosen")])
    (tmp_path / "several.json").write_text(json.dumps({"plain.png": ["red", "blue"]}))
    label(images=10)
    for settings, message in (
        (["output=a.html", "labels=none.csv"], "has labels for none of the images"),
        (
            ["output=a.html", "labels=several.json"],
            "has several labels of an image; label is for one of each",
        ),
        (
            ["output=a.html", "labels=few.csv", "guesses=few.csv"],
            "few.csv has no guesses to check; give the table that predict wrote",
        ),
        (["output=a.html", "guesses=page.csv"], "page.csv has no guesses to check"),
        (["output=a.html", "guesses=missing.csv"], "missing.csv does not exist"),
        (["output=label.txt"], "output"),
        ([], "label.html already exists; give overwrite=true"),
    ):
        assert main(["label", "photos", "pixels", "images=10", *settings]) == 2
        assert message in capsys.readouterr().err


def test_unreadable_images_are_left_out_and_a_handful_is_enough(tmp_path, capsys, caplog):
    write_images(tmp_path / "photos")
    for name in NAMES[5:]:
        (tmp_path / "photos" / name).unlink()
    (tmp_path / "photos" / "torn.png").write_bytes(b"no image")
    output = f"output={tmp_path / 'few.html'}"
    assert main(["label", str(tmp_path / "photos"), "pixels", "images=6000", output]) == 0
    assert "5 of 6 images" in capsys.readouterr().out
    assert "torn.png" in caplog.text


@pytest.mark.parametrize(("text", "number"), [("0.5", 0.5), ("0,5", 0.5), ("", 0), ("nan", 0), ("sure", 0)])
def test_confidences_are_numbers_as_spreadsheets_write_them(text, number):
    assert as_number(text) == number

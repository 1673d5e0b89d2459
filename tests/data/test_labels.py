import json
import logging
import re

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from dino_vit.data.label_files import read_entries, read_table
from dino_vit.data.labels import Folders, encode_labels, folder_columns
from dino_vit.data.open import open_source
from tests.support.image_sets import FILES, write_folder
from tests.support.images import write_synthetic


@pytest.mark.parametrize(
    ("values", "numbers", "classes"),
    [
        (["b", "a", "b"], [1, 0, 1], ["a", "b"]),
        ([10, 9, None, 700], [1, 0, -1, 2], ["9", "10", "700"]),
        (["10", "9", "", "-1.5"], [2, 1, -1, 0], ["-1.5", "9", "10"]),
        (["10", "9", "x"], [0, 1, 2], ["10", "9", "x"]),
        (["nan", "1"], [-1, 0], ["1"]),
        (["-1", "1", -1, -1.0, "-1.0"], [-1, 0, -1, -1, -1], ["1"]),
        ([-1, 0, 1], [-1, 0, 1], ["0", "1"]),
        ([True, False], [1, 0], ["False", "True"]),
        ([b"cat", "ant"], [1, 0], ["ant", "cat"]),
        ([None, None], [-1, -1], []),
    ],
)
def test_labels_are_numbered_in_order_without_gaps(values, numbers, classes):
    found = encode_labels(values)
    assert found.codes(np.arange(len(values))).tolist() == numbers
    assert list(found.names) == classes


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ([b"a/1", b"b/1", b"top"], ["a", "b"]),
        ([b"set/train/a/1", b"set/train/b/x/2"], ["a", "b"]),
        ([b"/abs/a/1", b"rel/b/2"], ["rel"]),
        ([b"10/x", b"9/x"], ["9", "10"]),
        ([b"one/1", b"one/2"], []),
        ([b"b/1", b"a/1", b"b/2"], ["a", "b"]),
        ([b"a"], []),
    ],
)
def test_folders_are_labels_below_what_all_share(names, classes):
    assert list(folder_columns(names)[0].names) == classes


def entries(name, text):
    return [(entry.name, entry.label) for entry in read_entries(name, text.encode())]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "x.jpg\ny.png\r\n\n", [("x.jpg", None), ("y.png", None)]),
        ("a.txt", "x y.jpg 3\nb.JPEG\tcat 1", [("x y.jpg", "3"), ("b.JPEG", "cat 1")]),
        ("a.txt", "a.jpg.png, 7\nplain\t2\nplain", [("a.jpg.png", "7"), ("plain", "2"), ("plain", None)]),
        (
            "a.txt",
            "a.TIFF 3 \na b.tif,cat, big\na.png,",
            [("a.TIFF", "3"), ("a b.tif", "cat, big"), ("a.png", None)],
        ),
        ("a.txt", "a.png.b/c.jpeg\tdog\na.pngs\tx", [("a.png.b/c.jpeg", "dog"), ("a.pngs", "x")]),
        ("a.csv", "x.jpg\ny.jpg\n", [("x.jpg", None), ("y.jpg", None)]),
        ("a.csv", "x.jpg,1\ny.jpg,\n", [("x.jpg", "1"), ("y.jpg", None)]),
        ("a.csv", "3,x.jpg\n4,y.jpg\n", [("x.jpg", "3"), ("y.jpg", "4")]),
        ("a.csv", "\ufefflabel,width,path\ncat,3,x.jpg\n", [("x.jpg", "cat")]),
        ("a.csv", 'file,species\n"a, b.jpg",cat\n', [("a, b.jpg", "cat")]),
        ("a.csv", 'path,label\n"new\nline.jpg",cat\n', [("new\nline.jpg", "cat")]),
        ("a.csv", ",path\n0,x.jpg\n1,y.jpg\n", [("x.jpg", None), ("y.jpg", None)]),  # by pandas
        ("a.csv", "id,path\n7,x.jpg\n", [("x.jpg", None)]),
        ("a.csv", ",path\n0,x.jpg\n0,y.jpg\n", [("x.jpg", None), ("y.jpg", None)]),
        ("a.csv", "Image,Id\nx.jpg,w\ny.jpg,w\n", [("x.jpg", "w"), ("y.jpg", "w")]),
        ("a.csv", "photo,species\nx.jpg,cat\n", [("x.jpg", "cat")]),
        ("a.tsv", "path\tclass\nx,1.jpg\tcat\n", [("x,1.jpg", "cat")]),
        ("a.csv", "", []),
    ],
)
def test_lists_of_every_make(name, text, expected):
    assert entries(name, text) == expected


def test_a_row_of_another_length_is_named():
    with pytest.raises(ValueError, match=r"a\.csv, line 4 has 1 of 2 columns"):
        entries("a.csv", "path,label\nx.jpg,1\n\ny.jpg\n")
    with pytest.raises(ValueError, match=r"line 2 has 3 of 2 columns: .*; write a cell with commas"):
        entries("a.csv", "path,label\nx.jpg,sea, sky\n")
    assert entries("a.csv", "path,label\nx.jpg,sea,\n") == [("x.jpg", "sea")]  # as spreadsheets write it


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "name;label\nx.jpg;cat\n", [("x.jpg", "cat")]),
        ("a.csv", "x.jpg\tcat\n", [("x.jpg", "cat")]),
        ("a.tsv", "x.jpg,cat\n", [("x.jpg", "cat")]),
        ("a.csv", "name,label\nx.jpg,sea;sky\n", [("x.jpg", "sea;sky")]),
        ("a.csv", "name,class_id,class_name\nx.jpg,3,cat\n", [("x.jpg", "cat")]),
        ("a.csv", "class,name,class_name\n3,x.jpg,cat\n", [("x.jpg", "cat")]),
        ("a.csv", "a;b.jpg\n", [("a;b.jpg", None)]),  # the name of an image may hold any of them
    ],
)
def test_a_table_may_have_another_delimiter_and_further_columns(name, text, expected):
    assert entries(name, text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Name,digit,who\n", "the first line names no column label: Name,digit,who. Write the names of the"),
        ("", "the first line names no column label: x.png,5,anna. Write the names of the columns there"),
        ("name,,\n", "the first line names no column label: name,,."),
        ("name,sea,sky\n", "name,sea,sky. .* several labels of an image are one cell, as in sea;sky"),
        ("name,label,who\n", "has a label for none of them: fill in the labels"),
    ],
)
def test_a_table_without_labels_is_an_error_where_they_are_asked_for(tmp_path, caplog, text, said):
    write_synthetic(tmp_path / "photos" / "x.png", 0)
    rows = {"name,sea,sky\n": "x.png,0,1\n", "name,label,who\n": "x.png,,anna\n"}
    (path := tmp_path / "a.csv").write_text(text + rows.get(text, "x.png,5,anna\n"))
    with pytest.raises(ValueError, match=said):
        open_source(str(tmp_path / "photos"), path)
    assert not caplog.text
    (tmp_path / "x.png").touch()
    open_source(str(path))  # a list of images needs none
    assert "fill in" in said or re.search(said, caplog.text)


@pytest.mark.parametrize("name", ["labels.json", "labels.csv", "labels.txt"])
def test_labels_of_a_file_join_by_name(tmp_path, caplog, name):
    root = write_folder(tmp_path / "photos", {key: FILES[key] for key in ["cat/é.jpg", "dog-2/x.bmp"]})
    (root / "third.png").write_bytes(b"")
    table = {"dog-2/x.bmp": 30, "third.png": 4, "missing.png": 4}
    path = tmp_path / name
    if name.endswith("json"):
        path.write_text(json.dumps(table))
    else:
        header = "filename,label\n" if name.endswith("csv") else ""
        path.write_text(header + "".join(f"{key},{value}\n" for key, value in table.items()))
    with caplog.at_level(logging.INFO, "dino_vit"):
        source = open_source(str(root), labels=path)
    assert [source.label(index) for index in range(3)] == [None, 1, 0]
    assert source.labels.names == ("4", "30")
    assert "labels for 2 of 3 images" in caplog.text
    assert "1 label for names not in the source: 'missing.png'" in caplog.text
    plain = open_source(str(root))
    assert (source.fingerprint, source.name(1), source.read(1)) == (
        plain.fingerprint,
        plain.name(1),
        plain.read(1),
    )
    with pytest.raises(IndexError):
        source.label(3)


def test_names_without_a_match_and_two_values_for_a_name_are_said(tmp_path, caplog):
    for name in ("a.png", "b.png", "c.png", "d.png", "é.png"):
        write_synthetic(tmp_path / "photos" / name, 0)
    path = tmp_path / "labels.csv"
    path.write_text("a.png,0\nx.png,1\ny.png,1\nye.png,1\ne\u0301.png,1\nz.png,1\n")
    caplog.set_level("INFO", "dino_vit")
    assert open_source(str(tmp_path / "photos"), path).label(0) == 0
    assert "labels for 1 of 5 images\n" in caplog.text
    assert "5 labels for names not in the source: 'e\u0301.png', 'x.png', 'y.png', ..." in caplog.text
    path.write_text("".join(f"{name},{label}\n" for name in "abcde" for label in (1, 2)))
    said = r"two labels for 5 names: 'a' has '1' in line 1 and '2' in line 2, 'b' .*, \.\.\.; keep one line"
    with pytest.raises(ValueError, match=said):
        open_source(str(tmp_path / "photos"), path)


def test_errors_about_a_file_have_no_secrets_of_its_names(tmp_path):
    write_synthetic(tmp_path / "photos" / "a.png", 0)
    path, secret = tmp_path / "labels.csv", f"https://me:{'hunter2' * 30}@host/a b.png?token=hunter2 '"
    for text in (f'"{secret}",0\n"{secret}",1\n', f'"{secret}",0\n', f'path,label\n"{secret}"\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"https://host/a b\.png") as error:
            open_source(str(tmp_path / "photos"), path)
        assert "hunter2" not in str(error.value)


def test_labels_for_other_names_are_refused(tmp_path):
    (tmp_path / "labels.csv").write_text("a.jpg,1\n")
    with pytest.raises(ValueError, match=r"labels for none of the images: its names are like 'a\.jpg'"):
        open_source("synthetic:3", labels=tmp_path / "labels.csv")
    (tmp_path / "labels.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="must be one object"):
        open_source("synthetic:3", labels=tmp_path / "labels.json")
    (tmp_path / "labels.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        open_source("synthetic:3", labels=tmp_path / "labels.json")
    with pytest.raises(ValueError, match="give a CSV or JSON file with a label for each image"):
        open_source("synthetic:3", labels=tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (["train", "val"], True),
        (["Training", "validation", "TEST"], True),
        (["train", "unlabeled"], True),
        (["train", "test", "bus"], False),  # pictures of trains
        (["train"], False),
        ([], False),
    ],
)
def test_folders_are_splits_if_all_are_named_so(folders, splits):
    assert bool(Folders.of([b"", *(f"{folder}/".encode() for folder in folders)]).splits) == splits


def test_labels_are_the_folders_in_the_splits():
    names = [b"set/test/cat/1", b"set/test/dog/1", b"set/train/cat/2", b"set/train/dog/x/3", b"set/train/4"]
    labels, splits = folder_columns(names)
    assert (labels.names, labels.codes(np.arange(5)).tolist()) == (("cat", "dog"), [0, 1, 0, 1, -1])
    assert (splits.names, splits.codes(np.arange(5)).tolist()) == (("test", "train"), [0, 0, 1, 1, 1])
    assert folder_columns([b"cat/1", b"train/1"])[0].names == ("cat", "train")


def test_labels_that_are_no_number_are_none_and_said(caplog, tmp_path):
    found = encode_labels(["NaN", "x", float("nan"), "nan"])
    assert (found.codes(np.arange(4)).tolist(), found.names) == ([-1, 0, -1, -1], ("x",))
    assert "3 images have 'nan' or '-1' for a label" in caplog.text
    write_folder(tmp_path / "images")
    (tmp_path / "labels.json").write_text('{"cat/a.b.png": NaN}')
    assert open_source(str(tmp_path / "images"), tmp_path / "labels.json").labels.names == ()
    assert folder_columns([b"nan/1.png", b"-1/1.png"])[0].names == ("-1", "nan")


def test_an_object_of_json_with_two_values_for_a_name_is_refused(tmp_path):
    write_folder(tmp_path / "images")
    (tmp_path / "labels.json").write_text('{"cat/a.b.png": "cat", "cat/a.b.png": "dog"}')
    with pytest.raises(ValueError, match=r"labels\.json has two labels for 1 name: 'cat/a\.b\.png'"):
        open_source(str(tmp_path / "images"), tmp_path / "labels.json")


@pytest.mark.parametrize("label", ['{"cat": 1}', '["cat", null]', '[["cat"]]', '[{"name": "cat"}]'])
def test_a_value_of_json_that_is_no_label_is_refused(tmp_path, label):
    write_folder(tmp_path / "images")
    (tmp_path / "labels.json").write_text(f'{{"dog-2/x.bmp": null, "cat/a.b.png": {label}}}')
    with pytest.raises(ValueError, match=r"the label of 'cat/a\.b\.png' is neither a text nor a number, nor"):
        open_source(str(tmp_path / "images"), tmp_path / "labels.json")


def test_a_list_with_two_labels_for_an_image_is_refused(tmp_path, caplog):
    """As two images, one would be the other's nearest neighbour, of another class."""
    write_folder(tmp_path)
    path = tmp_path / "list.csv"
    path.write_text("path,label\ncat/é.jpg,sea\ndog-2/x.bmp,sky\ncat/é.jpg,sky\n")
    with pytest.raises(ValueError, match=r"list\.csv has two labels for 1 name: .* in line 4; .* in sea;sky"):
        open_source(str(path))
    path.write_text("path,label\ncat/é.jpg,sea\ndog-2/x.bmp,sky\ncat/é.jpg,sea\n")
    caplog.set_level("INFO", "dino_vit")
    assert len(open_source(str(path))) == 3
    assert "list.csv names 2 images in 3 lines" in caplog.text


def test_a_file_that_is_no_text_is_no_list():
    with pytest.raises(ValueError, match=r"is not text in UTF-8, perhaps in UTF-16"):
        next(read_entries("labels.csv", "a.jpg,cat".encode("utf-16"), labels_needed=True))


@pytest.mark.parametrize("several", [False, True])
def test_a_label_in_the_letters_of_a_spreadsheet_is_refused_by_its_line(tmp_path, several):
    path = tmp_path / "few.csv"
    path.write_bytes("name;label\r\nKäse 1.jpg;Wein\r\nb.jpg;Käse\r\n".encode("cp1252"))
    with pytest.raises(ValueError, match=r"line 3: the label 'K\\xe4se' is not in UTF-8; save it in UTF-8"):
        read_table(str(path), several)
    path.write_bytes("name;label\r\nKäse 1.jpg;Wein\r\n".encode("cp1252"))
    assert [*read_table(str(path), several)] == [r"K\xe4se 1.jpg"], "a file may be called by any bytes"


@pytest.mark.parametrize("title", ["name", "photo"])
def test_origins_are_read_whatever_the_column_of_names_is_called(tmp_path, title):
    (tmp_path / "few.csv").write_text(f"{title},label,origin\na.jpg,cat,random\nb.jpg,dog,\n")
    table = read_table(str(tmp_path / "few.csv"), False)
    assert [(row.name, row.origin) for row in table.values()] == [("a.jpg", "random"), ("b.jpg", "")]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_label_that_is_not_the_guess_beside_it_was_given(tmp_path, suffix):
    """Whoever corrects the table of `predict` in a spreadsheet changes the labels alone."""
    rows = [
        ("as guessed", "cat", "guessed", "cat", None),
        ("corrected", "dog", "guessed", "cat", "dog"),
        ("taken away", None, "guessed", "cat", None),
        ("without the guess", "cat", "guessed", None, None),
        ("not sure", "cat", "unsure", "cat", None),
        ("then sure", "dog", "unsure", "cat", "dog"),
        ("written where there was none", "dog", "unsure", None, "dog"),
        ("of the page to label by", None, "unsure", None, None),
        ("given", "cat", "given", None, "cat"),
    ]
    columns = dict(zip(["name", "label", "origin", "guess"], zip(*rows, strict=True), strict=False))
    write = pa.csv.write_csv if suffix == "csv" else pq.write_table
    write(
        pa.table({title: [*cells] for title, cells in columns.items()}), path := tmp_path / f"rest.{suffix}"
    )
    table = read_table(str(path), False)
    assert {name: entry.given for name, entry in table.items()} == {row[0]: row[-1] for row in rows}
    for name, _, origin, _, given in rows:
        is_new = given == "dog"
        assert table[name].origin == ("corrected" if is_new else origin)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_several_labels_that_are_not_the_guess_were_given(tmp_path, suffix):
    labels = [["sea", "sky"], ["sea"], [], [], ["sky"]]
    guesses = [["sea", "sky"], ["sea", "sky"], [], ["sea"], []]
    if suffix == "csv":
        labels, guesses = ([";".join(each) or ";" for each in column] for column in (labels, guesses))
    columns = {"name": [*"abcde"], "label": labels, "origin": ["guessed"] * 5, "guess": guesses}
    write = pa.csv.write_csv if suffix == "csv" else pq.write_table
    write(pa.table(columns), path := tmp_path / f"rest.{suffix}")
    given = [entry.given for entry in read_table(str(path), True).values()]
    assert [each and [*filter(None, each)] for each in given] == [None, ["sea"], None, [], ["sky"]]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_guesses_are_no_labels(tmp_path, caplog, suffix):
    write_folder(tmp_path / "images")
    columns = {"name": ["cat/a.b.png", "cat/é.jpg"], "label": ["cat", "dog"], "origin": ["chosen", "guessed"]}
    write = pa.csv.write_csv if suffix == "csv" else pq.write_table
    write(pa.table(columns), path := tmp_path / f"rest.{suffix}")
    caplog.set_level("INFO", "dino_vit")
    images = open_source(str(tmp_path / "images"), path)
    assert images.labels.names == ("cat",)
    assert (images.codes() >= 0).sum() == 1
    assert f"labels for 1 of {len(images)} images; 1 guess of predict in it are no labels" in caplog.text
    write(pa.table(columns | {"guess": [None, "cat"]}), path)
    images = open_source(str(tmp_path / "images"), path)
    assert images.labels.names == ("cat", "dog")
    assert f"labels for 2 of {len(images)} images, 1 corrected guess among them" in caplog.text
    write(pa.table(columns | {"origin": ["guessed"] * 2}), path)
    with pytest.raises(ValueError, match="has a label for none of them: they are guesses of predict"):
        open_source(str(tmp_path / "images"), path)
    if suffix == "csv":  # a list of images, too
        path.rename(tmp_path / "images" / "list.csv")
        assert open_source(str(tmp_path / "images" / "list.csv")).labels.names == ()

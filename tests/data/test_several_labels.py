"""Labels of two forms, from real files: one class an image, or several labels where they are asked for."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dino_vit.cli import main
from dino_vit.data.labels import alike_names
from dino_vit.data.open import open_source
from dino_vit.data.stores.calls import wrap
from tests.support.images import saved

PNG = saved(Image.new("RGB", (8, 8)), "PNG")


def found(images):
    """Return the names of labels, and what is to be predicted of the images that have some."""
    codes = images.codes()
    return images.labels.names, images.labels.values(codes[codes >= 0]).tolist()


@pytest.fixture
def read(tmp_path):
    """Read labels of images a.png, b.png, ... from a file."""
    for name in "abcde":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")

    def read(text, name="labels.csv", **settings):
        (tmp_path / name).write_text(text)
        return open_source(f"{tmp_path}/*.png", tmp_path / name, **settings)

    return read


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("a;b,a;b,a;B,,", "2.0 on average of 3: B, a, b"),
        ("a,b,c,c,", "4 images, 3 classes: a, b, c"),
    ],
)
def test_labels_are_described(read, labels, said):
    rows = zip("abcde", labels.split(","), strict=True)
    images = read("".join(f"{name}.png,{label}\n" for name, label in rows), several=";" in labels)
    codes = images.codes()
    assert images.labels.describe(codes[codes >= 0]).endswith(said)


def test_names_that_may_be_the_same_are_named():
    assert alike_names(["cat", "dog"]) == []
    assert alike_names(["Rose", "cat", "rose"]) == ["perhaps the same but for capital letters: Rose, rose"]


@pytest.mark.parametrize(
    ("text", "names", "values"),
    [
        ("a.png,cat\nb.png,dog\n", ("cat", "dog"), [0, 1]),
        ("a.png,3\nb.png,10\nc.png,3.0\n", ("3", "3.0", "10"), [0, 2, 1]),
        ("a.png,0.0\nb.png,1.0\n", ("0.0", "1.0"), [0, 1]),  # pandas, where some have none
        ("a.png,3\nb.png,2.5\nc.png,nan\nd.png,-1e2\n", ("-1e2", "2.5", "3"), [2, 1, 0]),
        ("path,age\na.png,3.5\nb.png,4\n", ("3.5", "4"), [0, 1]),
        ("a.png,sea;sky\nb.png,;\nc.png,sky\n", (";", "sea;sky", "sky"), [1, 0, 2]),
    ],
)
def test_a_cell_is_a_class(read, text, names, values):
    images = read(text)
    assert (images.labels.task, *found(images)) == ("multiclass", names, values)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.png,sea; sky\nb.png,;\nc.png,sky\nd.png,\n", [[1, 1], [0, 0], [0, 1]]),
        ("a.png,-1;sea\nb.png,sky; NaN\nc.png,-1\nd.png,NaN\n", [[1, 0], [0, 1]]),
        ("a.png,sea\nb.png,sky\n", [[1, 0], [0, 1]]),
    ],
)
def test_a_cell_has_several_labels_where_they_are_asked_for(read, tmp_path, text, values):
    images = read(text, several=True)
    assert (images.labels.task, *found(images)) == ("multilabel", ("sea", "sky"), values)
    assert found(open_source(str(tmp_path / "labels.csv"), several=True)) == found(images)
    assert open_source(str(tmp_path / "labels.csv")).labels.task == "multiclass"


def test_several_is_about_cells(tmp_path):
    with pytest.raises(ValueError, match=r"several=true is about a file of labels or a list of images"):
        open_source(str(tmp_path), several=True)


@pytest.mark.parametrize("folders", [("0.5", "1.5"), ("-1", "nan"), ("a;b", "c;d")])
def test_the_name_of_a_folder_is_a_class_whatever_it_is(tmp_path, folders):
    for folder in folders:
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "1.png")
    assert found(open_source(str(tmp_path))) == (folders, [0, 1])


def test_lists_are_several_labels(read, tmp_path):
    labels = {"a.png": ["sky", "sea"], "b.png": [], "c.png": ["sky"], "d.png": None, "e.png": ""}
    images = read(json.dumps(labels), "labels.json")
    assert np.flatnonzero(images.codes() >= 0).tolist() == [0, 1, 2]
    assert found(images) == (("sea", "sky"), [[1, 1], [0, 0], [0, 1]])
    assert [images.labels.names_of(images.label(row)) for row in range(3)] == [["sea", "sky"], [], ["sky"]]
    table = pa.table({"image": [PNG] * 4, "tags": list(labels.values())[:4]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert found(open_source(str(tmp_path / "a.parquet"))) == found(images)


def test_lists_of_a_hugging_face_dataset_are_named(tmp_path):
    image = {"bytes": PNG, "path": None}
    columns = {"image": [image] * 3, "labels": [[2, 0], [], [2]]}
    names = datasets.ClassLabel(names=["sea", "land", "sky"])
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    rows = rows.cast_column("labels", datasets.Sequence(names))
    rows.to_parquet(tmp_path / "rows.parquet")
    for source in (wrap(rows), open_source(str(tmp_path / "rows.parquet"))):
        assert found(source) == (("sea", "sky"), [[1, 1], [0, 0], [0, 1]])


def test_a_0_or_1_for_each_class_is_several_labels():
    class MultiHot(list):
        classes, targets = ("sea", "land", "sky"), ([1, 0, 1], [0, 0, 0])

    images = wrap(MultiHot([Image.new("RGB", (8, 8))] * 2))
    assert found(images) == (("sea", "sky"), [[1, 1], [0, 0]])
    del MultiHot.classes
    with pytest.raises(ValueError, match="is a 0 or 1 for each label, without the names"):
        wrap(MultiHot([Image.new("RGB", (8, 8))] * 2))


def test_packed_images_have_several_labels(read, tmp_path):
    images = read("a.png,sea;sky\nb.png,;\nc.png,sky\n", several=True)
    argv = ["pack", f"{tmp_path}/*.png", f"{tmp_path}/out", f"labels={tmp_path}/labels.csv", "several=true"]
    assert main(argv) == 0
    packed = open_source(str(tmp_path / "out"))
    assert packed.codes().tolist() == [1, 0, 2, -1, -1]
    assert found(packed) == found(images)
    (tmp_path / "out" / "catalogue.arrow").unlink()
    assert found(open_source(str(tmp_path / "out"))) == found(images)

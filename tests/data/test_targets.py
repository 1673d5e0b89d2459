"""Labels of two forms, from real files: one class an image, or several labels."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dino_vit.data.custom import wrap
from dino_vit.data.sources.open import open_source
from dino_vit.data.targets import doubts_about, read_targets
from tests.support.images import saved

PNG = saved(Image.new("RGB", (8, 8)), "PNG")


@pytest.fixture
def read(tmp_path):
    """Read the targets of images a.png, b.png, ... by a file of labels."""
    for name in "abcde":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")

    def read(text, name="labels.csv", **settings):
        (tmp_path / name).write_text(text)
        return read_targets(open_source(f"{tmp_path}/*.png", tmp_path / name), **settings)

    return read


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("three,three,two,two,thre", "; with a single image, perhaps mistyped: thre (three?)"),
        ("x,x,y,y,bird", "; with a single image, perhaps mistyped: bird"),
        ("a;b,a;b,a;bb,,", "; with a single image, perhaps mistyped: bb (b?)"),
        ("a,b,c,c,", "4 images, 3 classes: a, b, c"),
    ],
)
def test_labels_that_may_be_typing_errors_are_named(read, labels, said):
    rows = zip("abcde", labels.split(","), strict=True)
    assert str(read("".join(f"{name}.png,{label}\n" for name, label in rows))).endswith(said)


def test_folders_that_differ_by_capital_letters_are_named():
    """In a file of labels they are refused."""
    assert list(doubts_about({"Cat": 1, "cat": 2})) == ["perhaps the same but for capital letters: Cat, cat"]


@pytest.mark.parametrize(
    ("text", "task", "names", "values"),
    [
        ("a.png,cat\nb.png,dog\n", "multiclass", ("cat", "dog"), [0, 1]),
        ("a.png,3\nb.png,10\nc.png,3.0\n", "multiclass", ("3", "3.0", "10"), [0, 2, 1]),
        ("a.png,0.0\nb.png,1.0\n", "multiclass", ("0.0", "1.0"), [0, 1]),  # pandas, where some have none
        (
            "a.png,sea; sky\nb.png,;\nc.png,sky\nd.png,\n",
            "multilabel",
            ("sea", "sky"),
            [[1, 1], [0, 0], [0, 1]],
        ),
        ("a.png,-1;sea\nb.png,sky; NaN\n", "multilabel", ("sea", "sky"), [[1, 0], [0, 1]]),
        ("a.png,3\nb.png,2.5\nc.png,nan\nd.png,-1e2\n", "multiclass", ("-1e2", "2.5", "3"), [2, 1, 0]),
        ("path,age\na.png,3.5\nb.png,4\n", "multiclass", ("3.5", "4"), [0, 1]),
    ],
)
def test_a_table_says_classes_or_several_labels(read, text, task, names, values):
    targets = read(text)
    assert (targets.task, targets.names) == (task, names)
    assert targets.values.tolist() == values
    begin = {"multiclass": "one class for", "multilabel": "several labels for"}
    assert str(targets).startswith(f"{begin[task]} each of {len(values)} image")
    assert f": {', '.join(names)}" in str(targets)


def test_other_columns_are_not_guessed_to_be_labels(read):
    for text, said in {
        "path,age,split\na.png,3.5,train\nb.png,2,test\n": "its columns are path, age, split; name one",
        "path,age,height\na.png,3,1.5\nb.png,4,2\n": "in the first line, as in 'path,label,height'",
    }.items():
        with pytest.raises(ValueError, match=said):
            read(text)


@pytest.mark.parametrize(
    "rows", ["a.png,0,1\nb.png,0,0", "a.png,0.0,1.0\nb.png,1.0,0.0", "a.png,0,1\nb.png,,nan"]
)
def test_columns_of_0_and_1_are_no_labels(read, tmp_path, rows, caplog):
    """Also as pandas writes them where a cell was empty. They may be flags: images are read."""
    said = "the columns sea, sky, which have only 0 and 1; write the labels of an image in one"
    with pytest.raises(ValueError, match=said):
        read(f"path,sea,sky\n{rows}\n")
    assert open_source(f"{tmp_path}/labels.csv").classes == []
    assert said in caplog.text


def test_a_task_reads_labels_otherwise_than_they_look(read):
    assert read("a.png,x;y\nb.png,x\n", task="multiclass").names == ("x", "x;y")
    assert read("a.png,x\nb.png,y\n", task="multilabel").values.tolist() == [[1, 0], [0, 1]]


def test_folders_named_as_numbers_are_classes(tmp_path):
    for number, folder in enumerate(("0.5", "1.5", "1.5")):
        (tmp_path / folder).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / f"{number}.png")
    targets = read_targets(open_source(str(tmp_path)))
    assert (targets.task, targets.names) == ("multiclass", ("0.5", "1.5"))
    assert targets.values.tolist() == [0, 1, 1]


def test_lists_are_several_labels(read, tmp_path):
    labels = {"a.png": ["sky", "sea"], "b.png": [], "c.png": ["sky"], "d.png": None}
    targets = read(json.dumps(labels), "labels.json")
    assert targets.indices.tolist() == [0, 1, 2]
    assert targets.values.tolist() == [[1, 1], [0, 0], [0, 1]]
    table = pa.table({"image": [PNG] * 4, "tags": list(labels.values())})
    pq.write_table(table, tmp_path / "a.parquet")
    stored = read_targets(open_source(str(tmp_path / "a.parquet")))
    assert stored.names == targets.names == ("sea", "sky")
    assert stored.values.tolist() == targets.values.tolist()


def test_lists_of_a_hugging_face_dataset_are_named(tmp_path):
    image = {"bytes": PNG, "path": None}
    columns = {"image": [image] * 3, "labels": [[2, 0], [], [2]]}
    names = datasets.ClassLabel(names=["sea", "land", "sky"])
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    rows = rows.cast_column("labels", datasets.Sequence(names))
    rows.to_parquet(tmp_path / "rows.parquet")
    for source in (wrap(rows), open_source(str(tmp_path / "rows.parquet"))):
        targets = read_targets(source)
        assert targets.names == ("sea", "sky")
        assert targets.values.tolist() == [[1, 1], [0, 0], [0, 1]]


def test_a_0_or_1_for_each_class_is_several_labels():
    class MultiHot(list):
        classes, targets = ("sea", "land", "sky"), ([1, 0, 1], [0, 0, 0])

    targets = read_targets(wrap(MultiHot([Image.new("RGB", (8, 8))] * 2)))
    assert (targets.names, targets.values.tolist()) == (("sea", "sky"), [[1, 1], [0, 0]])
    del MultiHot.classes
    with pytest.raises(ValueError, match="is a 0 or 1 for each label, without the names"):
        read_targets(wrap(MultiHot([Image.new("RGB", (8, 8))] * 2)))

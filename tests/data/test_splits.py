import zipfile

import pytest

from dino_vit.data.labels import folder_labels, join_labels
from dino_vit.data.sources.open import open_source
from dino_vit.data.splits import are_splits, choose_splits, describe_use, find_splits
from tests.support.images import write_classes


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
    assert are_splits(folders) == splits


def test_labels_are_the_folders_in_the_splits():
    names = [b"set/test/cat/1", b"set/test/dog/1", b"set/train/cat/2", b"set/train/dog/x/3", b"set/train/4"]
    found = folder_labels(names)
    assert found.classes == ["cat", "dog"]
    assert found.numbers.tolist() == [0, 1, 0, 1, -1]
    assert find_splits(name[4:] for name in names) == {"test": (0, 2), "train": (2, 5)}
    assert folder_labels([b"cat/1", b"train/1"]).classes == ["cat", "train"]


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "photos"
    write_classes(root / "train", "ab", 4)
    write_classes(root / "val", "ab", 2, first=20)
    write_classes(root / "test", "ab", 1, first=40)
    return root


def test_a_folder_and_a_zip_have_the_same_splits(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for path in folder.rglob("*.png"):
            archive.write(path, path.relative_to(tmp_path))
    for source in (open_source(str(folder)), open_source(str(tmp_path / "photos.zip"))):
        assert {name: len(places) for name, places in source.splits.items()} == {
            "test": 2,
            "train": 8,
            "val": 4,
        }
        for name, places in source.splits.items():
            assert all(f"{name}/" in source.name(index) for index in places)
        assert source.classes == ["a", "b"]
        chosen = choose_splits(source)
        assert (chosen.train, chosen.held_out) == ("train", "val")
        assert describe_use(source, chosen, "photos") == (
            "photos has the splits test (2 images), train (8 images), val (4 images): "
            "val is classified from train"
        )


def test_a_split_without_labels_is_passed_over(folder, tmp_path):
    for number, path in enumerate(sorted((folder / "val").rglob("*.png"))):
        path.rename(folder / "val" / f"{number}.png")
    source = open_source(str(folder))
    assert choose_splits(source).held_out == "test"
    labels = tmp_path / "labels.csv"
    names = [source.name(index) for index in range(len(source))]
    labels.write_text("".join(f"{name},{number % 2}\n" for number, name in enumerate(names)))
    assert choose_splits(join_labels(source, labels)).held_out == "val"


def test_one_split_alone_is_a_set(folder):
    assert not open_source(str(folder / "train")).splits
    assert choose_splits(open_source("synthetic:20:16")) is None

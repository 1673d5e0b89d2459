import os
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from dino_vit.config.commands import SupervisedConfig
from dino_vit.data.label_files import join_labels
from dino_vit.data.open import open_source
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.sets import choose_splits, open_sets, open_subset
from tests.support.images import write_classes


def sets_of(source, **settings):
    return open_sets(SupervisedConfig(source=source, **settings))


@pytest.fixture
def folder(tmp_path):
    def make(name, classes):
        return str(write_classes(tmp_path / name, classes, 3))

    return make


def test_one_set_is_split_by_the_seed():
    whole = make_textures(length=103)
    train, val = sets_of("synthetic:103:32", seed=1)
    assert train.classes == val.classes == whole.labels.names
    assert (len(train), len(val)) == (83, 20)
    assert sorted([*train.indices, *val.indices]) == list(range(103))
    for part in (train, val):
        assert list(part.indices) == sorted(part.indices)
        assert part.targets.tolist() == [index % 10 for index in part.indices]
    assert len(set(val.targets.tolist())) > 5, "not a run of a sorted set"
    again, other = (sets_of("synthetic:103:32", seed=seed)[1] for seed in (1, 2))
    assert again.indices.tolist() == val.indices.tolist() != other.indices.tolist()


def test_a_split_without_labels_is_passed_over(folder, tmp_path):
    for split in ("train", "val", "test"):
        folder(f"photos/{split}", "ab")
    val = tmp_path / "photos" / "val"
    for number, path in enumerate(sorted(val.rglob("*.png"))):
        path.rename(val / f"{number}.png")
    source = open_source(str(tmp_path / "photos"))
    assert choose_splits(source)[1] == "test"
    labels = tmp_path / "labels.csv"
    names = [source.name(index) for index in range(len(source))]
    labels.write_text("".join(f"{name},{number % 2}\n" for number, name in enumerate(names)))
    assert choose_splits(join_labels(source, labels))[1] == "val"


def test_splits_are_the_sets(folder, tmp_path, caplog):
    for split in ("train", "test"):
        folder(f"photos/{split}", "ab")
    with caplog.at_level("INFO"):
        train, val = sets_of(str(tmp_path / "photos"))
    assert (len(train), len(val), val.classes) == (6, 6, ("a", "b"))
    for subset, split in ((train, "train"), (val, "test")):
        assert {subset.source.name(index)[: len(split)] for index in subset.indices} == {split}
        assert subset.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert "has the splits test (6 images), train (6 images): test is evaluated against train" in caplog.text
    folder("photos/test", "c")
    with pytest.raises(ValueError, match=r"photos/test has classes that are not among the 2 .*: c\."):
        sets_of(str(tmp_path / "photos"))


def test_a_part_is_a_source_of_its_images_alone():
    train, val = sets_of("synthetic:50:32")
    images = val.images
    names = [val.source.name(index) for index in val.indices]
    assert [images.name(index) for index in range(len(images))] == names
    assert [images.label(place) for place in range(10)] == val.targets.tolist()
    relabelled = replace(val, targets=val.targets[::-1].copy())
    prints = {each.fingerprint for each in (val, train, val.source, relabelled)}
    assert len(prints) == 4


def test_sets_that_cannot_be_classified_are_refused(folder, tmp_path):
    two, same = folder("two", "ab"), tmp_path / "same.csv"
    same.write_text("".join(f"{label}/{number}.png,a\n" for label in "ab" for number in range(3)))
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "flat" / "x.png")
    with pytest.raises(ValueError, match="of one class, a; two or more are needed"):
        sets_of(folder("other", "ab"), train=two, train_labels=str(same))
    with pytest.raises(ValueError, match="are of one class"):
        sets_of(two, labels=str(same))
    with pytest.raises(ValueError, match=r"none of the 1 images of .*flat has a label; .* labels=FILE"):
        sets_of(str(tmp_path / "flat"))
    with pytest.raises(ValueError, match="not among the 2 of the training set: c"):
        sets_of(folder("three", "abc"), train=two)


def test_labels_of_two_sources_are_those_of_the_same_name(folder, tmp_path):
    train, val = sets_of(folder("letters", "bc"), train=folder("more", "abc"))
    names = ["".join(each.classes[code] for code in each.targets) for each in (train, val)]
    assert names == ["aaabbbccc", "bbbccc"]
    photos, labels = folder("photos", "a"), tmp_path / "several.csv"
    labels.write_text("a/0.png,d;b\na/1.png,;\na/2.png,c\n")
    train, val = sets_of(photos, labels=str(labels), several=True, train=folder("two", "bc"))
    assert train.classes == val.classes == ("b", "c", "d")
    names = [
        [{each.classes[code] for code in row.nonzero()[0]} for row in each.targets] for each in (train, val)
    ]
    assert names == [[{"b"}] * 3 + [{"c"}] * 3, [{"b", "d"}, set(), {"c"}]]


SPELLINGS = {
    "alike": "hard",
    "by a dot": "./hard",
    "with a slash": "hard/",
    "whole": "{root}/hard",
    "by a link": "link",
    "as links": "links",
    "as a list": "hard.txt",
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_images_to_learn_from_are_no_images_to_judge_by_however_they_are_spelt(
    folder, tmp_path, monkeypatch, kind
):
    monkeypatch.chdir(tmp_path)
    folder("hard", "ab")
    (tmp_path / "link").symlink_to("hard")
    paths = sorted((tmp_path / "hard").rglob("*.png"))
    for path in paths:
        link = tmp_path / "links" / path.relative_to(tmp_path / "hard")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    (tmp_path / "hard.txt").write_text("".join(f"{path},{path.parent.name}\n" for path in paths))
    with pytest.raises(ValueError, match=r"all 6 images of hard are in train=.* too"):
        sets_of("hard", train=SPELLINGS[kind].format(root=tmp_path))


def test_images_of_two_splits_are_counted_too(folder, tmp_path, caplog):
    for split in ("train", "val"):
        folder(f"photos/{split}", "ab")
    photos = str(tmp_path / "photos")
    os.link(f"{photos}/val/a/0.png", f"{photos}/train/a/from-val.png")
    sets_of(photos)
    assert f"1 of the 6 images of {photos}/val are in {photos}/train too: the acc" in caplog.text
    for path in Path(photos, "val").rglob("*.png"):
        os.link(path, f"{photos}/train/a/{path.parent.name}{path.name}")
    with pytest.raises(ValueError, match=r"all 6 images of .*/val are in .*/train too; give other images$"):
        sets_of(photos)


def test_a_fifth_of_few_images_leaves_two_classes_to_learn_from(folder, tmp_path):
    images = Path(folder("images", "ab"))
    for path in sorted(images.rglob("*.png"))[1:5]:
        path.unlink()
    with pytest.raises(ValueError, match=r"all labelled images of the rest of .* are of one class"):
        sets_of(str(images))


def test_classes_that_may_be_the_same_are_a_warning(folder, tmp_path, caplog):
    (tmp_path / "labels.csv").write_text("".join(f"a/{n}.png,{'Rr'[n % 2]}ose\n" for n in range(3)))
    open_subset("photos", open_source(folder("photos", "a"), tmp_path / "labels.csv"))
    (warned,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warned == "labels of photos perhaps the same but for capital letters: Rose, rose"

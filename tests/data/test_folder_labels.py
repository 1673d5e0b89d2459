"""Subfolders that are taken as labels: every command says so, and labels=none is how they are not."""

import pytest

import dino_vit
from dino_vit.config.commands import KnnConfig
from dino_vit.data.open import open_source
from dino_vit.eval.sets import open_sets
from tests.support.image_sets import write_zip
from tests.support.images import write_synthetic
from tests.support.training import opened

SAID = "subfolders are taken as labels: day1, day2"


@pytest.fixture
def photos(tmp_path, caplog):
    """Photos of two days, and the log."""
    caplog.set_level("INFO", "dino_vit")
    for number in range(12):
        write_synthetic(tmp_path / "photos" / f"day{number // 6 + 1}" / f"{number}.png", number)
    return tmp_path / "photos"


def said(caplog):
    """Return how often it was said, and forget it."""
    count = caplog.text.count(SAID)
    caplog.clear()
    return count


def test_it_is_said_where_they_are_taken(photos, tmp_path, caplog):
    assert open_source(str(photos)).labels.names == ("day1", "day2")
    assert f"{SAID} (if they are not: labels=none, in pretrain data.labels=none)" in caplog.messages
    caplog.clear()
    files = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in photos.glob("*/*")}
    for spec in (str(write_zip(tmp_path / "a.zip", files)), [str(photos), "synthetic:4"], f"{photos}/*/*"):
        open_source(spec)
        assert "subfolders are taken as labels: " in caplog.text
        caplog.clear()
        source = open_source(spec, "none")
        assert (source.labels.names, source.codes().max(), caplog.text) == ((), -1, "")
    (tmp_path / "labels.csv").write_text("name,label\nday1/0.png,coin\n")
    assert open_source(str(photos), tmp_path / "labels.csv").labels.names == ("coin",)
    assert not said(caplog), "a given file needs no word"


def test_classes_that_are_stated_are_no_subfolders(photos, tmp_path, caplog):
    dino_vit.pack(photos, tmp_path / "packed")
    assert said(caplog) == 1
    assert open_source(str(tmp_path / "packed")).labels.names == ("day1", "day2")
    assert not said(caplog)
    dino_vit.pack(photos, tmp_path / "plain", labels="none")
    assert open_source(str(tmp_path / "plain")).labels.names == ()
    assert not said(caplog)


def test_archives_that_are_catalogued_have_those_of_their_folders(photos, tmp_path, caplog):
    files = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in photos.glob("*/*")}
    (tmp_path / "zips").mkdir()
    write_zip(tmp_path / "zips" / "a.zip", files)
    dino_vit.pack(tmp_path / "zips", index_only=True)
    open_source(str(tmp_path / "zips"))
    assert said(caplog) == 1


def test_a_run_says_it(photos, tmp_path, caplog):
    state = opened(tmp_path / "run", {"data.source": photos, "data.batch_size": 4})
    assert said(caplog) == 1
    assert state.evaluations.online.has_labels
    settings = {"data.source": photos, "data.batch_size": 4, "data.labels": "none"}
    assert not opened(tmp_path / "other", settings).evaluations.online.has_labels
    assert not said(caplog)
    both = {**settings, "data.source": f"[{photos}, {photos}]"}
    assert not opened(tmp_path / "both", both).evaluations.online.has_labels


def test_evaluators_say_it_of_each_of_their_sources(photos, tmp_path, caplog):
    write_synthetic(tmp_path / "train" / "day1" / "a.png", 1)
    write_synthetic(tmp_path / "train" / "day2" / "a.png", 2)
    open_sets(KnnConfig(source=str(photos), weights="pixels", train=str(tmp_path / "train")))
    assert said(caplog) == 2
    with pytest.raises(ValueError, match=r"none of the 12 images .* has a label"):
        dino_vit.knn(photos, "pixels", labels="none")

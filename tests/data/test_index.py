import errno
import multiprocessing
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

import dino_vit.data.index
from dino_vit.core.cache import cache_folder
from dino_vit.data.index import IndexContents, open_index
from dino_vit.data.labels import encode_labels
from dino_vit.data.open import open_source
from dino_vit.data.stores.files import open_folder
from tests.support.image_sets import FILES, ORDER, write_folder, write_parquet, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("DINO_VIT_CACHE", str(folder))
    monkeypatch.setattr(dino_vit.data.index, "SETTLED", 200_000_000)
    return folder


@pytest.fixture
def built(monkeypatch):
    """Counts how often an index is written."""
    times = []
    write = dino_vit.data.index._write
    monkeypatch.setattr(
        dino_vit.data.index, "_write", lambda file, items: times.append(0) or write(file, items)
    )
    return times


def age():
    """Let what is there be older than SETTLED: no call sets back when a file was changed."""
    time.sleep(0.3)


def test_an_index_is_built_once_and_again_when_the_folder_changes(tmp_path, built):
    write_folder(tmp_path)
    age()
    for _ in range(3):
        assert len(open_folder(tmp_path)) == 5
    assert len(built) == 1
    (tmp_path / "dog" / "deep" / "2.png").write_bytes(b"new")
    assert open_folder(tmp_path).read(4) == b"new"
    assert len(built) == 2
    before = open_folder(tmp_path).fingerprint
    (tmp_path / "dog" / "deep" / "2.png").unlink()
    assert len(open_folder(tmp_path)) == 5
    assert open_folder(tmp_path).fingerprint != before


def test_what_was_just_written_is_looked_at_again(tmp_path, built):
    """A change within the clock's resolution leaves the time of a file as it was."""
    write_folder(tmp_path)
    for number in (1, 2):
        open_folder(tmp_path)
        assert len(built) == number


def test_names_of_classes_beside_shards_are_part_of_what_is_indexed(tmp_path):
    write_tar(tmp_path / "a.tar", {"1.png": b"1", "1.cls": b"1"})
    age()
    assert open_source(str(tmp_path / "a.tar")).labels.names == ("1",)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert open_source(str(tmp_path / "a.tar")).labels.names == ("dog",)
    (tmp_path / "classes.txt").write_text("cat\nbee\n")
    assert open_source(str(tmp_path / "a.tar")).labels.names == ("bee",)


def test_the_cache_is_where_the_variables_say(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value, folder in (
        ("DINO_VIT_CACHE", "~/own", tmp_path / "own"),
        ("XDG_CACHE_HOME", "/other", Path("/other/dino-vit")),
        ("XDG_CACHE_HOME", "", tmp_path / ".cache/dino-vit"),
    ):
        monkeypatch.delenv("DINO_VIT_CACHE", raising=False)
        monkeypatch.setenv(name, value)
        assert cache_folder() == folder


def test_truncated_indices_are_built_anew(tmp_path, cache, caplog):
    write_folder(tmp_path)
    age()
    open_folder(tmp_path)
    (path,) = cache.glob("*.arrow")
    whole = path.read_bytes()
    for data in (b"", b"?", whole[:100], whole[:-1], whole[: len(whole) // 2], b"x" * len(whole)):
        path.write_bytes(data)
        source = open_folder(tmp_path)
        assert [source.full_name(index) for index in range(5)] == ORDER
        assert source.read(2) == FILES[ORDER[2]]
    assert caplog.text.count("is damaged and will be rebuilt") == 12  # before the lock and under it
    assert sorted(p.suffix for p in cache.iterdir()) == [".arrow", ".lock"]


def test_where_nothing_can_be_written_it_is_said_what_to_do(tmp_path, cache, monkeypatch):
    place = cache / "below"
    place.write_text("")
    monkeypatch.setenv("DINO_VIT_CACHE", str(place))
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"the index of .*a\.parquet cannot be written: .*DINO_VIT_CACHE"):
        open_source(str(tmp_path / "a.parquet"))


def test_files_of_references_whose_templates_are_programs_are_not_read():
    with pytest.raises(ValueError, match="is a file of references, which are not read"):
        open_source("reference://::file:///tmp/references.json")


def test_where_nothing_can_be_locked_an_index_is_built_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    write_folder(tmp_path)
    monkeypatch.setattr(dino_vit.data.index.fcntl, "flock", refuse)
    assert len(open_folder(tmp_path)) == 5


def test_pickles_are_small_and_refuse_another_index(tmp_path):
    for number in range(300):
        (tmp_path / f"{number:03d}.png").write_bytes(b"x")
    source = open_folder(tmp_path)
    pickled = pickle.dumps(source)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).name(299) == "299.png"
    (tmp_path / "new.png").write_bytes(b"x")
    open_folder(tmp_path)
    with pytest.raises(ValueError, match=r"was rebuilt while .* start again"):
        pickle.loads(pickled)


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.01)


def open_slowly(folder):
    """Build an index until there is a file `go`; said by files, as what is killed may hold a queue."""

    def build(write_images, signatures):
        (folder / f"building-{os.getpid()}").touch()
        until((folder / "go").exists)
        labels = encode_labels([None])
        return IndexContents(names=[b"a"], sizes=np.ones(1, np.int64), labels=labels)

    assert open_index("test", str(folder), build, [str(folder / "missing")]).name(0) == "a"


def builders(folder):
    return len(list(folder.glob("building-*")))


def test_one_process_builds_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=open_slowly, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    until(lambda: builders(tmp_path))
    time.sleep(0.3)
    (tmp_path / "go").touch()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert builders(tmp_path) == 1

"""Archives with a catalogue: the same images as without one, and no change of an archive goes unnoticed."""

import os
import pickle
import shutil

import numpy as np
import pytest

import dino_vit
from dino_vit.cli import main
from dino_vit.data.catalogue import Catalogue
from dino_vit.data.open import open_source
from dino_vit.data.shards import ChangedFile
from dino_vit.views.sampler import WindowOrder
from tests.support.image_sets import FILES, ORDER, items, write_folder, write_tar, write_zip
from tests.support.processes import command_in_two
from tests.support.remote import serving, write_shards

SORTED = {name: FILES[name] for name in ORDER}
SPLITS = {f"set/{split}/{name}": FILES[name] for split in ("train", "val") for name in ORDER}
LABELS = {"a.png": b"1", "a.cls": b"10", "b.png": b"2", "b.json": b'{"label": 9}', "c.png": b"3"}


def write_archives(folder, files, count=2, suffix=".tar"):
    """Write files into archives, as many in each, in their order."""
    folder.mkdir()
    names = list(files)
    for number in range(count):
        part = names[number * len(names) // count : (number + 1) * len(names) // count]
        write = write_tar if suffix == ".tar" else write_zip
        write(folder / f"{number:03d}{suffix}", {name: files[name] for name in part})
    return folder


def catalogue(folder):
    assert main(["pack", str(folder), "index_only=true"]) == 0
    source = open_source(str(folder))
    assert isinstance(source.store.index, Catalogue)
    return source


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
@pytest.mark.parametrize("files", [SORTED, SPLITS, {**SORTED, "z.png": b"z"}])
def test_a_source_with_a_catalogue_is_the_source_without(tmp_path, files, suffix):
    plain = open_source(str(write_archives(tmp_path / "plain", files, suffix=suffix)))
    source = catalogue(write_archives(tmp_path / "set", files, suffix=suffix))
    for each in (
        source,
        pickle.loads(pickle.dumps(source)),
        open_source(str(tmp_path / "set" / f"*{suffix}")),
    ):
        assert list(items(each)) == list(items(plain))
        assert (each.labels.names, each.split_sizes()) == (plain.labels.names, plain.split_sizes())
        assert each.fingerprint == plain.fingerprint
        for some in (np.random.default_rng(0).permutation(len(plain)), [len(plain) - 1, 0, 0], []):
            assert each.codes(some).tolist() == plain.codes(some).tolist()
        assert (each.shards.starts == plain.shards.starts).all()
    shards = [[shard for shard, _ in each.origins()] for each in (source, plain)]
    assert [list(dict.fromkeys(each)).index(shard) for each in shards for shard in each] == [
        *2 * np.repeat(np.arange(2), np.diff(plain.shards.starts)).tolist()
    ]


def test_labels_beside_the_images_are_those_of_the_catalogue(tmp_path):
    plain = open_source(str(write_archives(tmp_path / "plain", LABELS, 1)))
    source = catalogue(write_archives(tmp_path / "set", LABELS, 1))
    assert source.labels.names == plain.labels.names == ("9", "10")
    assert [source.label(index) for index in range(3)] == [1, 0, None]


def test_so_many_names_that_they_are_not_compared_begin_with_their_archive(tmp_path, monkeypatch):
    monkeypatch.setattr("dino_vit.data.catalogue.FINGERPRINTED", 4)
    assert [*items(catalogue(write_archives(tmp_path / "sorted", SORTED)))] == [
        *items(open_source(str(write_folder(tmp_path / "folder", SORTED))))
    ]
    names = list(SORTED)
    files = {name: SORTED[name] for name in [*names[::2], *names[1::2]]}
    source = catalogue(write_archives(tmp_path / "set", files))
    shown = [source.name(index) for index in range(len(source))]
    assert shown == sorted(shown)
    contents = {name.partition("/")[2]: source.read(index) for index, name in enumerate(shown)}
    assert contents == {name.replace("\n", r"\n"): data for name, data in files.items()}
    assert {source.labels.names[source.label(index)] for index in range(5)} == {"cat", "dog", "dog-2"}
    assert len({source.fingerprint, open_source(str(tmp_path / "set" / "000.tar")).fingerprint}) == 2


def test_some_archives_of_a_folder_have_a_catalogue(tmp_path, capsys):
    folder = write_archives(tmp_path / "set", SORTED)
    shutil.copy(folder / "000.tar", folder / "val.tar")
    assert main(["pack", str(folder / "00*.tar"), "index_only=true"]) == 0
    source = open_source(str(folder / "00*.tar"))
    assert isinstance(source.store.index, Catalogue)
    assert len(source) == len(SORTED)
    shutil.copy(folder / "000.tar", folder / "002.tar")
    with pytest.raises(ChangedFile, match=r"1 archive changed, such as 002\.tar"):
        open_source(str(folder / "00*.tar"))
    assert main(["pack", str(tmp_path / "*" / "*.tar"), "index_only=true"]) == 2
    assert "is of several folders" in capsys.readouterr().err


def test_what_changes_after_it_was_catalogued_is_noticed(tmp_path):
    folder = write_archives(tmp_path / "set", SORTED)
    before = catalogue(folder)
    stamp = before.stamp
    os.utime(folder / "000.tar", (2e9, 2e9))
    assert open_source(str(folder)).read(0) == SORTED[ORDER[0]], "a later time is no change"
    assert open_source(str(folder)).stamp != stamp, "but may be one of an image"
    names = ORDER[: len(ORDER) // 2]
    write_tar(folder / "000.tar", {f"cow{name[3:]}": SORTED[name] for name in names})
    with pytest.raises(ChangedFile, match=r"000\.tar was changed.*index_only=true"):
        before.read(0)
    assert catalogue(folder).name(0).startswith("cow")
    write_tar(folder / "000.tar", {"cat/larger.png": bytes(20_000)})
    with pytest.raises(ChangedFile, match=r"1 archive changed, such as 000\.tar"):
        open_source(str(folder))
    catalogue(folder)
    shutil.copy(folder / "000.tar", folder / "002.tar")
    with pytest.raises(ChangedFile, match=r"1 archive changed, such as 002\.tar"):
        open_source(str(folder))
    (folder / "001.tar").unlink()
    (folder / "002.tar").unlink()
    with pytest.raises(ChangedFile, match=r"such as 001\.tar"):
        open_source(str(folder))


def test_names_of_classes_that_are_edited_are_noticed(tmp_path):
    dino_vit.pack("synthetic:6:16", tmp_path / "out", verbose=False)
    names = tmp_path / "out" / "classes.txt"
    assert "stripes" in open_source(str(tmp_path / "out")).labels.names
    names.write_text(names.read_text().replace("stripes", "renamed"))
    with pytest.raises(ChangedFile, match=r"classes\.txt"):
        open_source(str(tmp_path / "out"))
    assert "renamed" in catalogue(tmp_path / "out").labels.names


def test_an_index_and_a_catalogue_that_are_damaged_are_noticed(tmp_path):
    folder = write_archives(tmp_path / "set", SORTED)
    catalogue(folder)
    shutil.copy(folder / "001.tar.arrow", folder / "000.tar.arrow")
    with pytest.raises(ChangedFile, match=r"000\.tar\.arrow is not the one in the catalogue"):
        open_source(str(folder)).read(0)
    data = (folder / "catalogue.arrow").read_bytes()
    (folder / "catalogue.arrow").write_bytes(data[: len(data) // 2])
    with pytest.raises(ChangedFile, match=r"catalogue\.arrow is damaged"):
        open_source(str(folder))


def test_an_image_that_is_replaced_in_a_packed_shard_is_noticed(tmp_path):
    write_archives(tmp_path / "set", SORTED, 1)
    assert main(["pack", str(tmp_path / "set"), str(tmp_path / "packed")]) == 0
    path = tmp_path / "packed" / "000000.tar"
    source, data = open_source(str(tmp_path / "packed")), path.read_bytes()
    expected = source.read(0)
    path.write_bytes(data.replace(expected, expected[:-1] + b"?"))
    with pytest.raises(OSError, match="checksum"):
        source.read(0)
    assert source.read(1)


def test_shards_with_the_same_names_in_them_have_the_labels_in_these(tmp_path):
    files = {"cat/1.png": b"1", "dog/1.png": b"2"}
    for folder in ("plain", "set"):
        for number in range(2):
            write_tar(tmp_path / folder / f"{number}.tar", files)
    plain, source = open_source(str(tmp_path / "plain")), catalogue(tmp_path / "set")
    assert list(items(plain)) == list(items(source))
    assert [label for *_, label in items(plain)] == ["cat", "dog", "cat", "dog"]


def test_an_archive_without_images_is_one_of_those_in_the_catalogue(tmp_path):
    plain = write_archives(tmp_path / "plain", SORTED)
    folder = write_archives(tmp_path / "set", SORTED)
    write_tar(folder / "0005.tar", {"notes.txt": b"none"})
    source = catalogue(folder)
    assert list(items(source)) == list(items(open_source(str(plain))))
    assert source.fingerprint == open_source(str(plain)).fingerprint
    assert isinstance(open_source(str(folder / "{000,0005,001}.tar")).store.index, Catalogue)
    assert sorted(WindowOrder(source.shards.starts, 0, 2).take(0, 0, 5)) == [0, 1, 2, 3, 4]


def test_only_the_headers_of_a_remote_archive_are_requested(tmp_path):
    (tmp_path / "served").mkdir()
    write_tar(tmp_path / "served" / "a.tar", {f"{number}.png": bytes(300_000) for number in range(9)})
    with serving(tmp_path / "served") as server:
        assert len(open_source(f"{server.url}/a.tar")) == 9
        requested = sum(one.size for one in server.requests if one.method == "GET" and one.ranged)
    assert requested < 100_000


def test_a_remote_source_starts_from_its_catalogue(tmp_path):
    write_shards(tmp_path / "served", 4, 8)
    local = catalogue(tmp_path / "served")
    with serving(tmp_path / "served") as server:
        source = open_source(f"{server.url}/{{000..003}}.tar")
        assert isinstance(source.store.index, Catalogue)
        assert not server.requested()
        source.shards.folder = tmp_path / "copies"
        source.shards.copy(1)
        server.requests.clear()
        assert [source.read(index) for index in range(32)] == [local.read(index) for index in range(32)]
        assert server.requested() == {"000.tar", "002.tar", "003.tar"}
        shutil.copy(tmp_path / "served" / "000.tar", tmp_path / "served" / "003.tar")
        with pytest.raises(ChangedFile, match=r"003\.tar was changed"):
            open_source(f"{server.url}/{{000..003}}.tar").read(31)


def test_a_file_that_is_not_read_for_a_moment_is_asked_for_again(tmp_path):
    served = write_folder(tmp_path / "served", {f"{number}.png": b"image" for number in range(3)})
    with serving(served) as server:
        (served / "list.txt").write_text("".join(f"{server.url}/{number}.png\n" for number in range(3)))
        server.statuses |= {"list.txt": [503], "1.png": [503]}
        source = open_source(f"{server.url}/list.txt")
        assert [source.read(index) for index in range(3)] == [b"image"] * 3
        (served / "2.png").unlink()
        with pytest.raises(OSError, match="is not there or may not be read"):  # one of many
            source.read(2)


def test_two_processes_catalogue_what_one_does(tmp_path):
    for name in ("one", "two"):
        write_shards(tmp_path / name, 5, 4)
    expected = catalogue(tmp_path / "one")
    command_in_two(tmp_path / "log", "pack", tmp_path / "two", "index_only=true")
    source = open_source(str(tmp_path / "two"))
    assert list(items(source)) == list(items(expected))
    assert source.fingerprint == expected.fingerprint
    assert np.array_equal(source.shards.starts, expected.shards.starts)


def test_what_cannot_be_catalogued_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["pack", str(tmp_path / "empty"), "index_only=true"]) == 2
    assert "has no tar or zip archives" in capsys.readouterr().err
    write_shards(tmp_path / "splits", 1, 2)
    (tmp_path / "splits" / "000.tar").rename(tmp_path / "splits" / "train-0.tar")
    shutil.copy(tmp_path / "splits" / "train-0.tar", tmp_path / "splits" / "val-0.tar")
    assert main(["pack", str(tmp_path / "splits"), "index_only=true"]) == 2  # as without a catalogue
    assert "archives of several kinds or splits (train, val)" in capsys.readouterr().err
    assert main(["pack", str(tmp_path / "splits" / "train-*.tar"), "index_only=true"]) == 0
    assert len(open_source(str(tmp_path / "splits" / "train-*.tar"))) == 2
    folder = write_archives(tmp_path / "set", SORTED)
    assert main(["pack", str(folder), str(tmp_path / "out"), "index_only=true"]) == 2
    assert "index_only=true changes no archive; leave out output=" in capsys.readouterr().err
    assert main(["pack", str(folder)]) == 2
    assert "output is missing" in capsys.readouterr().err

import io
import os
import pickle
import subprocess
import tarfile
import zipfile

import pytest

from dino_vit.data.images.decode import read_image
from dino_vit.data.open import open_source
from dino_vit.data.shards import ChangedFile
from dino_vit.data.stores.ranges import list_members
from tests.support.image_sets import FILES, items, write_tar, write_zip

LONG = "deep/" * 60 + "x" * 120 + ".png"


def members(path):
    data = path.read_bytes()
    return {m.name: data[m.start : m.start + m.size] for m in list_members(str(path), io.BytesIO(data))}


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_are_found_where_the_standard_library_finds_them(tmp_path, format):
    contents = {**FILES, LONG: b"long", "empty.png": b"", "./dotted.png": b"dotted"}
    path = write_tar(tmp_path / "a.tar", contents, format=format)
    expected = {name.removeprefix("./").encode(): data for name, data in contents.items()}
    assert members(path) == expected


def test_what_gnu_tar_writes_is_read(tmp_path):
    (tmp_path / "in").mkdir()
    odd = b"odd \xff\n.png"
    with open(bytes(tmp_path / "in") + b"/" + odd, "wb") as file:
        file.write(b"odd")
    (tmp_path / "in" / "one.png").write_bytes(b"one")
    (tmp_path / "in" / "two.png").hardlink_to(tmp_path / "in" / "one.png")
    (tmp_path / "in" / "link.png").symlink_to("one.png")
    for kind in ("gnu", "posix"):
        path = tmp_path / f"{kind}.tar"
        command = ["tar", f"--format={kind}", "--sort=name", "-cf", path, "-C", tmp_path / "in", "."]
        subprocess.run(command, check=True)
        assert members(path) == {odd: b"odd", b"one.png": b"one", b"two.png": b"one"}
    source = open_source(str(path))
    assert [source.read(i) for i in range(3)] == [b"odd", b"one", b"one"]
    assert os.fsencode(source.full_name(0)) == odd


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:900], "unexpected end"),
        (lambda data: data[: len(data) // 2], "neither a header nor its end"),
        (lambda data: data[: data.rindex(b"\0" * 512) // 10240 * 10240 - 3000], "unexpected end"),
        (lambda data: data[:100], "truncated header"),
        (lambda data: data[:1536] + b"?" + data[1537:], "neither a header nor its end is at byte 1,536"),
        (lambda data: b"\x1f\x8b" + data[2:], "compressed as a whole"),
        (lambda data: b"?" + data[1:], "bad checksum"),
    ],
)
def test_broken_shards_are_errors_that_name_the_file(tmp_path, damage, said):
    path = write_tar(tmp_path / "shard.tar", {f"{n}.png": bytes([n]) * 700 for n in range(1, 40)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=said) as caught:
        open_source(str(path))
    assert str(path) in str(caught.value)


def test_labels_of_shards(tmp_path):
    def shard(number, contents):
        write_tar(tmp_path / f"{number:03d}.tar", contents)
        return open_source(str(tmp_path / f"{number:03d}.tar"))

    images = dict.fromkeys(("a.jpg", "b.jpg", "c.jpg", "d.jpg"), b"image")
    source = shard(0, {**images, "a.cls": b"10", "b.cls": b"9\n", "c.cls": b"10"})
    assert [source.label(i) for i in range(4)] == [1, 0, 1, None]
    assert source.labels.names == ("9", "10")
    source = shard(
        1, {"a.jpg": b"", "a.json": b'{"label": "cat", "width": 3}', "b.jpg": b"", "b.json": b"{}"}
    )
    assert [source.label(0), source.label(1), source.labels.names] == [0, None, ("cat",)]
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    source = shard(4, {**images, "a.cls": b"-1", "b.cls": b"1", "c.cls": b"-1", "d.cls": b"0"})
    assert [source.label(i) for i in range(4)] == [None, 1, None, 0]
    assert source.labels.names == ("cat", "dog")
    (tmp_path / "classes.txt").unlink()
    several = {
        "x/a.jpg": b"",
        "x/a.json": b'{"tags": ["sea", "sky"]}',
        "y/b.jpg": b"",
        "y/b.json": b'{"tags": []}',
    }
    source = shard(3, several)
    assert [source.labels.names_of(source.label(row)) for row in range(2)] == [["sea", "sky"], []]
    source = shard(2, {"top/dog/a.jpg": b"", "top/cat/b.jpg": b""})
    assert [source.name(0), source.label(0), source.labels.names] == ["top/cat/b.jpg", 0, ("cat", "dog")]
    write_tar(tmp_path / "bad.tar", {"a.jpg": b"", "a.json": b"{"})
    with pytest.raises(ValueError, match=r"bad\.tar: 'a\.json' is not valid JSON"):
        open_source(str(tmp_path / "bad.tar"))


@pytest.mark.parametrize("names", [["1.tar", "2.tar"], ["a/0.tar", "b/0.tar"]])
def test_a_name_in_several_shards_is_told_apart(tmp_path, names):
    for name in names:
        write_tar(tmp_path / name, {"1.png": name.encode()})
    source = open_source(str(tmp_path))
    found = [(source.name(index), source.read(index)) for index in range(2)]
    assert found == [(f"{name}/1.png", name.encode()) for name in names]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_zips_of_every_method(tmp_path, method):
    contents = {**FILES, "notes.txt": b"", "__MACOSX/._a.png": b""}
    source = open_source(str(write_zip(tmp_path / "a.zip", contents, method=method)))
    assert {name: data for name, data, _ in items(source)} == FILES
    assert pickle.loads(pickle.dumps(source)).read(0) == source.read(0)


def test_damaged_bytes_in_a_zip_are_an_error_of_that_image(tmp_path):
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        contents = {"a.png": b"a" * 1000, "b.png": b"b" * 1000}
        path = write_zip(tmp_path / f"{method}.zip", contents, method=method)
        data = bytearray(path.read_bytes())
        place = data.index(b"a.png") + 5
        data[place] ^= 0xFF
        path.write_bytes(data)
        source = open_source(str(path))
        with pytest.raises(OSError, match=r"checksum|decompressed"):
            source.read(0)
        assert source.read(1) == b"b" * 1000


def test_broken_and_encrypted_zips(tmp_path):
    path = write_zip(tmp_path / "a.zip")
    data = path.read_bytes()
    path.write_bytes(data[:-30])
    with pytest.raises(ValueError, match=r"a\.zip is damaged or not a zip"):
        open_source(str(path))
    locked = bytearray(data)
    locked[locked.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(locked)
    with pytest.raises(ValueError, match="encrypted"):
        open_source(str(path))


def test_a_later_time_is_no_change_of_an_archive_and_another_member_is(tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path)
    source = open_source(str(path))
    expected = [source.read(index) for index in range(len(source))]
    os.utime(path, (2e9, 2e9))
    assert [source.read(index) for index in range(len(source))] == expected
    with path.open("ab") as shard:
        shard.write(bytes(512))
    with pytest.raises(ChangedFile, match="start again to rebuild its index"):
        source.read(0)
    write_tar(path, {name.replace("cat/", "cow/"): data for name, data in FILES.items()})
    os.utime(path, (2.1e9, 2.1e9))
    for change in (lambda: None, path.unlink):
        change()
        with pytest.raises(ChangedFile, match=r"a\.tar was changed or removed after it was indexed"):
            read_image(source, 0)  # it ends a run, in which other images would stand in for unreadable ones

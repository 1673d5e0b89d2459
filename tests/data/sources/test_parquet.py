"""Images in Parquet files behind a real HTTP server with faults, and a real S3 protocol."""

import os
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dino_vit.data.sources import files, parquet
from dino_vit.data.sources.files import ChangedFile
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.parquet import ParquetShards
from tests.support.remote import serving, write_shards

pytest.importorskip("aiohttp", reason="fsspec reads HTTP with aiohttp: pip install 'dino-vit[remote]'")

COUNT, IMAGES = 3, 12


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "timeout_s", 4)
    monkeypatch.setattr(files, "MOST_REQUESTED", 4096)  # so that a row group takes several requests
    monkeypatch.setattr(parquet, "FOOTER", 1024)
    write_shards(tmp_path / "shards", COUNT, IMAGES, ".parquet")
    return tmp_path / "shards"


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


def opened(url, folder):
    source = open_source(f"{url}/{{000..{COUNT - 1:03d}}}.parquet")
    source.local_copies.folder = folder
    return source, source.local_copies


def all_of(source):
    return [(source.name(index), source.label(index), source.read(index)) for index in range(len(source))]


def write_table(path, columns, **options):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)


def test_an_image_is_read_with_its_row_group_or_from_an_unpacked_copy(server, folder, tmp_path):
    expected = all_of(open_source(str(folder / "*.parquet")))
    source, copies = opened(server.url, tmp_path / "copies")
    assert all_of(source) == expected
    asked = len(server.requests)
    assert source.read(len(source) - 1) == expected[-1][2]  # its row group is still there
    assert len(server.requests) == asked
    for shard in range(COUNT):
        assert copies.copy(shard)
    asked = len(server.requests)
    fresh = pickle.loads(pickle.dumps(source))
    assert all_of(fresh) == expected
    assert len(server.requests) == asked
    assert len(list((tmp_path / "copies").iterdir())) == COUNT
    used = copies.path(1).stat().st_size
    assert used <= copies.sizes[1] < 2 * used  # page headers repeat images
    path, data = copies.path(0), bytearray(copies.path(0).read_bytes())
    data[-1000] ^= 255
    path.write_bytes(data)
    for each in (path, copies.path(1)):
        os.utime(each, (10**9, 10**9))  # of an earlier run
    asked = len(server.requests)
    source, _ = opened(server.url, tmp_path / "copies")
    assert all_of(source) == expected
    assert not path.exists()
    assert copies.path(1).exists()


def test_an_index_has_no_image_and_an_image_only_its_row_group(server, folder):
    path, size = folder / "a.parquet", 200_000
    images = [{"bytes": os.urandom(size), "path": f"{row:02d}.png"} for row in range(20)]
    write_table(path, {"image": images, "mask": images, "label": [*range(20)]}, row_group_size=5)
    source = open_source(f"{server.url}/a.parquet")
    assert sum(one.size for one in server.requests if one.ranged) < size
    server.requests.clear()
    assert source.read(7) == images[7]["bytes"]
    assert 5 * size < sum(one.size for one in server.requests if one.ranged) < 6 * size
    server.requests.clear()
    assert [source.read(row) for row in range(5, 10)] == [image["bytes"] for image in images[5:10]]
    assert not server.requests


def test_a_file_that_was_changed_or_is_damaged_is_refused(server, folder, tmp_path):
    path, sums = folder / "001.parquet", folder / "SHA256SUMS"
    data = bytearray(path.read_bytes())
    data[4:40] = bytes(36)  # the header of the first page
    sums.unlink()
    path.write_bytes(data)
    source, copies = opened(server.url, tmp_path / "copies")
    with pytest.raises(ValueError, match=r"001\.parquet is damaged or not a Parquet file: "):
        copies.copy(1)
    with pytest.raises(OSError, match="its row group is damaged"):
        source.read(IMAGES)
    assert source.read(IMAGES + 11)
    (folder / "002.parquet").write_bytes(data)
    with pytest.raises(ChangedFile):
        copies.copy(2)
    with pytest.raises(ChangedFile):
        source.read(2 * IMAGES)
    assert list((tmp_path / "copies").iterdir()) == []


def test_a_full_disk_is_not_taken_for_damage(folder):
    path = folder / "000.parquet"
    with (
        path.open("rb") as file,
        open("/dev/full", "wb", buffering=0) as copy,
        pytest.raises(OSError, match="No space left"),
    ):
        parquet.unpack_images(str(path), file, copy)


def test_tables_of_all_layouts_are_as_local_ones(tmp_path):
    pictures = [os.urandom(30) for _ in range(8)]
    one = [*pictures[:6], None, pictures[0]]
    write_table(tmp_path / "web" / "a.parquet", {"jpg": one, "label": list("abcabcab")}, row_group_size=3)
    write_table(tmp_path / "web" / "b.parquet", {"image": one}, use_dictionary=False)
    named = {"x": [{"bytes": data, "path": 7} for data in pictures], "name": [*map(str, range(8, 0, -1))]}
    write_table(tmp_path / "web" / "c.parquet", named, compression="zstd")
    with serving(tmp_path / "web") as server:
        for name in "abc":
            local = open_source(str(tmp_path / "web" / f"{name}.parquet"))
            source = open_source(f"{server.url}/{name}.parquet")
            assert isinstance(source, ParquetShards)
            assert all_of(source) == all_of(local)
            source.local_copies.folder = tmp_path / "copies"
            assert source.local_copies.copy(0)
            assert all_of(source) == all_of(local)
            assert list(source.classes) == list(local.classes)


def test_row_groups_that_are_too_large_are_refused(server, folder, monkeypatch):
    monkeypatch.setattr(parquet, "MOST_OF_GROUP", 1000)
    with pytest.raises(ValueError, match=r"has row groups of up to .* download the files, or write row"):
        open_source(f"{server.url}/{{000..002}}.parquet")

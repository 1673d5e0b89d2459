"""Copies of remote shards: from a real HTTP server with faults, and a real S3 protocol."""

import os
import shutil
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data import remote
from dino_vit.data import shards as module
from dino_vit.data.open import open_source
from dino_vit.data.remote import Refused, SourceLost
from dino_vit.data.shards import ChangedFile, Prefetch
from dino_vit.views import build
from dino_vit.views.sampler import Sampler
from tests.support import runs
from tests.support.processes import free_port
from tests.support.remote import gcs_bucket, put_object, s3_bucket, s3_environ, serving, write_shards

COUNT, IMAGES = 8, 16


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART", 4096)  # so that a shard takes several requests
    write_shards(tmp_path / "shards", COUNT, IMAGES)
    return tmp_path / "shards"


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setattr(remote, "timeout_s", 2)
    with serving(folder) as server:
        yield server


def opened(url, folder):
    """Open the shards below a URL and return the source and the copies of them."""
    source = open_source(f"{url}/{{000..{COUNT - 1:03d}}}.tar")
    source.shards.folder = folder
    return source, source.shards


def content(copies, shard):
    return copies.copy_path(shard).read_bytes()


def files_in(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_copy_is_read_as_the_shard_would_be(server, folder, tmp_path):
    local = open_source(str(folder / "*.tar"))
    source, copies = opened(server.url, tmp_path / "copies")
    remotely = [source.read(index) for index in range(3)]
    for shard in range(COUNT):
        copies.copy(shard)
        assert content(copies, shard) == (folder / f"{shard:03d}.tar").read_bytes()
    asked = len(server.requests)
    assert [source.read(index) for index in range(len(source))] == [
        local.read(index) for index in range(len(local))
    ]
    assert remotely == [local.read(index) for index in range(3)]
    assert len(server.requests) == asked
    copies.copy_path(0).unlink()  # as another run may
    assert source.read(0) == local.read(0)
    assert len(server.requests) > asked


def test_a_server_that_is_gone_is_a_sentence_and_asks_for_a_restart(server, tmp_path):
    source, copies = opened(server.url, tmp_path / "copies")
    server.down = True
    with pytest.raises(SourceLost, match=r"000\.tar could not be read for 2 seconds.*run the same command"):
        source.read(0)
    assert SourceLost.exit_code == 75
    with pytest.raises(SourceLost):
        copies.copy(0)
    assert list((tmp_path / "copies").iterdir()) == []


@pytest.mark.parametrize("status", [403, 404])
def test_a_shard_that_the_server_refuses_ends_a_run_at_once(server, tmp_path, monkeypatch, status):
    monkeypatch.setattr(remote, "timeout_s", 600)
    source, copies = opened(server.url, tmp_path / "copies")
    server.statuses["000.tar"] = [status] * 9
    with pytest.raises(Refused, match=rf"000\.tar is not there or may not be read \(.*{status}") as refused:
        source.read(0)
    assert refused.value.exit_code == 2
    prefetch = Prefetch(copies, lambda _: np.arange(COUNT), ahead=1)
    with prefetch.running(0):
        while prefetch.failure is None:
            time.sleep(0.01)
    assert isinstance(prefetch.failure, Refused)
    assert len(server.statuses["000.tar"]) >= 5  # a HEAD and a GET for each of the two


def test_a_server_that_sends_byte_by_byte_ends_in_a_sentence(server, tmp_path):
    source, _ = opened(server.url, tmp_path / "copies")
    server.faults = ["drip"] * 100
    with pytest.raises(SourceLost, match=r"000\.tar could not be read for 2 seconds \(.+\)"):
        source.read(0)


def test_a_shard_that_was_changed_is_refused(server, folder, tmp_path):
    source, copies = opened(server.url, tmp_path / "copies")
    data = (folder / "001.tar").read_bytes()
    (folder / "001.tar").write_bytes(data[::-1])
    with pytest.raises(ChangedFile, match="changed or removed after it was indexed; start again"):
        copies.copy(1)
    with pytest.raises(ChangedFile):
        source.read(IMAGES)
    assert not copies.copy_path(1).exists()
    assert source.read(0)  # of another shard


def test_the_thread_copies_what_comes_next_and_keeps_to_its_limit(server, tmp_path):
    _, copies = opened(server.url, tmp_path / "copies")
    copies.limit = int(np.sort(copies.sizes)[-3:].sum())
    order = np.random.default_rng(0).permutation(COUNT)
    uses = np.empty(COUNT, dtype=np.int64)
    uses[order] = 100 * np.arange(COUNT)
    prefetch = Prefetch(copies, lambda position: np.where(uses < position, 10**6, uses - position), ahead=250)
    for position in range(0, 100 * COUNT, 50):
        prefetch.position = position
        while prefetch.copy_next():
            assert files_in(tmp_path / "copies") <= copies.limit
        near = [shard for shard in order if position <= uses[shard] < position + 250]
        assert all(copies.copy_path(shard).exists() for shard in near)
    assert server.requested() == {f"{shard:03d}.tar" for shard in range(COUNT)}


def test_what_is_needed_last_is_deleted_first_and_what_another_run_uses_last(server, tmp_path):
    _, copies = opened(server.url, tmp_path / "copies")
    for shard in range(5):
        copies.copy(shard)
    used, unused = (copies.folder / f"0-{letter * 24}.shard" for letter in "ab")
    shutil.copy(copies.copy_path(0), used)
    shutil.copy(copies.copy_path(0), unused)
    os.utime(unused, (0, 0))
    uses = np.array([50, 10, 90, 30, 70, 0, 0, 0])
    foreign = [copies.folder / name for name in ("family.shard", "download.partial")]
    for path in foreign:
        path.write_bytes(b"of a user")
    for gone in (unused, *map(copies.copy_path, (2, 4, 0)), used):
        assert gone.exists()
        copies.limit = copies.copied_bytes() + copies.sizes[5] - 1  # files of others do not count
        copies.make_room(5, uses, keep=[1, 3])
        assert not gone.exists()
    assert copies.copy_path(1).exists()
    assert copies.copy_path(3).exists()
    assert all(path.read_bytes() == b"of a user" for path in foreign)


def test_copies_leave_a_tenth_of_their_disk_free(server, tmp_path, monkeypatch):
    source, copies = opened(server.url, tmp_path / "copies")
    sampler = Sampler(length=len(source), global_batch=8, seed=0)
    config = load(PretrainConfig, None, {"data.cache": str(tmp_path / "copies"), "data.order": "global"})
    monkeypatch.setattr(build, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert build.build_prefetch(config, source, sampler) is None  # they do not all fit
    assert copies.limit == 900
    monkeypatch.undo()
    prefetch = build.build_prefetch(config, source, sampler)
    assert [prefetch.copy_next() for _ in range(COUNT + 1)] == [True] * COUNT + [False]


def copy_all(url, folder):
    """Copy all shards, as one of several runs."""
    _, copies = opened(url, folder)
    for shard in range(COUNT):
        copies.copy(shard)


def copying(server, folder):
    """Start a process that copies all shards."""
    process = runs.server.Process(target=copy_all, args=(server.url, folder))
    process.start()
    return process


def test_two_runs_share_a_folder(server, folder, tmp_path):
    _, copies = opened(server.url, tmp_path / "copies")
    processes = [copying(server, tmp_path / "copies") for _ in range(2)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    for shard in range(COUNT):
        assert content(copies, shard) == (folder / f"{shard:03d}.tar").read_bytes()
    assert len(list((tmp_path / "copies").iterdir())) == COUNT


def test_what_a_killed_run_leaves_is_deleted(server, tmp_path):
    _, copies = opened(server.url, tmp_path / "copies")
    server.faults = ["late"]
    process = copying(server, copies.folder)
    while not list(copies.folder.glob("*.partial")):
        assert process.is_alive()
        time.sleep(0.01)
    (partial,) = copies.folder.glob("*.partial")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    copies.limit = 0
    copies.make_room(1, np.zeros(COUNT, dtype=np.int64), keep=[])
    assert partial.exists(), "another run may be writing it"
    os.utime(partial, (0, 0))
    copies.make_room(1, np.zeros(COUNT, dtype=np.int64), keep=[])
    assert not partial.exists()


def test_shards_are_copied_from_googles_storage(tmp_path, monkeypatch):
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # looks for credentials
    port = free_port()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    write_shards(tmp_path / "shards", 3, IMAGES)
    local = open_source(str(tmp_path / "shards" / "*.tar"))
    with gcs_bucket(tmp_path / "shards", int(port)) as put:
        source = open_source("gs://shards/*.tar")
        source.shards.folder = tmp_path / "copies"
        assert [source.read(index) for index in (0, 40)] == [local.read(index) for index in (0, 40)]
        source.shards.copy(1)
        put("002.tar", bytes(int(source.shards.file_signatures[2, 0])))
        with pytest.raises(ChangedFile):
            source.shards.copy(2)
    assert source.read(IMAGES) == local.read(IMAGES)


def test_shards_are_copied_from_s3_and_an_image_that_is_replaced_is_noticed(folder, tmp_path, monkeypatch):
    local = open_source(str(folder / "*.tar"))
    with s3_bucket(folder) as bucket:
        for name, value in s3_environ(bucket).items():
            monkeypatch.setenv(name, value)
        source = open_source("s3://shards/*.tar")
        copies = source.shards
        copies.folder = tmp_path / "copies"
        assert [source.read(index) for index in (0, 100)] == [local.read(index) for index in (0, 100)]
        copies.copy(3)
        assert content(copies, 3) == (folder / "003.tar").read_bytes()
        put_object(bucket, "004.tar", (folder / "005.tar").read_bytes())
        with pytest.raises(ChangedFile):
            copies.copy(4)
        images = []
        for data in (b"image", b"image", b"later"):
            put_object(bucket, "photos/a.png", data)
            images.append(open_source("s3://shards/photos"))
    first, again, replaced = (source.stamp for source in images)
    assert first == again != replaced  # by the listing: no image is asked for
    assert images[0].fingerprint == images[2].fingerprint

"""Pretraining from remote shards: the same as from local ones, whatever happens to the server or the run."""

import pytest
from torch.testing import assert_close

from dino_vit.commands.pack import pack
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.data.open import open_source
from tests.support.processes import finish, pair, run_in_two, torchrun_environs
from tests.support.remote import s3_bucket, s3_environ, serving, write_shards
from tests.support.runs import Run
from tests.support.training import opened, trained

COUNT, IMAGES, BATCH, WINDOW = 16, 16, 8, 2  # an epoch is 32 steps
SETTINGS = {
    "data.batch_size": BATCH,
    "data.window": WINDOW,
    "data.workers": 1,
    "budget.steps": 34,
}  # more than an epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote") / "shards"
    write_shards(folder, COUNT, IMAGES)
    return folder


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """Return the tensors of a run that read local shards in the same order."""
    output = tmp_path_factory.mktemp("local") / "run"
    run = Run(output, {**SETTINGS, "data.source": folder / "*.tar", "data.order": "window"})
    assert run.wait() == 0, run.said
    return tensors_of(output)


def tensors_of(output):
    return Checkpoints(output, keep_every=None).newest().tensors


def settings_of(url, tmp_path, **settings):
    source = f"{url}/{{000..{COUNT - 1:03d}}}.tar"
    return {**SETTINGS, "data.source": source, "data.cache": tmp_path / "copies", **settings}


def test_a_run_survives_faults_of_the_server_and_learns_the_same(folder, expected, tmp_path):
    with serving(folder, latency=0.01) as server:
        server.faults = ["500", "cut", "short", "long"] * 10
        run = Run(tmp_path / "run", settings_of(server.url, tmp_path))
        assert run.wait() == 0, run.said
    assert "data.order=window: of 16 remote shards, 2 at a time are mixed (data.window)" in run.said
    assert not server.faults
    assert_close(tensors_of(tmp_path / "run"), expected, rtol=0, atol=0)


def test_a_server_that_stays_away_ends_a_run_that_goes_on_when_it_is_back(folder, expected, tmp_path):
    with serving(folder) as server:
        settings = settings_of(server.url, tmp_path)
        run = Run(tmp_path / "run", {**settings, "data.timeout": 4})
        run.wait_until(lambda: "step 12/34" in run.said)
        server.down = True
        assert run.wait() == 75, run.said
        assert "could not be read for 4 seconds (" in run.said
        assert "run the same command again" in run.said
        assert "Traceback" not in run.said
        server.down = False
        again = Run(tmp_path / "run", settings)
        assert again.wait() == 0, again.said
    assert_close(tensors_of(tmp_path / "run"), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_two_processes_share_the_copies_and_end_together(folder, tmp_path):
    local = {**SETTINGS, "data.source": folder / "*.tar", "data.order": "window"}
    run_in_two(tmp_path / "local", {**local, "data.batch_size": BATCH // 2})
    with serving(folder) as server:
        settings = settings_of(server.url, tmp_path, **{"data.batch_size": BATCH // 2})
        started = pair(tmp_path / "run", {**settings, "data.timeout": 4}, torchrun_environs())
        started[0].wait_until(lambda: "step 12/34" in started[0].said)
        server.down = True
        codes = [process.wait() for process in started]
        assert 75 in codes
        assert "could not be read for 4 seconds (" in "".join(process.said for process in started)
        server.down = False
        finish(pair(tmp_path / "run", settings, torchrun_environs()))
    assert len(list((tmp_path / "copies").glob("*.shard"))) > COUNT / 2
    assert_close(tensors_of(tmp_path / "run"), tensors_of(tmp_path / "local"), rtol=0, atol=0)


@pytest.mark.slow
def test_shards_on_s3_are_learned_from_alike(folder, expected, tmp_path):
    with s3_bucket(folder) as url:
        run = Run(tmp_path / "run", settings_of("s3://shards", tmp_path), environ=s3_environ(url))
        assert run.wait() == 0, run.said
    assert len(list((tmp_path / "copies").glob("*.shard"))) > COUNT / 2
    assert_close(tensors_of(tmp_path / "run"), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data.cache_gb": 1e-4},
            "data.window=2 mixes shards of .* GB at a time, more than data.cache_gb=0.0001",
        ),
        ({"data.source": "synthetic:64", "data.order": "window"}, "walks through tar shards or zips"),
    ],
)
def test_what_cannot_work_is_refused_with_a_way_out(folder, tmp_path, settings, message):
    with serving(folder) as server, pytest.raises(ValueError, match=message):
        opened(tmp_path / "run", settings_of(server.url, tmp_path, **settings))


def test_a_damaged_shard_ends_a_run_with_its_name(folder, tmp_path):
    """A catalogue has the digests of the shards."""
    damaged = tmp_path / "damaged"
    pack(open_source(str(folder)), damaged, shard_bytes=20_000)
    for path in damaged.glob("*.tar"):
        data = bytearray(path.read_bytes())
        data[700] ^= 255
        path.write_bytes(data)
    with serving(damaged) as server:
        last = len([*damaged.glob("*.tar")]) - 1
        source = f"{server.url}/{{000000..{last:06}}}.tar"
        settings = {"data.source": source, "data.workers": 0, "budget.steps": 2000}
        with pytest.raises(ValueError, match=r"\d\.tar is damaged: it does not match the digest in its"):
            trained(tmp_path / "run", settings_of(server.url, tmp_path, **settings))

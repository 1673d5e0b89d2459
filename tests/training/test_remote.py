"""Pretraining from remote shards: the same as from local ones, whatever happens to the server or the run."""

import re
import shutil
import signal
import time

import pytest
import torch

from dino_vit.core.checkpoint import Checkpoints
from dino_vit.data.sources import files
from dino_vit.data.sources.open import open_source
from dino_vit.views.sampler import Sampler, ShardUses
from tests.support.processes import finish, pair, run_in_two, torchrun_environs
from tests.support.remote import s3_bucket, s3_environ, serving, write_shards
from tests.support.runs import Run

pytest.importorskip("aiohttp", reason="fsspec reads HTTP with aiohttp: pip install 'dino-vit[remote]'")

COUNT, IMAGES, BATCH, WINDOW = 16, 16, 8, 2
SETTINGS = {"data.batch_size": BATCH, "data.window": WINDOW, "data.workers": 1, "budget.steps": 50}


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


def assert_equal(output, expected):
    found = tensors_of(output)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def settings_of(url, tmp_path, suffix=".tar", **settings):
    source = f"{url}/{{000..{COUNT - 1:03d}}}{suffix}"
    return {**SETTINGS, "data.source": source, "data.cache": tmp_path / "copies", **settings}


def impatient():
    files.PATIENCE = 2


def test_a_run_survives_faults_of_the_server_and_learns_the_same(folder, expected, tmp_path):
    with serving(folder, latency=0.01) as server:
        server.faults = ["500", "cut", "short", "long"] * 10
        run = Run(tmp_path / "run", settings_of(server.url, tmp_path))
        assert run.wait() == 0, run.said
    assert (
        "data.order=window: of 16 remote shards, 2 at a time are mixed (data.window) and copied to"
        in run.said
    )
    assert not server.faults
    assert_equal(tmp_path / "run", expected)


def test_a_server_that_stays_away_ends_a_run_that_goes_on_when_it_is_back(folder, expected, tmp_path):
    with serving(folder) as server:
        settings = settings_of(server.url, tmp_path)
        run = Run(tmp_path / "run", settings, before=impatient)
        run.wait_until(lambda: "step 12/50" in run.said)
        server.down = True
        assert run.wait() == 75, run.said
        assert "could not be read for 2 seconds (" in run.said
        assert "run the same command again" in run.said
        assert "Traceback" not in run.said
        server.down = False
        again = Run(tmp_path / "run", settings)
        assert again.wait() == 0, again.said
    assert_equal(tmp_path / "run", expected)


def says_nothing(run):
    said = run.said
    time.sleep(1.5)
    return run.said == said


@pytest.mark.parametrize("outage", ["errors", "silence"])
def test_a_run_that_waits_for_a_server_stops_when_asked_to(folder, expected, tmp_path, outage):
    with serving(folder) as server:
        settings = settings_of(server.url, tmp_path, **{"data.cache_gb": 0, "run.checkpoint_every": 100})
        run = Run(tmp_path / "run", settings)
        run.wait_until(lambda: "step 12/50" in run.said)
        server.down, server.latency = outage == "errors", 1000 * (outage == "silence")
        run.wait_until(lambda: says_nothing(run))  # as the batches are used up that were ready
        run.send(signal.SIGTERM)
        assert run.wait(60) == 75, run.said
        step = Checkpoints(tmp_path / "run", keep_every=None).newest().step
        assert f"saved at step {step}; run the same command to resume" in run.said
        assert f"step {step + 1}/50" not in run.said
        server.down, server.latency = False, 0
        again = Run(tmp_path / "run", settings)
        assert again.wait() == 0, again.said
    assert_equal(tmp_path / "run", expected)


def test_parquet_is_learned_from_alike_and_goes_on_after_a_kill(folder, expected, tmp_path):
    write_shards(tmp_path / "tables", COUNT, IMAGES, ".parquet")
    with serving(tmp_path / "tables", latency=0.01) as server:
        server.faults = ["500", "cut", "short", "long"] * 5
        settings = settings_of(server.url, tmp_path, ".parquet")
        run = Run(tmp_path / "run", settings)
        run.wait_until(lambda: "step 22/50" in run.said)
        run.send(signal.SIGKILL)
        run.wait()
        again = Run(tmp_path / "run", settings)
        assert again.wait() == 0, again.said
    assert "data.order=window: of 16 remote shards, 2 at a time are mixed" in run.said
    assert not server.faults
    assert len(list((tmp_path / "copies").glob("*.shard"))) > COUNT / 2
    assert_equal(tmp_path / "run", expected)


def test_a_killed_run_that_resumes_fetches_only_what_it_needs_from_there(folder, expected, tmp_path):
    with serving(folder) as server:
        run = Run(tmp_path / "run", settings_of(server.url, tmp_path))
        run.wait_until(lambda: "step 22/50" in run.said)
        run.send(signal.SIGKILL)
        run.wait()
        server.requests.clear()
        fresh = settings_of(server.url, tmp_path, **{"data.cache": tmp_path / "fresh", "budget.steps": 50})
        again = Run(tmp_path / "run", {**fresh, "run.log_every": 1})
        again.wait_until(lambda: "step 22/50" in again.said)
        step = Checkpoints(tmp_path / "run", keep_every=None).newest().step
        again.send(signal.SIGSTOP)
        copied = {one.name for one in server.requests if one.ranged and one.size == size_of(folder, one.name)}
        last = max(map(int, re.findall(r"step +(\d+)/50", again.said)))
        again.send(signal.SIGCONT)
        assert again.wait() == 0, again.said
    assert step == 20
    assert_equal(tmp_path / "run", expected)
    source = open_source(str(folder / "*.tar"))
    sampler = Sampler(length=len(source), batch_size=BATCH, seed=0, shards=source.shards, window=WINDOW)
    uses = ShardUses(sampler, source.shards)
    ahead = sampler.span // 2 + 3 * BATCH  # two batches of the loader process, and that of the step
    needed = {f"{s:03d}.tar" for at in range(20, last + 2) for s in (uses.next(at) < ahead).nonzero()[0]}
    assert copied
    assert copied <= needed
    assert len(needed) < COUNT


def size_of(folder, name):
    return (folder / name).stat().st_size if (folder / name).is_file() else -1


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".tar", ".parquet"])
def test_two_processes_share_the_copies_and_end_together(folder, tmp_path, suffix):
    write_shards(tmp_path / "served", COUNT, IMAGES, suffix)
    local = {**SETTINGS, "data.source": folder / "*.tar", "data.order": "window"}
    run_in_two(tmp_path / "local", {**local, "data.batch_size": BATCH // 2})
    with serving(tmp_path / "served") as server:
        settings = settings_of(server.url, tmp_path, suffix, **{"data.batch_size": BATCH // 2})
        started = pair(tmp_path / "run", settings, torchrun_environs(), before=impatient)
        started[0].wait_until(lambda: "step 12/50" in started[0].said)
        server.down = True
        said = finish(started, code=75)
        assert "could not be read for 2 seconds (" in "".join(said)
        server.down = False
        finish(pair(tmp_path / "run", settings, torchrun_environs()))
    assert len(list((tmp_path / "copies").glob("*.shard"))) > COUNT / 2
    assert_equal(tmp_path / "run", tensors_of(tmp_path / "local"))


@pytest.mark.slow
def test_shards_on_s3_are_learned_from_alike(folder, expected, tmp_path):
    pytest.importorskip("moto", reason="a server of S3 for tests: pip install 'moto[server]'")
    pytest.importorskip("s3fs", reason="fsspec reads S3 with s3fs: pip install 'dino-vit[remote]'")
    with s3_bucket(folder) as url:
        run = Run(tmp_path / "run", settings_of("s3://shards", tmp_path), environ=s3_environ(url))
        assert run.wait() == 0, run.said
    assert len(list((tmp_path / "copies").glob("*.shard"))) > COUNT / 2
    assert_equal(tmp_path / "run", expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data.cache_gb": 1e-4},
            "data.window=2 mixes shards of .* GB at a time, more than data.cache_gb=0.0001",
        ),
        ({"data.source": "synthetic:64", "data.order": "window"}, "walks through tar shards, zips or remote"),
    ],
)
def test_what_cannot_work_is_refused_with_a_way_out(folder, tmp_path, settings, message):
    with serving(folder) as server:
        run = Run(tmp_path / "run", settings_of(server.url, tmp_path, **settings))
        assert run.wait() == 2
    assert re.search(message, run.said), run.said


def test_a_damaged_shard_ends_a_run_with_its_name(folder, tmp_path):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    sums = (damaged / "SHA256SUMS").read_text()
    (damaged / "SHA256SUMS").write_text(re.sub("^.", "f", sums.replace("f", "0"), flags=re.MULTILINE))
    with serving(damaged) as server:
        run = Run(tmp_path / "run", settings_of(server.url, tmp_path, **{"budget.steps": 2000}))
        assert run.wait() == 2
    assert re.search(r"\d\.tar is damaged: its digest is not the one in SHA256SUMS beside it", run.said)
    assert "Traceback" not in run.said

"""The order of 10^9 images in 10^6 shards, of which there is only the catalogue."""

import gc
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dino_vit.data.catalogue import VERSION, Catalogue, signature_column
from dino_vit.data.remote import UNKNOWN
from dino_vit.views.sampler import Sampler, ShardUses

IMAGES, SHARD = 10**9, 1000  # in all, and of a shard
PROCESSES, PER_HOST = 512, 8
BATCH, DRAWN = 32_768, 90  # images of a step, and steps


def write_catalogue(path):
    """Write the catalogue of shards that do not exist."""
    shards = IMAGES // SHARD
    metadata = {"version": VERSION, "labels": [], "sets": None, "splits": [], "depth": 0, "stated": None}
    metadata |= {"fingerprint": "simulated", "titled": False}
    names = [f"{number:07d}" for number in range(shards)]
    digests = pa.array([name.encode().zfill(32) for name in names])
    signature = signature_column(np.tile([SHARD * 100_000, UNKNOWN, 0], (shards, 1)))
    columns = {"file": pa.array([f"{name}.tar" for name in names], pa.large_string())}
    columns |= {"digest": digests, "index": digests, "images": pa.array(np.full(shards, SHARD))}
    columns |= {"signature": signature}
    batch = pa.record_batch(columns, metadata={"dino_vit": json.dumps(metadata)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def opened(path):
    return Catalogue("s3://nowhere", path).images(stamp="")


def sampler_of(source):
    """Return the sampler of one of many processes."""
    return Sampler(
        length=IMAGES,
        global_batch=BATCH,
        seed=0,
        rank=0,
        world_size=PROCESSES,
        shard_starts=source.shards.starts,
    )


def private_bytes():
    """Return the memory of this process without files, which all processes share (Linux only)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


def memory_of_process(path, copies_shards):
    """Return what a process of the run holds once it draws images, and resumes in the middle of an epoch."""
    gc.collect()  # what an earlier call left in circles would be counted as given back
    before = private_bytes()
    source = opened(path)
    sampler = sampler_of(source)
    if copies_shards:
        ShardUses(sampler, sampler.build_order(), len(source.shards.sizes), 0).next(0)
    for _ in islice(sampler.batch_specs(), DRAWN):
        pass
    next(sampler.batch_specs(sampler.steps_per_epoch * 3 // 2))
    return private_bytes() - before


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.arrow"
    write_catalogue(path)
    return path


@pytest.mark.slow
def test_a_host_holds_less_than_a_gigabyte(path):
    main, other = (memory_of_process(path, copies_shards) for copies_shards in (True, False))
    assert path.stat().st_size + main + (PER_HOST - 1) * other < 0.8e9

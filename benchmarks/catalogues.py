"""What an index costs as the images grow: catalogues without archives behind them, in shards of 1,000 images.

    python -m benchmarks.catalogues

For a host with 8 of 512 processes: its memory, and the seconds to the first batch and to that of a resume in
the middle of an epoch. "before" is an order of all images at once, as without a catalogue.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from benchmarks.measure import Table, arguments, report
from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform
from dino_vit.data.catalogue import VERSION, Catalogue, signature_column
from dino_vit.data.image_set import ImageSet
from dino_vit.data.sources.catalogued import catalogued
from dino_vit.data.sources.files import UNKNOWN
from dino_vit.views.sampler import Sampler, ShardUses

SHARD, BATCH, DRAWN = 1000, 32_768, 3_000_000  # images of a shard, of a step, and drawn to time it
PROCESSES, PER_HOST = 512, 8
AT_ONCE = 10**7  # images, at most, of which all are ordered at once


def write_catalogue(path: Path, images: int) -> None:
    """Write the catalogue of shards that do not exist."""
    shards = images // SHARD
    metadata = {"version": VERSION, "classes": [], "splits": {}, "label_depth": 0, "ordered": True}
    metadata |= {"fingerprint": f"simulated-{images}"}
    names = [f"{number:07d}" for number in range(shards)]
    columns = {"file": pa.array([f"{name}.tar" for name in names], pa.large_string())}
    digests = pa.array([name.encode().zfill(32) for name in names])
    columns |= {"digest": digests, "index": digests}
    columns |= {
        "images": pa.array(np.full(shards, SHARD)),
        "signature": signature_column(np.tile([SHARD * 100_000, UNKNOWN, 0], (shards, 1))),
    }
    batch = pa.record_batch(columns, metadata={"dino_vit": json.dumps(metadata)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def simulated_sampler(source: ImageSet, rank: int = 0, processes: int = PROCESSES) -> Sampler:
    """Return the sampler of one of many processes."""
    return Sampler(
        length=len(source),
        batch_size=BATCH,
        seed=0,
        rank=rank,
        world_size=processes,
        layout=source.layout,
    )


def private_bytes() -> int:
    """Return the memory of this process without files, which all processes share (Linux only)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines}
    return 1024 * sizes["Private_Dirty:"]


def simulate(path: Path, copies_shards: bool) -> dict[str, float]:
    """Start one process of the run, and measure what it takes until it reads, and how fast it draws."""
    before, start = private_bytes(), time.perf_counter()
    source = catalogued(Catalogue("s3://nowhere", path), stamp="")
    sampler = simulated_sampler(source)
    specs = sampler.batch_specs()
    next(specs)
    figures = {"first batch": time.perf_counter() - start}
    if copies_shards:
        ShardUses(sampler, len(source.shards.copies.sizes) if source.shards else 0).next(0)
    start, steps = time.process_time(), min(sampler.steps_per_epoch - 1, DRAWN // BATCH)
    for _ in range(steps):
        next(specs)
    figures["indices a second"] = steps * BATCH / (time.process_time() - start)
    figures["memory"] = float(private_bytes() - before)
    start = time.perf_counter()
    next(simulated_sampler(source).batch_specs(sampler.steps_per_epoch * 3 // 2))
    figures["resume"] = time.perf_counter() - start
    return figures


def order_at_once(images: int) -> NDArray[np.int64]:
    """Return the order as it was drawn before: of all images of an epoch."""
    shards = np.repeat(np.arange(images // SHARD, dtype=np.int32), SHARD)
    lots = np.argsort(random_bits(0, RngPurpose.SHARDS, 0, np.arange(images // SHARD)))
    first = np.empty(len(lots))
    first[lots] = SHARD * np.arange(len(lots))
    places = (
        first[shards] + 16 * SHARD * random_uniform(0, RngPurpose.WINDOW, 0, np.arange(images))
    ) % images
    return np.argsort(places, kind="stable")


def measure_at_once(images: int) -> dict[str, float]:
    """Measure the same of the order of all images, without the listing of archives before it."""
    before, start = private_bytes(), time.perf_counter()
    held = order_at_once(images)
    seconds = time.perf_counter() - start
    return {"first batch": seconds, "memory": float(private_bytes() - before), "images": float(len(held))}


def in_new_process(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work)


def scale() -> str:
    """Return a table of catalogues of up to 10^9 images, for a host with 8 of the processes."""
    lines = ["| images | catalogue | memory of a host | first batch | resume | indices a second |"]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    for images in (10**6, 10**7, 10**8, 10**9):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "catalogue.arrow"
            write_catalogue(path, images)
            size = path.stat().st_size
            main, other = (in_new_process(partial(simulate, path, copies)) for copies in (True, False))
        memory = (size + main["memory"] + (PER_HOST - 1) * other["memory"]) / 1e6
        seconds = f"{main['first batch']:.2f} s | {main['resume']:.2f} s"
        rate = main["indices a second"] / 1e6
        lines.append(
            f"| {images:,} | {size / 1e6:.1f} MB | {memory:,.0f} MB | {seconds} | {rate:.1f} million |"
        )
        if images <= AT_ONCE:
            before = in_new_process(partial(measure_at_once, images))
            memory = PER_HOST * before["memory"] / 1e6
            lines.append(f"| before | | {memory:,.0f} MB | {before['first batch']:.2f} s | the same | |")
    return "\n".join(lines)


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    options.repeats = 0  # each is a process of its own, once
    torch.set_num_threads(options.threads)
    report([Table("Catalogues of shards without bytes", "", [], scale())], options)

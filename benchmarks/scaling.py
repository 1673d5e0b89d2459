"""What a step costs as views, images and prototypes grow, and a start as the data set does.

The last table is of catalogues without archives behind them, in shards of 1,000 images, for a host with 8 of
512 processes.

    python -m benchmarks.scaling --repeats 3

A ViT-Ti/4 on small images, 16 at a time, our step beside the 2021 code's (`benchmarks/step.py` says how they
are compared). A resume is timed from the middle of an epoch to the names of its next images, beside PyTorch's
DistributedSampler, which lists the epoch and steps over what has been.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, DistributedSampler

from benchmarks import step
from benchmarks.end_to_end import SMALL
from benchmarks.measure import Row, Table, Work, arguments, compare, report, where
from dino_vit.core.randomness import RngPurpose, random_bits, random_uniform
from dino_vit.data.catalogue import VERSION, Catalogue, CataloguedSource
from dino_vit.data.catalogue_writer import signature_column
from dino_vit.data.sources.files import UNKNOWN
from dino_vit.views.sampler import Sampler, ShardUses

ON_CUDA = "the same rows"
IMAGES = 16
SHARD, BATCH, DRAWN = 1000, 32_768, 3_000_000  # images of a shard, of a step, and drawn to time it
PROCESSES, PER_HOST = 512, 8
AT_ONCE = 10**7  # images, at most, of which all are ordered at once
GROWTH: tuple[tuple[str, tuple[tuple[str, Mapping[str, Any]], ...]], ...] = (
    ("Local views", tuple((f"{n} of 16 px", {"views.local_count": n}) for n in (0, 2, 4, 8, 16))),
    (
        "Size of the views",
        tuple(
            (f"{side} and {side // 2} px", {"views.global_size": side, "views.local_size": side // 2})
            for side in (32, 48, 64, 96)
        ),
    ),
    ("Prototypes", tuple((f"{n:,}", {"head.prototypes": n}) for n in (1024, 4096, 16384, 65536))),
)


def measure_step(name: str, changes: Mapping[str, Any], repeats: int) -> Row:
    """Measure our step and the other's."""
    case = step.Case(IMAGES, "bf16", changes={**SMALL, **changes})
    ours = step.Ours(case)
    device = ours.state.device
    works: dict[str, Work] = {
        "dino_vit": ours,
        "reference": step.Reference(case.config, device, ours.state),
    }
    return compare(name, works, items=IMAGES, repeats=repeats, device=device.type)


def resumes(images: int) -> dict[str, Callable[[], Iterable[int]]]:
    """Return what finds the next images in the middle of an epoch."""
    sampler = Sampler(length=images, batch_size=64, seed=0)
    middle = sampler.steps_per_epoch // 2
    numbers = cast("Dataset[int]", range(images))
    other: DistributedSampler[int] = DistributedSampler(numbers, num_replicas=1, rank=0)
    return {
        "dino_vit": lambda: next(sampler.batch_specs(middle)).samples,
        "DistributedSampler": lambda: list(islice(iter(other), middle * 64, middle * 64 + 64)),
    }


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


def simulated_sampler(source: CataloguedSource, rank: int = 0, processes: int = PROCESSES) -> Sampler:
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
    source = CataloguedSource(Catalogue("s3://nowhere", path))
    sampler = simulated_sampler(source)
    specs = sampler.batch_specs()
    next(specs)
    figures = {"first batch": time.perf_counter() - start}
    if copies_shards:
        ShardUses(sampler, len(source.ranges.paths)).next(0)
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


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure all of it."""
    torch.set_num_threads(threads)
    tables = []
    for title, cases in GROWTH:
        rows = [measure_step(name, changes, repeats) for name, changes in cases]
        slower = rows[0].speed["dino_vit"] / rows[-1].speed["dino_vit"]
        others = rows[0].speed["reference"] / rows[-1].speed["reference"]
        note = (
            f"From the first row to the last ours takes {slower:.1f} times as long, the other {others:.1f}."
        )
        tables.append(Table(f"{title}, {where(threads)}", "images a second", rows, note))
    rows = [
        compare(f"{images:,} images", resumes(images), items=1, repeats=repeats)
        for images in (10_000, 100_000, 1_000_000, 10_000_000)
    ]
    tables.append(Table("Resuming in the middle of an epoch", "resumes a second", rows))
    return [*tables, Table("Catalogues of shards without bytes", "", [], scale())]


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)

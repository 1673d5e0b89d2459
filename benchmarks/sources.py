"""Sources: a million images in an index, and files from a folder, shards and tables.

    python -m benchmarks.sources

The index is of empty files in a thousand folders, opened as any folder of images is, beside a pickled
list of paths as data sets in Python commonly hold one. Memory is by how much the proportional set size grows
(Linux), of the process that opens and the workers forked from it, each asking for 300,000 names and labels.
"""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.input import Photos
from benchmarks.measure import Row, Table, arguments, compare, report
from dino_vit.data.image_set import ImageSet
from dino_vit.data.open import open_source
from dino_vit.data.stores.files import open_folder

IMAGES = 1_000_000
FOLDERS = 1000
ASKED = 300_000
ROLLUP = Path("/proc/self/smaps_rollup")


def made_up_names() -> list[str]:
    """Return names like ImageNet's, sorted."""
    share = IMAGES // FOLDERS
    return [f"n{f:08d}/n{f:08d}_{number:05d}.JPEG" for f in range(FOLDERS) for number in range(share)]


class Listed:
    """What is common: a list of pairs of path and label."""

    def __init__(self, path: Path) -> None:
        self.samples: list[tuple[str, int]] = pickle.loads(path.read_bytes())

    def name(self, index: int) -> str:
        return self.samples[index][0]

    def label(self, index: int) -> int:
        return self.samples[index][1]


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure the index, then the files; `threads` changes nothing."""
    del threads
    with TemporaryDirectory() as folder, patch.dict(os.environ, DINO_VIT_CACHE=f"{folder}/cache"):
        return [_index_table(Path(folder), repeats), _files_table(Path(folder), repeats)]


def _index_table(folder: Path, repeats: int) -> Table:
    title = f"An index of {IMAGES:,} images"
    if not ROLLUP.exists():
        return Table(title, "millions opened a second", [], "Not measured: needs Linux.")
    root = folder / "images"
    for number in range(FOLDERS):
        (root / f"n{number:08d}").mkdir(parents=True)
    for name in made_up_names():
        (root / name).touch()
    time.sleep(3)  # until their times are no longer new
    start = time.perf_counter()
    open_folder(root)
    built = time.perf_counter() - start
    listed = folder / "list.pickle"
    listed.write_bytes(pickle.dumps([(name, 0) for name in made_up_names()]))
    openers: dict[str, Callable[[], object]] = {
        "dino-vit": partial(open_folder, root),
        "a list of str": partial(Listed, listed),
    }
    rows = [_index_row(workers, openers, repeats) for workers in (1, 4)]
    size = sum(path.stat().st_size for path in (folder / "cache").glob("*.arrow"))
    note = (
        f"Opening takes {1 / rows[0].speed['dino-vit']:.1f} s, with a look at each file; the first time, "
        f"with sorting and writing, {built:.1f} s. The file ({size / 2**20:.0f} MiB) is the "
        f"system's, and counts as the processes' while it is mapped."
    )
    return Table(title, "millions opened a second", rows, note)


def _index_row(workers: int, openers: dict[str, Callable[[], object]], repeats: int) -> Row:
    found = {name: _fresh(opener, workers, repeats) for name, opener in openers.items()}
    speed = {name: IMAGES / 1e6 / seconds for name, (seconds, _) in found.items()}
    ours, other = speed.values()
    memory: dict[str, float | None] = {name: mebibytes for name, (_, mebibytes) in found.items()}
    return Row(f"{workers} worker{'s' * (workers > 1)}", speed, ours / other, memory)


def _fresh(opener: Callable[[], object], workers: int, repeats: int) -> tuple[float, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_open_and_ask, opener, workers, repeats).result()


def _open_and_ask(opener: Callable[[], object], workers: int, repeats: int) -> tuple[float, float]:
    """Return the seconds that opening takes, and by how many MiB it and workers that ask grow in all."""
    before = _memory_of(None, workers)
    source, times = opener(), []
    memory = _memory_of(source, workers) - before
    for _ in range(repeats):
        start = time.perf_counter()
        opener()
        times.append(time.perf_counter() - start)
    return median(times), memory


def _memory_of(source: object, workers: int) -> float:
    """Fork workers that ask, and return the memory of this process and of them while they are all there."""
    fork = get_context("fork")
    all_there, told = fork.Barrier(workers + 1), fork.Queue()
    processes = [fork.Process(target=_ask, args=(source, n, all_there, told)) for n in range(workers)]
    for process in processes:
        process.start()
    all_there.wait()
    memory: float = _proportional() + sum(told.get() for _ in processes)
    all_there.wait()
    for process in processes:
        process.join()
    return memory


def _ask(source: Any, number: int, all_there: Any, told: Any) -> None:
    order = np.random.default_rng(number).integers(0, IMAGES, ASKED)
    for index in order if source is not None else ():
        source.name(int(index))
        source.label(int(index))
    all_there.wait()
    told.put(_proportional())
    all_there.wait()


def _proportional() -> float:
    lines = ROLLUP.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 2**10


def _files_table(folder: Path, repeats: int, images: int = 2000) -> Table:
    photos = Photos(20)
    files = {f"{number % 10}/{number:05d}.jpg": photos.read(number % 20) for number in range(images)}
    root = folder / "photos"
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    with tarfile.open(folder / "photos.tar", "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    table = pa.table({"image": [{"bytes": data, "path": name} for name, data in files.items()]})
    pq.write_table(table, folder / "photos.parquet", row_group_size=100)
    sources = {
        "folder": open_source(str(root)),
        "tar": open_source(str(folder / "photos.tar")),
        "Parquet": open_source(str(folder / "photos.parquet")),
    }
    order = np.random.default_rng(0).permutation(images).tolist()
    contenders = {name: partial(_read_all, source, order) for name, source in sources.items()}
    row = compare("read", contenders, items=images, repeats=repeats)
    size = sum(map(len, files.values())) / images / 1024
    note = f"{images} JPEGs of {size:.0f} KiB in random order, all of them in the system's cache."
    return Table("Reading files, one process", "images a second", [row], note)


def _read_all(source: ImageSet, order: list[int]) -> int:
    return sum(len(source.read(index)) for index in order)


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)


if __name__ == "__main__":
    main()

"""Remote shards: how well the window order mixes, and images a second beside a local disk.

    python -m benchmarks.remote

The shards lie behind an HTTP server on this machine, in a process of its own, that answers each request 50 ms
late. What is read there is copied by the thread of the run that reads it. The runs of the mixture learn from
textures whose shards are sorted by class, the worst case, for equally many steps; no run has seen a label.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.cifar10 import labels
from benchmarks.input import Photos
from benchmarks.measure import Row, Table, arguments, compare, report
from benchmarks.small import knn
from dino_vit.commands.pack import pack
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.custom import wrap
from dino_vit.data.image_set import ImageSet, ShardLayout
from dino_vit.data.shards import LocalCopies, Prefetch
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.synthetic import make_textures
from dino_vit.eval.features import FrozenBackbone
from dino_vit.models.backbone import Backbone
from dino_vit.reports.record import read_run
from dino_vit.training.pretrain import pretrain
from dino_vit.training.setup import build_untrained
from dino_vit.views.build import build_eval_transform, build_views
from dino_vit.views.loader import PREFETCH, Loader
from dino_vit.views.sampler import Sampler, ShardUses, WindowOrder
from dino_vit.weights import load_backbone
from tests.support.remote import Server

LATENCY = 0.05
SHARDS, PHOTOS, WINDOW = 60, 100, 8  # photos of 500 × 375 pixels in a shard
BATCH, BATCHES = 32, 6  # of a round
MIXED, ROOMS = 100, 100  # shards and images in each, of which the mixture is counted
TEXTURES, BANK, QUERIES = 4000, 2000, 1000
TEXTURE_SHARD = 480_000  # bytes of about 100 textures
STEPS, SEEDS = 800, 8
SMALL = {
    "recipe": "auto",
    "data.batch_size": 64,
    "data.workers": 0,
    "data.augment_on": "device",
    "model.arch": None,
    "model.width": 64,
    "model.depth": 3,
    "model.heads": 2,
    "model.patch_size": 8,
    "head.prototypes": 512,
    "head.hidden_dim": 128,
    "head.bottleneck_dim": 64,
    "views.global_size": 32,
    "views.local_size": 16,
    "views.local_count": 2,
    "budget.epochs": None,
    "budget.steps": STEPS,
    "run.precision": "no",
    "run.eval_every": None,
    "run.trackers": (),
}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        tables = [*reading(Path(folder), options.repeats), mixing(), learning(Path(folder))]
    report(tables, options)


def reading(folder: Path, repeats: int) -> list[Table]:
    """Compare copies of remote shards with local ones and with a request for each image."""
    photos = Photos(PHOTOS)
    size = sum(map(len, photos.files))
    repeated = wrap(photos).subset([number % PHOTOS for number in range(SHARDS * PHOTOS)])
    shards = folder / "shards"
    pack(repeated, shards, shard_bytes=size)
    with serving_apart(shards) as url:
        local, _ = loader_of(f"{shards}/*.tar")
        copied, disk = loader_of(f"{url}/{paths(shards, 'tar')}", folder / "copies")
        requested, _ = loader_of(f"{url}/{paths(shards, 'tar')}", folder / "none")
        (prefetch,) = copied.prefetch
        requested.prefetch = ()
        first = first_batch(copied)
        whole = first + window_complete(prefetch)
        warm = first_batch(copied)
        tars, disks = MetricsRecord(copied, disk), MetricsRecord(local)
        by_request = MetricsRecord(requested)
        rows = []
        for name, ours, other, count in (
            ("tar, beside a local disk", tars, disks, BATCHES),
            ("tar, beside a request for each image", tars, by_request, 1),  # it is slow
        ):
            ours.count = other.count = count
            rows.append(compare(name, {"copies": ours, "other": other}, items=BATCH * count, repeats=repeats))
        most = max(tars.seen) / 1e6
        for each in (tars, disks, by_request):
            each.batches.close()
    late = f"{1000 * LATENCY:.0f} ms for each request"
    where = f"{late}, {SHARDS} shards of {size / 1e6:.1f} MB, window {WINDOW}"
    note = f"The folder of copies had {most:.1f} MB at most, of data.cache_gb = {disk.limit / 1e6:.1f} MB."
    speed = {"cold cache": first, "cold cache, until the window is copied": whole, "warm cache": warm}
    return [
        Table(f"Reading shards, {where}, one worker", "photos a second", rows, note, "copies / other"),
        Table(
            f"Time to the first batch of {BATCH}, {where}",
            "seconds",
            [Row("photos", speed, first / warm)],
            ratio="cold / warm",
        ),
    ]


@contextmanager
def serving_apart(folder: Path) -> Iterator[str]:
    """Serve a folder from another process, and yield the address."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(folder, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(folder: Path, address: Connection) -> None:
    with Server(folder, LATENCY) as server:
        address.send(server.url)
        server.serve_forever()


def paths(folder: Path, suffix: str) -> str:
    """Return the names of the shards of a kind, as a pattern."""
    return "{" + ",".join(sorted(path.name for path in folder.glob(f"*.{suffix}"))) + "}"


def loader_of(spec: str, copies: Path | None = None) -> tuple[Loader, LocalCopies]:
    """Return a loader in the window order and, where it reads remotely, the copies of its shards."""
    source = open_source(spec)
    assert source.shards
    assert source.layout
    disk = source.shards.copies
    disk.folder, disk.limit = copies or Path(), float(np.sort(disk.sizes)[-2 * WINDOW :].sum())
    layout = source.layout
    sampler = Sampler(length=len(source), batch_size=BATCH, seed=0, layout=layout, window=WINDOW)
    ahead = WindowOrder(layout, 0, WINDOW).span // 2 + (PREFETCH + 1) * BATCH
    prefetch = Prefetch(disk, ShardUses(sampler, len(layout.sizes)).next, ahead) if copies else None
    views = build_views(PretrainConfig())
    return Loader(
        source=source, views=views, sampler=sampler, prefetch=[prefetch] if prefetch else [], workers=1
    ), disk


def first_batch(loader: Loader) -> float:
    """Return the seconds until a loader has made its first batch."""
    start = time.perf_counter()
    with closing(loader.batches()) as batches:
        next(batches)
        return time.perf_counter() - start


def window_complete(prefetch: Prefetch) -> float:
    """Return the seconds until all is copied that comes next."""
    start = time.perf_counter()
    while prefetch.copy_next():
        pass
    return time.perf_counter() - start


class MetricsRecord:
    """Batches of a loader, taken as fast as they come."""

    def __init__(self, loader: Loader, copies: LocalCopies | None = None) -> None:
        self.batches, self.copies, self.count = loader.batches(), copies, BATCHES
        self.seen = [0]  # bytes in the folder of the copies

    @contextmanager
    def opened(self) -> Iterator[None]:
        for _ in range(PREFETCH):  # which the worker has made while others were timed
            next(self.batches)
        yield

    def __call__(self) -> None:
        for _ in range(self.count):
            next(self.batches)
            if self.copies:
                files = self.copies.folder.glob("*.shard")
                self.seen.append(sum(path.stat().st_size for path in files))


def mixing() -> Table:
    """Count the pairs of images in a batch that come from one shard."""
    shards = np.repeat(np.arange(MIXED, dtype=np.int32), ROOMS)
    rows = []
    for window in (4, 16, 64, None):
        layout = ShardLayout.of(shards) if window else None
        sampler = Sampler(length=len(shards), batch_size=64, seed=0, layout=layout, window=window or 1)
        orders = [shards[sampler.order(epoch)] for epoch in range(20)]
        middle = len(shards) // 2
        places = {"begin": 0, "middle of an epoch": middle, "end": len(shards) - 64}
        shares = {name: mean(same(order[at : at + 64]) for order in orders) for name, at in places.items()}
        name = f"window of {window} shards" if window else "global"
        rows.append(Row(name, shares, shares["begin"] / shares["middle of an epoch"]))
    title = f"Pairs of images in a batch of 64 from one of {MIXED} shards, means of 20 epochs"
    return Table(title, "per cent", rows, ratio="begin / middle")


def same(shards: np.ndarray[tuple[int], np.dtype[np.int32]]) -> float:
    """Return the share of pairs, in per cent, that are equal."""
    counts = np.bincount(shards)
    return 100 * float((counts * (counts - 1)).sum()) / (len(shards) * (len(shards) - 1))


def learning(folder: Path) -> Table:
    """Train on shards that are sorted by class, in several orders."""
    textures = make_textures(length=TEXTURES + BANK + QUERIES)
    by_class = sorted(range(TEXTURES), key=lambda index: (textures.label(index), index))
    pack(textures.subset(by_class), folder / "textures", shard_bytes=TEXTURE_SHARD)
    orders = {"global": {}, "window of 16": {"data.window": 16}}
    found: dict[str, list[float]] = {name: [] for name in ("untrained", *orders)}
    for seed in range(SEEDS):
        for name, changes in orders.items():
            output = folder / f"{name}-{seed}"
            order = "window" if changes else "global"
            own = {"data.source": str(folder / "textures"), "output": str(output), "data.order": order}
            pretrain(replace(PretrainConfig(), {**SMALL, **own, **changes, "seed": seed}))
            found[name].append(judge(load_backbone(output), output, textures))
        found["untrained"].append(
            judge(build_untrained(read_run(output).config)[1].backbone, output, textures)
        )
    rows = []
    for name, values in found.items():
        speed = {
            "mean": mean(values),
            "deviation": stdev(values),
            **{f"seed {n}": v for n, v in enumerate(values)},
        }
        rows.append(Row(name, speed, mean(values) / mean(found["global"])))
    shards = len(list((folder / "textures").glob("*.tar")))
    title = f"k-NN of textures in {shards} shards sorted by class, {STEPS} steps of 64, one core"
    return Table(title, "per cent", rows, ratio="mean / global")


def judge(backbone: Backbone, run: Path, textures: ImageSet) -> float:
    """Return the k-NN of textures that were not learned from."""
    transform = build_eval_transform(read_run(run).config)
    parts = [range(TEXTURES, TEXTURES + BANK), range(TEXTURES + BANK, TEXTURES + BANK + QUERIES)]
    features, targets = [], []
    for part in parts:
        places = list(part)
        features.append(
            FrozenBackbone(model=backbone, transform=transform, batch_size=256)
            .extract(textures, places)
            .values
        )
        targets.append(labels(textures, torch.tensor(places)))
    return knn(features[0], targets[0], features[1], targets[1])


if __name__ == "__main__":
    main()

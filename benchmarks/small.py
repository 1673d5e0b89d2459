"""Small sets in little time: what `recipe=auto` and nothing else makes of a few thousand images.

    python -m benchmarks.small FOLDER --out benchmarks/results/cpu/small.json [--minutes 10] [--seeds 3]

FOLDER holds flowers/train.parquet, flowers/test.parquet and the same of groceries, hands and cifar10; the
textures are generated, and the grey sets are made of the coloured ones. Each run has a core to itself
(--cores: or more), and as many run at a time as there are cores; with --peer, lightly-train's DINO takes as
long on the same core. A run that has ended is judged as it is, so the program goes on where it was. Judged by
k-NN (k = 20) and a logistic regression, with 10,000 training images in the bank and 2,000 test images, or
with all (--whole); no run has seen a label of any image. What decides between recipes is how far k-NN is
above raw pixels, on average over the sets: the note of the first table says it.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from itertools import product, repeat
from pathlib import Path
from queue import Queue
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from benchmarks.cifar10 import labels
from benchmarks.measure import Row, Table, arguments, report
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.data.image_set import ImageSet
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.synthetic import make_textures
from dino_vit.eval.classification.probes import count_correct, train_logistic
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.online import rankme
from dino_vit.eval.reading import pixel_features
from dino_vit.models.backbone import Backbone, FeatureSpec
from dino_vit.reports.record import read_run, verdict
from dino_vit.training.budget import measured_seconds
from dino_vit.training.setup import build_untrained, open_context
from dino_vit.views.build import build_eval_transform
from dino_vit.weights import load_backbone

GREY = "-grey"  # after the name of a set: the same images without colours
PHOTOS = ("flowers", "groceries", "hands")
SETS = ("textures", "cifar10", *(f"{name}{grey}" for name in PHOTOS for grey in ("", GREY)))
TEXTURES = 20_000
GENERATED = {"textures": f"synthetic:{TEXTURES}:32"}
PIXELS = 48  # largest side of images whose raw pixels are compared
K = 20
Judged = tuple[int | None, int | None]  # images of the bank and of the queries; None: all
QUERIES = 2000
JUDGED: Judged = (10_000, QUERIES)
PENALTIES, ITERATIONS = (1e-3, 1e-2, 1e-1, 1.0), 200
TIMINGS = 3  # of each variant's step
PEER = "lightly-train"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LIGHTLY_TRAIN_EVENTS_DISABLED": "1"}


def main(description: str = __doc__.splitlines()[0], **defaults: Any) -> None:
    """Train and judge; `defaults` are of the options."""
    parser = arguments(description)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=10, help="of a run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each set (default %(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="of a run (default %(default)s)")
    parser.add_argument("--sets", nargs="*", default=SETS[:-1], choices=SETS, metavar="SET")
    parser.add_argument("--whole", action="store_true", help="judge by all images")
    parser.add_argument("--peer", action="store_true", help="train lightly-train's DINO as long, beside")
    parser.add_argument("--runs", type=Path, default=Path("runs/small"), help="their folders go here")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="to try another recipe")
    parser.set_defaults(repeats=0, threads=1, **defaults)
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    folders = {
        name: (options.runs / "sets" if name.endswith(GREY) else options.folder) / name
        for name in options.sets
        if name not in GENERATED
    }
    for name, folder in folders.items():
        for part in ("train.parquet", "test.parquet"):
            if name.endswith(GREY) and not (folder / part).exists():
                write_grey(options.folder / name.removesuffix(GREY) / part, folder / part)
    jobs = [
        Job(
            name,
            seed,
            options.runs / f"{name}-{seed}",
            [f"budget.minutes={options.minutes}", *options.settings],
        )
        for seed, name in product(range(options.seeds), options.sets)
    ]
    train(jobs, folders, options.minutes if options.peer else None, options.cores)
    most = (None, None) if options.whole else JUDGED
    free = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(free, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        outputs, names = [job.output for job in jobs], [job.name for job in jobs]
        judged = list(pool.map(judge, outputs, names, repeat(folders), repeat(most)))
    figures = {
        name: [found for job, found in zip(jobs, judged, strict=True) if job.name == name]
        for name in options.sets
    }
    told = [f"{job.name}, seed {job.seed}: {said(job.output)}" for job in jobs]
    cores = "one core" if options.cores == 1 else f"{options.cores} cores"
    title = f"Small sets, {options.minutes:g} minutes of {cores}, recipe=auto, seeds: {options.seeds}"
    neighbours = [row_of(name, "k-NN", figures[name]) for name in options.sets]
    above = mean(row.speed["trained"] - row.speed["raw pixels"] for row in neighbours)
    note = f"Mean of the seeds; above raw pixels by {above:.1f} points on average over the sets. "
    note += "What the runs said of themselves at their end: " + " ".join(told)
    others = [figure for figure in figures[options.sets[0]][0]["untrained"] if figure != "k-NN"]
    rest = [row_of(name, figure, figures[name]) for name, figure in product(options.sets, others)]
    tables = [
        Table(f"{title}: k-NN of the CLS token", "per cent", neighbours, note, ratio="trained / best other"),
        Table(f"{title}: other readings", "per cent, or dimensions", rest, ratio="trained / untrained"),
    ]
    report(tables, options)


def write_grey(source: Path, target: Path) -> None:
    """Write a Parquet file of images again, in grey."""
    table = pq.read_table(source)
    images = []
    for one in table["image"].to_pylist():
        buffer = io.BytesIO()
        Image.open(io.BytesIO(one["bytes"])).convert("L").save(buffer, "JPEG", quality=92)
        images.append({**one, "bytes": buffer.getvalue()})
    column = table.schema.get_field_index("image")
    field = table.schema.field("image")
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.set_column(column, field, pa.array(images, type=field.type)), target)


class Job(NamedTuple):
    """A run to make."""

    name: str  # of the set
    seed: int
    output: Path
    settings: Sequence[str]
    tree: Path | None = None  # of another version of the project


def measured_steps(variants: dict[str, list[str]], minutes: float, known: Path) -> dict[str, int]:
    """Return the steps of one core that fit into the minutes for each variant, measured in turn, once.

    So what else the machine does during the runs changes nothing.
    """
    if known.exists():
        found: dict[str, int] = json.loads(known.read_bytes())
        return found
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        seconds = list(pool.map(step_seconds, [*variants.values()] * TIMINGS))
    steps = {
        variant: round(60 * minutes / median(seconds[number :: len(variants)]))
        for number, variant in enumerate(variants)
    }
    write_bytes(known, json.dumps(steps).encode())
    return steps


def step_seconds(settings: list[str]) -> float:
    """Return the seconds of a step on one core."""
    torch.set_num_threads(1)
    config = load(PretrainConfig, None, [*settings, "budget.steps=1000"])
    return measured_seconds(config, open_context(config, start_processes()))[0]


def of_set(name: str, folders: dict[str, Path]) -> list[str]:
    """Return the settings of all runs on a set."""
    source = folders[name] / "train.parquet" if name in folders else GENERATED[name]
    return [f"data.source={source}", "data.workers=0", "recipe=auto"]


def train(
    jobs: Sequence[Job], folders: dict[str, Path], peer: float | None = None, cores_of_each: int = 1
) -> None:
    """Train all that have not ended, each on cores of its own; lightly-train beside for `peer` minutes."""
    cores: Queue[list[int]] = Queue()
    there = sorted(os.sched_getaffinity(0))
    for first in range(0, len(there) - cores_of_each + 1, cores_of_each):
        cores.put(there[first : first + cores_of_each])

    def one(job: Job) -> None:
        name, seed, output, settings, tree = job
        own = [*of_set(name, folders), f"seed={seed}", f"output={output}"]
        if cores_of_each > 1:
            own.remove("data.workers=0")
        mine = cores.get()
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.with_suffix(".log").open("a") as log:
                commands = [["dino_vit", "pretrain", *own, *settings]]
                if peer and not (peer_of(output) / "weights.pth").exists():
                    budget = [f"--minutes={peer}", f"--seed={seed}"]
                    commands.append(["benchmarks.small_peer", str(output), str(peer_of(output)), *budget])
                environ = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(cores_of_each)}
                pin: Callable[[], None] = lambda: os.sched_setaffinity(0, mine)  # noqa: E731
                for command in commands:
                    whole = [sys.executable, "-m", *command]
                    options: dict[str, Any] = {"cwd": tree, "env": environ, "preexec_fn": pin}
                    subprocess.run(whole, stdout=log, stderr=log, check=True, **options)
            print(f"{output}: {said(output)}", file=sys.stderr, flush=True)
        finally:
            cores.put(mine)

    with ThreadPoolExecutor(cores.qsize()) as pool:
        list(pool.map(one, jobs))


def peer_of(output: Path) -> Path:
    """Return the folder of lightly-train's run beside ours."""
    return output.with_name(f"{output.name}-peer")


def said(output: Path) -> str:
    """Return what a run said of itself in its last lines."""
    return " ".join(verdict(read_run(output)).paragraphs)


def parts(name: str, folders: dict[str, Path], judged: Judged) -> Iterator[tuple[ImageSet, list[int]]]:
    """Yield the bank and the queries: a source, and the places of the images in a random order."""
    if name in folders:
        opened = [open_source(str(folders[name] / f"{part}.parquet")) for part in ("train", "test")]
    else:
        whole = make_textures(length=TEXTURES + QUERIES)
        opened = [whole.subset(range(TEXTURES)), whole.subset(range(TEXTURES, len(whole)))]
    for source, most in zip(opened, judged, strict=True):
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
        yield source, order[:most].tolist()


def judge(
    output: Path, name: str, folders: dict[str, Path], judged: Judged = JUDGED
) -> dict[str, dict[str, float]]:
    """Return the figures of the trained network, of the untrained one and of raw pixels."""
    record = read_run(output)
    transform = build_eval_transform(record.config)
    sets = list(parts(name, folders, judged))
    targets = [labels(source, torch.tensor(places)) for source, places in sets]
    spec = FeatureSpec(tokens="cls+mean", blocks=min(4, record.config.model.shape[1]))

    def features(model: Backbone) -> list[Tensor]:
        return [
            FrozenBackbone(model=model, transform=transform, batch_size=256)
            .extract(source, places, spec=spec)
            .values
            for source, places in sets
        ]

    networks = {"trained": load_backbone(output), "untrained": build_untrained(record.config)[1].backbone}
    found = {}
    for title, model in networks.items():
        bank, queries = features(model)
        cls = FeatureSpec().columns_in(spec, model.width)
        found[title] = {
            "k-NN": knn(bank[:, cls], targets[0], queries[:, cls], targets[1]),
            "k-NN of 4 blocks + mean patch": knn(bank, targets[0], queries, targets[1]),
            "linear": linear(bank[:, cls], targets[0], queries[:, cls], targets[1]),
            "effective rank": rankme(bank[:QUERIES, cls]),
        }
    small = replace(transform, size=(min(transform.size[0], PIXELS),) * 2)
    pixels = [pixel_features(s, places, transform=small).values for s, places in sets]
    if (weights := peer_of(output) / "weights.pth").exists():
        model = load_backbone(weights, format="timm", heads=record.config.model.shape[2])
        bank, queries = features(model)
        readings = (FeatureSpec().columns_in(spec, model.width), slice(-model.width, None))
        scores = [knn(bank[:, part], targets[0], queries[:, part], targets[1]) for part in readings]
        found[PEER] = {"k-NN": max(scores)}  # of CLS or of the mean patch, which it trains
    found["raw pixels"] = {"k-NN": knn(pixels[0], targets[0], pixels[1], targets[1])}
    return found


def knn(bank: Tensor, bank_targets: Tensor, queries: Tensor, targets: Tensor) -> float:
    """Return the share of queries that their neighbours classify rightly."""
    ranked = weighted_knn(bank, bank_targets, queries, k=[K])[K]
    return 100 * float((ranked[:, 0] == targets).float().mean())


def linear(bank: Tensor, bank_targets: Tensor, queries: Tensor, targets: Tensor) -> float:
    """Return the accuracy of a logistic regression whose penalty is chosen on a fifth of the bank."""
    held = len(bank) // 5
    classes = int(bank_targets.max()) + 1
    options: dict[str, Any] = {"cs": PENALTIES, "classes": classes, "max_iterations": ITERATIONS}
    heads = train_logistic(bank[held:], bank_targets[held:], **options)
    best = int(count_correct(heads, bank[:held], bank_targets[:held]).argmax())
    return 100 * int(count_correct(heads, queries, targets)[best]) / len(queries)


def row_of(name: str, figure: str, found: Sequence[dict[str, dict[str, float]]]) -> Row:
    """Return the means over the seeds of a figure."""
    titles = [title for title in found[0] if figure in found[0][title]]
    values = {title: mean(one[title][figure] for one in found) for title in titles}
    spread = [one["trained"][figure] for one in found]
    deviation = f" ± {stdev(spread):.1f}" if len(spread) > 1 else ""
    best = max(value for title, value in values.items() if title != "trained")
    return Row(f"{name}: {figure}{deviation}", values, values["trained"] / best)


if __name__ == "__main__":
    main()

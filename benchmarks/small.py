"""Small sets in little time: what `recipe=auto` and nothing else makes of a few thousand images.

    python -m benchmarks.small small FOLDER --out benchmarks/results/cpu/small.json
    python -m benchmarks.small race FOLDER --plot docs/race.png --out benchmarks/results/cpu/race.json

`small` trains ten minutes of one core, two seeds; `hours` an hour of two cores, judged by all images;
`race` one and five minutes beside lightly-train's DINO, which takes as long on the same core; `cifar10` the
hour of configs/pretrain/cifar10_cpu.yaml. FOLDER holds flowers/train.parquet, flowers/test.parquet and the
same of groceries, hands and cifar10; textures are generated, and the grey sets are made of the coloured ones.
As many runs go at a time as there are cores for. One that has ended is judged as it is, so the program goes
on where it was. Judged by k-NN (k = 20) and a logistic regression, with 10,000 training images in the bank
and 2,000 test images, or with all (--whole); no run has seen a label. What decides between recipes is what a
user gets: the mean of k-NN of CLS token and cells, levelled, and of what `predict` makes of 200 labels: how
many of 100 others, of 2,000 training images, it labels rightly. The note of the first table says it.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product, repeat
from pathlib import Path
from queue import Queue
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

import dino_vit
from benchmarks.measure import Row, Table, arguments, report
from dino_vit.config.sections import BASELINES
from dino_vit.data.image_set import ImageSet
from dino_vit.data.labels import Labels
from dino_vit.data.open import open_source
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.linear import count_correct
from dino_vit.eval.logistic import train_logistic
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.online import rankme
from dino_vit.features.frozen import FrozenBackbone, build_baseline
from dino_vit.features.readings import fit_levelling, levelled_spec
from dino_vit.models.backbone import Backbone, FeatureSpec
from dino_vit.reports.record import read_run, verdict
from dino_vit.training.networks import build_untrained
from dino_vit.views.build import build_eval_transform
from dino_vit.weights import load_backbone, save_backbone

GREY = "-grey"  # after the name of a set: the same images without colours
PHOTOS = ("flowers", "groceries", "hands")
SETS = ("textures", "cifar10", *(f"{name}{grey}" for name in PHOTOS for grey in ("", GREY)))
TEXTURES, SIDE = 20_000, 32  # generated images, and their side
K, QUERIES = 20, 2000
Judged = tuple[int | None, int | None]  # images of the bank and of the queries; None: all
JUDGED: Judged = (10_000, QUERIES)
PENALTIES, ITERATIONS = (1e-3, 1e-2, 1e-1, 1.0), 200
LABELS, OF, DRAWS = 200, 2000, 3  # labels, of so many images of the bank, drawn at random
READ = "k-NN of CLS + cells, levelled", "predict, 200 labels"  # the figures that decide
PEER = "lightly-train"
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "LIGHTLY_TRAIN_EVENTS_DISABLED": "1"}
CIFAR10 = Path(__file__).parents[1] / "configs" / "pretrain" / "cifar10_cpu.yaml"
USUAL: dict[str, Any] = {"seeds": 1, "cores": 1, "whole": False, "peer": False, "config": None}
WHAT: dict[str, dict[str, Any]] = {
    "small": {"minutes": [10], "seeds": 2, "sets": (*PHOTOS, "cifar10")},
    "hours": {"minutes": [60], "sets": ("groceries", "flowers", "cifar10"), "cores": 2, "whole": True},
    "race": {"minutes": [1, 5], "sets": (*PHOTOS, "cifar10"), "peer": True},
    "cifar10": {"minutes": [], "sets": ("cifar10",), "cores": 2, "whole": True, "config": CIFAR10},
}
COLOURS = {"trained": "#1f5fbf", PEER: "#b5522b", "pixels": "#555555", "edges": "#999999"}
Figures = dict[str, dict[str, float]]  # by who is judged, and by figure


class Job(NamedTuple):
    """A run to make; without minutes, of the length of its configuration."""

    name: str  # of the set
    minutes: float | None
    seed: int
    output: Path


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=WHAT, metavar="WHAT", help=", ".join(WHAT))
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, nargs="*", help="of the runs")
    parser.add_argument("--seeds", type=int, help="runs of each set")
    parser.add_argument("--cores", type=int, help="of a run")
    parser.add_argument("--sets", nargs="*", choices=SETS, metavar="SET")
    parser.add_argument("--whole", action="store_true", default=None, help="judge by all images")
    parser.add_argument("--peer", action="store_true", default=None, help="train lightly-train's DINO beside")
    parser.add_argument("--config", type=Path, help="in the place of recipe=auto")
    parser.add_argument("--runs", type=Path, default=Path("runs/small"), help="their folders go here")
    parser.add_argument("--plot", type=Path, help="PNG to draw of k-NN over minutes")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="to try another recipe")
    parser.set_defaults(repeats=0, threads=1)
    options = parser.parse_intermixed_args()
    given = {key: value for key, value in vars(options).items() if value is not None}
    options = argparse.Namespace(**{**vars(options), **USUAL, **WHAT[options.what], **given})
    torch.set_num_threads(1)
    folders = prepare(options.sets, options.folder, options.runs)
    jobs = [
        Job(name, minutes, seed, options.runs / f"{options.what}-{name}-{minutes or 0:g}-{seed}")
        for minutes, seed, name in product(options.minutes or [None], range(options.seeds), options.sets)
    ]
    train(jobs, folders, options)
    most = (None, None) if options.whole else JUDGED
    free = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(free, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        judged = list(pool.map(judge_job, jobs, repeat(folders), repeat(most)))
    found = tables(jobs, judged, options)
    report(found, options)
    if options.plot:
        draw(found[0].rows, options.plot)


def prepare(names: Sequence[str], given: Path, runs: Path) -> dict[str, Path]:
    """Return the folders of sets that are not generated; make those in grey."""
    folders = {}
    for name in names:
        if name == "textures":
            continue
        folders[name] = (runs / "sets" if name.endswith(GREY) else given).absolute() / name
        for part in ("train.parquet", "test.parquet"):
            if name.endswith(GREY) and not (folders[name] / part).exists():
                write_grey(given / name.removesuffix(GREY) / part, folders[name] / part)
    return folders


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


def train(jobs: Sequence[Job], folders: Mapping[str, Path], options: argparse.Namespace) -> None:
    """Train all that have not ended, each on cores of its own."""
    cores: Queue[list[int]] = Queue()
    there = sorted(os.sched_getaffinity(0))
    for first in range(0, len(there) - options.cores + 1, options.cores):
        cores.put(there[first : first + options.cores])

    def train_one(job: Job) -> None:
        mine = cores.get()
        environ = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(len(mine))}
        try:
            job.output.parent.mkdir(parents=True, exist_ok=True)
            with job.output.with_suffix(".log").open("a") as log:
                for command in commands(job, folders, options):
                    whole = [
                        "taskset",
                        "--cpu-list",
                        ",".join(map(str, mine)),
                        sys.executable,
                        "-m",
                        *command,
                    ]
                    subprocess.run(whole, stdout=log, stderr=log, check=True, env=environ)
            print(f"{job.output}: {said(job.output)}", file=sys.stderr, flush=True)
        finally:
            cores.put(mine)

    with ThreadPoolExecutor(cores.qsize()) as pool:
        list(pool.map(train_one, jobs))


def commands(job: Job, folders: Mapping[str, Path], options: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the run, and lightly-train's beside it."""
    source = folders[job.name] / "train.parquet" if job.name in folders else f"synthetic:{TEXTURES}:{SIDE}"
    own = [f"data.source={source}", f"seed={job.seed}", f"output={job.output}"]
    own += ["recipe=auto"] if options.config is None else ["--config", str(options.config)]
    own += [] if job.minutes is None else [f"budget.minutes={job.minutes:g}"]
    own += ["data.workers=0"] if options.cores == 1 else []
    yield ["dino_vit", "pretrain", *own, *options.settings]
    peer = peer_of(job.output)
    if options.peer and not (peer / "weights.pth").exists():
        budget = [f"--minutes={job.minutes:g}", f"--seed={job.seed}"]
        yield ["benchmarks.peer", str(job.output), str(peer), *budget]


def peer_of(output: Path) -> Path:
    """Return the folder of lightly-train's run beside ours."""
    return output.with_name(f"{output.name}-peer")


def said(output: Path) -> str:
    """Return what a run said of itself in its last lines."""
    return " ".join(verdict(read_run(output)).paragraphs)


def parts(name: str, folders: Mapping[str, Path], judged: Judged) -> Iterator[tuple[ImageSet, list[int]]]:
    """Yield the bank and the queries: a source, and the indices of the images in a random order."""
    if name in folders:
        opened = [open_source(str(folders[name] / f"{part}.parquet")) for part in ("train", "test")]
    else:
        textures = make_textures(length=TEXTURES + QUERIES, size=SIDE)
        opened = [textures.subset(range(TEXTURES)), textures.subset(range(TEXTURES, len(textures)))]
    for source, most in zip(opened, judged, strict=True):
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
        yield source, order[:most].tolist()


def judge_job(job: Job, folders: Mapping[str, Path], judged: Judged = JUDGED) -> Figures:
    """Return the figures of the trained network, of the untrained one and of the baselines."""
    record = read_run(job.output)
    transform = build_eval_transform(record.config)
    sets = list(parts(job.name, folders, judged))
    targets = [torch.tensor([source.label(index) for index in indices]) for source, indices in sets]
    cls = slice(record.config.model.shape[0])

    def features(model: Backbone, spec: FeatureSpec) -> list[Tensor]:
        frozen = FrozenBackbone(model=model, transform=transform, batch_size=256)
        return [frozen.extract(source, indices, spec=spec).values for source, indices in sets]

    def knn(bank: Tensor, queries: Tensor) -> float:
        ranked = weighted_knn(bank, targets[0], queries, k=[K])[K]
        return 100 * float((ranked[:, 0] == targets[1]).float().mean())

    networks = {"trained": load_backbone(job.output), "untrained": build_untrained(record.config)[1].backbone}
    found: Figures = {}
    for title, model in networks.items():
        spec = levelled_spec(model)
        bank, queries = features(model, spec)
        found[title] = {
            "k-NN": knn(bank[:, cls], queries[:, cls]),
            READ[0]: knn(*map(fit_levelling(bank, spec.widths(model)), (bank, queries))),
            "linear": linear(bank[:, cls], targets[0], queries[:, cls], targets[1]),
            "effective rank": rankme(bank[:QUERIES, cls]),
        }
    for name in BASELINES:
        baseline = build_baseline(name, sets[0][0], pixels=transform.pixels)
        frozen = FrozenBackbone(model=baseline, transform=baseline.transform)
        found[name] = {"k-NN": knn(*(frozen.extract(source, indices).values for source, indices in sets))}
    if (peer := peer_of(job.output) / "weights.pth").exists():
        networks[PEER] = load_backbone(peer, format="timm", heads=record.config.model.shape[2])
        bank, queries = features(networks[PEER], FeatureSpec(tokens="cls+mean"))
        readings = (cls, slice(-networks[PEER].width, None))  # of CLS or of the mean patch, which it trains
        found[PEER] = {"k-NN": max(knn(bank[:, part], queries[:, part]) for part in readings)}
    few = sets[0][0].subset(sets[0][1][:OF])
    with tempfile.TemporaryDirectory() as folder:
        for title, figures in found.items():
            weights = f"{folder}/{title}.safetensors" if title in networks else title
            if title in networks:
                save_backbone(networks[title], weights, mean=transform.mean, std=transform.std)
            figures[READ[1]] = predicted(few, weights, folder)
    return found


def linear(bank: Tensor, bank_targets: Tensor, queries: Tensor, targets: Tensor) -> float:
    """Return the accuracy of a logistic regression whose penalty is chosen on a fifth of the bank."""
    held = len(bank) // 5
    classes = int(bank_targets.max()) + 1
    options: dict[str, Any] = {"cs": PENALTIES, "classes": classes, "max_iterations": ITERATIONS}
    heads = train_logistic(bank[held:], bank_targets[held:], **options)
    best = int(count_correct(heads, bank[:held], bank_targets[:held]).argmax())
    return 100 * int(count_correct(heads, queries, targets)[best]) / len(queries)


def predicted(images: ImageSet, weights: str, cache: str) -> float:
    """Return how many of 100 images `predict` labels rightly by a few others, on average over some draws."""
    truth, right = images.codes(), 0
    for draw in range(DRAWS):
        few = torch.randperm(len(images), generator=torch.Generator().manual_seed(draw))[:LABELS].numpy()
        codes = np.full(len(images), -1)
        codes[few] = truth[few]
        labelled = images.with_labels(Labels(codes.take, images.labels.names))
        found = dino_vit.predict(labelled, weights, cache=cache, verbose=False)
        names = np.array(images.labels.names)[np.delete(truth, few)]
        right += int((names == found.labels).sum())
    return 100 * right / (DRAWS * (len(images) - LABELS))


def tables(jobs: Sequence[Job], judged: Sequence[Figures], options: argparse.Namespace) -> list[Table]:
    """Tabulate the means over the seeds of all figures."""
    by_row: dict[str, list[Figures]] = {}
    for job, found in zip(jobs, judged, strict=True):
        minutes = f", {job.minutes:g} minute{'s' * (job.minutes != 1)}" if job.minutes else ""
        by_row.setdefault(job.name + minutes * (len(options.minutes) > 1), []).append(found)
    neighbours = [row_of(name, "k-NN", found) for name, found in by_row.items()]
    figures = [figure for figure in judged[0]["untrained"] if figure != "k-NN"]
    others = [row_of(name, figure, found) for (name, found), figure in product(by_row.items(), figures)]
    cls = mean(one["trained"]["k-NN"] for one in judged)
    read = mean(one["trained"][figure] for one in judged for figure in READ)
    note = f"Means of the seeds. Over all sets CLS {cls:.1f}; CLS + cells, k-NN and predict, {read:.1f}."
    minutes = " and ".join(f"{one:g}" for one in options.minutes) or "all"
    recipe = "recipe=auto" if options.config is None else options.config.name
    cores = "one core" if options.cores == 1 else f"{options.cores} cores"
    title = f"Small sets, {minutes} minutes of {cores}, {recipe}, seeds: {options.seeds}"
    knn = Table(f"{title}: k-NN of the CLS token", "per cent", neighbours, note, ratio="trained / best other")
    rest = Table(f"{title}: other readings", "per cent, or dimensions", others, ratio="trained / untrained")
    return [knn, rest]


def row_of(name: str, figure: str, found: Sequence[dict[str, dict[str, float]]]) -> Row:
    """Return the means over the seeds of a figure."""
    titles = [title for title in found[0] if figure in found[0][title]]
    values = {title: mean(one[title][figure] for one in found) for title in titles}
    spread = [one["trained"][figure] for one in found]
    deviation = f" ± {stdev(spread):.1f}" if len(spread) > 1 else ""
    best = max(value for title, value in values.items() if title != "trained")
    return Row(f"{name}: {figure}{deviation}", values, values["trained"] / best)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw k-NN over minutes, a plot for each set and a line for each network."""
    from matplotlib.figure import Figure

    sets = dict.fromkeys(row.name.partition(",")[0] for row in rows)
    figure = Figure(figsize=(3 * len(sets), 3), layout="constrained")
    for number, name in enumerate(sets, 1):
        axis = figure.add_subplot(1, len(sets), number)
        own = [row for row in rows if row.name.startswith(f"{name},")]
        minutes = [0.0, *(float(row.name.split()[1]) for row in own)]
        for title, colour in COLOURS.items():
            values = [own[0].speed["untrained"], *(row.speed[title] for row in own if title in row.speed)]
            style: dict[str, Any] = {"color": colour, "label": "dino-vit" if title == "trained" else title}
            if title in BASELINES and title in own[0].speed:
                axis.axhline(values[-1], linestyle=":", **style)
            elif len(values) == len(minutes):
                axis.plot(minutes, values, marker="o", markersize=4, **style)
        axis.set(title=name, xlabel="minutes of one core", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        if number == 1:
            axis.set_ylabel("k-NN on test images, per cent")
            axis.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

"""Small sets in little time: what `recipe=auto` and nothing else makes of a few thousand images.

    python -m benchmarks.small small FOLDER --out benchmarks/results/cpu/small.json
    python -m benchmarks.small race FOLDER --plot docs/race.png --out benchmarks/results/cpu/race.json

`small` trains ten minutes of one core, two seeds; `hours` an hour of two cores, judged by all images;
`race` one and five minutes beside lightly-train's DINO, which takes as long on the same core; `cifar10` the
hour of configs/pretrain/cifar10_cpu.yaml. FOLDER holds flowers/train.parquet, flowers/test.parquet and the
same of groceries, hands and cifar10; textures are generated, and the grey sets are made of the coloured ones.
As many runs go at a time as there are cores for. One that has ended is judged as it is, so the program goes
on where it was.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product, repeat
from pathlib import Path
from queue import Queue
from statistics import mean, stdev
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from benchmarks import judging
from benchmarks.judging import JUDGED, PEER, READ, SIDE, TEXTURES, Figures, judge_run, peer_of
from benchmarks.measure import Row, Table, arguments, report
from dino_vit.config.sections import BASELINES
from dino_vit.reports.record import read_run, verdict

GREY = "-grey"  # after the name of a set: the same images without colours
PHOTOS = ("flowers", "groceries", "hands")
SETS = ("textures", "cifar10", *(f"{name}{grey}" for name in PHOTOS for grey in ("", GREY)))
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


class Job(NamedTuple):
    """A run to make; without minutes, of the length of its configuration."""

    name: str  # of the set
    minutes: float | None
    seed: int
    output: Path


def main() -> None:
    parser = arguments(f"{__doc__}\n{judging.__doc__}")
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
        runs = [job.output for job in jobs], [job.name for job in jobs]
        judged = list(pool.map(judge_run, *runs, repeat(folders), repeat(most)))
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


def said(output: Path) -> str:
    """Return what a run said of itself in its last lines."""
    return " ".join(verdict(read_run(output)).paragraphs)


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

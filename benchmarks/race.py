"""The race: k-NN on small sets after so many minutes of one core, by version and beside lightly-train.

    python -m benchmarks.race FOLDER --out benchmarks/results/cpu/race.json --plot docs/race.png [--peer]

FOLDER is that of `benchmarks.small`. Each version trains with `recipe=auto` and nothing else, in a worktree
of its own commit, for each of the minutes in a run of its own, as schedules follow the budget. All are judged
by today's code: k-NN (k = 20) of the CLS token, training images in the bank, test images asked. Each run has
a core to itself; --peer adds lightly-train's DINO on the same core, network and views.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product, repeat
from pathlib import Path

import torch

from benchmarks.measure import Row, Table, arguments, report
from benchmarks.small import PEER, Job, judge, train

VERSIONS = {"0.3.0": "f0b96155"}  # the commits beside which today's code runs
NOW, PIXELS, UNTRAINED = "now", "raw pixels", "untrained"
SETS = ("flowers", "groceries", "hands", "cifar10")
COLOURS = {NOW: "#1f5fbf", PEER: "#b5522b", PIXELS: "#555555"}
Curves = dict[str, dict[float, float]]  # k-NN by minutes, by who trained


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, nargs="*", default=[3, 10], help="of the runs (3 and 10)")
    parser.add_argument("--sets", nargs="*", default=SETS, choices=SETS, metavar="SET")
    parser.add_argument("--peer", action="store_true", help="train lightly-train's DINO as long, beside")
    parser.add_argument("--runs", type=Path, default=Path("runs/race"), help="their folders go here")
    parser.add_argument("--plot", type=Path, help="PNG to draw")
    parser.set_defaults(repeats=0, threads=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = {name: options.folder.absolute() / name for name in options.sets}
    runs = options.runs.absolute()
    trees = {
        NOW: None,
        **{version: worktree(ref, runs / f"tree-{version}") for version, ref in VERSIONS.items()},
    }
    jobs = {
        (version, minutes, name): Job(
            name, 0, runs / f"{version}-{minutes:g}" / name, [f"budget.minutes={minutes:g}"], tree
        )
        for minutes, (version, tree), name in product(options.minutes, trees.items(), options.sets)
    }
    for minutes in options.minutes:
        of_now = [
            job for (version, for_minutes, _), job in jobs.items() if (version, for_minutes) == (NOW, minutes)
        ]
        train(of_now, folders, minutes if options.peer else None)
    train([job for (version, *_), job in jobs.items() if version != NOW], folders)
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        outputs = [job.output for job in jobs.values()]
        judged = pool.map(judge, outputs, [name for *_, name in jobs], repeat(folders))
    curves: dict[str, Curves] = {name: {} for name in options.sets}
    for (version, minutes, name), found in zip(jobs, judged, strict=True):
        add = curves[name].setdefault
        add(version, {0: found[UNTRAINED]["k-NN"]})[minutes] = found["trained"]["k-NN"]
        if version == NOW:
            add(PIXELS, {})[minutes] = found[PIXELS]["k-NN"]
            add(UNTRAINED, {})[minutes] = found[UNTRAINED]["k-NN"]
            if PEER in found:
                add(PEER, {})[minutes] = found[PEER]["k-NN"]
    rows = [row_of(name, minutes, curves[name]) for name, minutes in product(options.sets, options.minutes)]
    title = "The race: k-NN on small sets after minutes of one core, recipe=auto, seed 0"
    note = "Untrained and raw pixels are of today's code; of lightly-train's tokens the better one."
    report([Table(title, "per cent", rows, note, ratio="now / best other")], options)
    if options.plot:
        draw(curves, options.plot)


def worktree(ref: str, folder: Path) -> Path:
    """Return a folder with the files of a commit."""
    if not folder.exists():
        command = ["git", "worktree", "add", "--detach", str(folder), ref]
        subprocess.run(command, cwd=Path(__file__).parent, check=True)
    return folder


def row_of(name: str, minutes: float, curves: Curves) -> Row:
    """Return the figures of a set after some minutes."""
    values = {title: points[minutes] for title, points in curves.items() if minutes in points}
    best = max(value for title, value in values.items() if title != NOW)
    time = f"{minutes:g} minute" + "s" * (minutes != 1)
    return Row(f"{name}, {time}", values, values[NOW] / best)


def draw(curves: Mapping[str, Curves], path: Path) -> None:
    """Draw a plot for each set: k-NN over minutes, a line for each version."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(curves), 3), layout="constrained")
    for number, (name, by_title) in enumerate(curves.items(), 1):
        axis = figure.add_subplot(1, len(curves), number)
        for title, points in by_title.items():
            colour = COLOURS.get(title, "#7aa6e0")
            if title == PIXELS:
                axis.axhline(next(iter(points.values())), color=colour, linestyle=":", label=title)
            elif title != UNTRAINED:
                x: Sequence[float] = sorted(points)
                y = [points[minutes] for minutes in x]
                axis.plot(x, y, marker="o", markersize=4, color=colour, label=title)
        axis.set(title=name, xlabel="minutes of one core", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        if number == 1:
            axis.set_ylabel("k-NN on test images, per cent")
            axis.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

"""Measure contenders side by side: interleaved repeats, their medians, peak memory, one Markdown table.

Every round runs all contenders in turn, so what else the machine does hits them alike. On CUDA a contender is
called ten times between two waits for the device, as a training loop queues its steps. Our own comes first;
its advantage is the median over the rounds of (the fastest other's time) / (our time): above 1 we are faster.
Memory is what a contender's work takes on top of its model and its input: on CUDA what the allocator handed
out, on a CPU the growth of the resident set of a fresh process (Linux only).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from dino_vit.core.runtime import device_name
from dino_vit.core.storage import write_bytes

Work = Callable[[], object]
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
QUEUED = 10  # calls between two waits for a GPU


@dataclass(frozen=True)
class Row:
    """One comparison: items a second and MiB of each contender, our own first."""

    name: str
    speed: dict[str, float]
    advantage: float
    memory: dict[str, float | None] = field(default_factory=dict)
    queued: int = 1  # calls between two waits for the device


@dataclass(frozen=True)
class Table:
    """Rows of the same contenders; without rows, the note says why."""

    title: str
    unit: str
    rows: list[Row]
    note: str = ""
    ratio: str = ""  # what the last column is, if not ours beside the fastest other

    def markdown(self) -> str:
        """Write the table, memory in brackets."""
        lines = [f"### {self.title}", ""]
        if self.rows:
            names = list(self.rows[0].speed)
            unit = f"{self.unit} (peak MiB)" if self.rows[0].memory else self.unit
            ratio = self.ratio or f"{names[0]} / fastest other"
            lines.append(f"| {unit} | {' | '.join(names)} | {ratio} |")
            lines.append("|---" + "|--:" * (len(names) + 1) + "|")
            lines += [_line(row) for row in self.rows]
            lines.append("")
        notes = [note for note in (self.note, self._queued()) if note]
        return "\n".join([*lines, *(line for note in notes for line in (note, ""))])

    def _queued(self) -> str:
        counts = sorted({row.queued for row in self.rows} - {1})
        return f"{' or '.join(map(str, counts))} calls between two waits for the device." if counts else ""


def _line(row: Row) -> str:
    cells = [f"{speed:.1f}{_brackets(row.memory.get(name))}" for name, speed in row.speed.items()]
    return f"| {row.name} | {' | '.join(cells)} | {row.advantage:.2f} |"


def _brackets(memory: float | None) -> str:
    return "" if memory is None else f" ({memory:.0f})"


def compare(
    name: str,
    contenders: Mapping[str, Work],
    *,
    items: int,
    repeats: int,
    device: str = "cpu",
    memory: Mapping[str, float | None] | None = None,
    queued: int = QUEUED,
) -> Row:
    """Time contenders that each handle `items` at a call, after one round that is not counted.

    On CUDA each is called `queued` times before the device is waited for.
    """
    calls = queued if device == "cuda" else 1
    rounds = [_round(contenders, device, calls) for _ in range(repeats + 1)][1:]
    seconds = {key: median(times[key] for times in rounds) for key in contenders}
    ours, *others = contenders
    fastest = min(others, key=lambda key: seconds[key])
    row = Row(
        name=name,
        speed={key: items / value for key, value in seconds.items()},
        advantage=median(times[fastest] / times[ours] for times in rounds),
        memory=dict(memory or {}),
        queued=calls,
    )
    print(_line(row), file=sys.stderr, flush=True)
    return row


class Apart:
    """Work in a process of its own, which nothing that another contender sets can reach."""

    def __init__(self, build: Callable[..., Work], *arguments: object) -> None:
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self.pool.submit(_prepare, build, arguments, torch.get_num_threads()).result()

    def __call__(self, calls: int = 1) -> None:
        self.pool.submit(_take, calls).result()


_apart: list[Work] = []  # in the process of an `Apart`


def _prepare(build: Callable[..., Work], arguments: Sequence[object], threads: int) -> None:
    torch.set_num_threads(threads)
    _apart.append(build(*arguments))


def _take(calls: int) -> None:
    _call(_apart[0], calls)
    _finish(here().type)


def _call(work: Work, calls: int) -> None:
    if isinstance(work, Apart):  # it waits in its own process
        work(calls)
        return
    for _ in range(calls):
        work()


def _round(contenders: Mapping[str, Work], device: str, calls: int) -> dict[str, float]:
    times = {}
    for name, work in contenders.items():
        with getattr(work, "opened", nullcontext)():  # what is to be ready before, and is not timed
            _finish(device)
            start = time.perf_counter()
            _call(work, calls)
            _finish(device)
            times[name] = (time.perf_counter() - start) / calls
    return times


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory(build: Callable[..., Work], *arguments: object, device: str = "cpu") -> float | None:
    """Return how many MiB the work made by `build(*arguments)`, a module's function, takes at most."""
    if device == "cuda":
        build(*arguments)()  # the first that runs is handed the libraries' own room too
        return _cuda_peak(build(*arguments))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_cpu_peak, build, arguments, torch.get_num_threads()).result()


def _cuda_peak(work: Work) -> float:
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _cpu_peak(build: Callable[..., Work], arguments: Sequence[object], threads: int) -> float | None:
    torch.set_num_threads(threads)
    work = build(*arguments)
    if not CLEAR_REFS.exists():
        return None
    CLEAR_REFS.write_text("5")  # the peak starts again from what is resident now
    before = resident("VmRSS")
    work()
    return (resident("VmHWM") - before) / 2**10


def resident(name: str) -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))  # kB


def here() -> torch.device:
    """Return what is measured here: CUDA where there is such a device (hide it to measure the CPU)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def where(threads: int) -> str:
    """Say what is measured here, for a title."""
    return "CUDA" if here().type == "cuda" else f"CPU, {threads} threads"


def machine() -> str:
    """Describe the processor, the accelerator and the versions that were measured."""
    packages = ("torch", "torchvision", "timm", "transformers", "accelerate")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    cores = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    versions = ", ".join(f"{name} {version(name)}" for name in packages if find_spec(name))
    return (
        f"{device_name(torch.device('cpu'))} ({cores}), {gpu}; Python {platform.python_version()}, {versions}"
    )


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with what every program takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="also write the tables here, as JSON")
    return parser


@dataclass(frozen=True)
class Result:
    """What a program measured, when, on what, and how often."""

    tables: list[Table]
    repeats: int
    machine: str
    day: str

    def write(self, path: Path) -> None:
        """Write it as JSON, all or nothing."""
        write_bytes(path, (json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read it again."""
        record = json.loads(path.read_bytes())
        tables = [
            Table(**{**table, "rows": [Row(**row) for row in table["rows"]]})
            for table in record.pop("tables")
        ]
        return cls(tables=tables, **record)

    def markdown(self) -> str:
        """Write what was measured on a machine, and when."""
        often = f"medians of {self.repeats} interleaved repeats" if self.repeats else "one run"
        head = f"{self.day}, on {self.machine}; {often}.\n"
        return "\n".join([head, *(table.markdown() for table in self.tables)])


def report(tables: Sequence[Table], options: argparse.Namespace) -> None:
    """Print the tables, and write them as JSON where that is asked for."""
    result = Result(list(tables), options.repeats, machine(), date.today().isoformat())
    print(result.machine, *(table.markdown() for table in tables), sep="\n\n")
    if options.out is not None:
        result.write(options.out)

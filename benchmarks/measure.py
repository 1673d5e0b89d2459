"""Measure contenders side by side: interleaved repeats, their medians, peak memory, one Markdown table.

Every round runs all contenders in turn, so what else the machine does hits them alike. Our own comes first;
its advantage is the median over the rounds of (the fastest other's time) / (our time): above 1 we are faster.
Memory is what a contender's work takes on top of its model and its input: the growth of the resident set of a
fresh process (Linux only). All run on the CPU, without OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE of the
environment, with which NumPy and FAISS may multiply slowly.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from benchmarks import REMOVED
from dino_vit import __version__
from dino_vit.core.runtime import device_name
from dino_vit.core.storage import write_bytes

Work = Callable[[], object]
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Row:
    """One comparison: items a second and MiB of each contender, our own first."""

    name: str
    speed: dict[str, float]
    advantage: float
    memory: dict[str, float | None] = field(default_factory=dict)


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
        return "\n".join([*lines, *((self.note, "") if self.note else ())])


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
    memory: Mapping[str, float | None] | None = None,
) -> Row:
    """Time contenders that each handle `items` at a call, after one round that is not counted."""
    rounds = [_round(contenders) for _ in range(repeats + 1)][1:]
    seconds = {key: median(times[key] for times in rounds) for key in contenders}
    ours, *others = contenders
    fastest = min(others, key=lambda key: seconds[key])
    row = Row(
        name=name,
        speed={key: items / value for key, value in seconds.items()},
        advantage=median(times[fastest] / times[ours] for times in rounds),
        memory=dict(memory or {}),
    )
    print(_line(row), file=sys.stderr, flush=True)
    return row


def _round(contenders: Mapping[str, Work]) -> dict[str, float]:
    times = {}
    for name, work in contenders.items():
        start = time.perf_counter()
        work()
        times[name] = time.perf_counter() - start
    return times


def peak_memory(build: Callable[..., Work], *arguments: object) -> float | None:
    """Return how many MiB the work made by `build(*arguments)`, a module's function, takes at most."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_cpu_peak, build, arguments, torch.get_num_threads()).result()


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


def machine() -> str:
    """Describe the processor and the versions that were measured."""
    packages = ("torch", "torchvision", "timm", "transformers", "accelerate")
    versions = ", ".join(f"{name} {version(name)}" for name in packages if find_spec(name))
    cores = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    without = f"; without {' and '.join(REMOVED)} of the environment" if REMOVED else ""
    processor = device_name(torch.device("cpu"))
    return f"{processor} ({cores}); Python {platform.python_version()}, {versions}{without}"


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
    version: str = ""  # of the library; records from before 0.5 lack it

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
        age = "" if self.version == __version__ else " **The code has changed since.**"
        head = f"{self.day}, on {self.machine}; {often}.{age}\n"
        return "\n".join([head, *(table.markdown() for table in self.tables)])


def report(tables: Sequence[Table], options: argparse.Namespace) -> None:
    """Print the tables, and write them as JSON where that is asked for."""
    result = Result(list(tables), options.repeats, machine(), date.today().isoformat(), __version__)
    print(result.machine, *(table.markdown() for table in tables), sep="\n\n")
    if options.out is not None:
        result.write(options.out)

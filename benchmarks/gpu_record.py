"""What the parts of `python -m benchmarks gpu` share: measurements, clocks, small sizes."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.host import TINY
from benchmarks.measure import Work, here
from dino_vit.core.runtime import wait_for_device

DEVICE = here()
ON_GPU = DEVICE.type == "cuda"  # on a CPU everything is rehearsed: as little as shows that it runs
# What makes networks and views small, but for the images, which a part chooses itself.
SMALL: dict[str, Any] = {k: v for k, v in TINY.items() if k.startswith(("model.", "head.", "views."))}
SMALL |= {"model.depth": 2}


class Record:
    """The file of all measurements, each appended when it is made: a part can be killed at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, name: str, **values: Any) -> None:
        """Write a line of JSON."""
        line = json.dumps({"kind": kind, "name": name, **values}, ensure_ascii=False, default=str)
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def attempt(self, kind: str, name: str) -> Iterator[None]:
        """Write down an error, if one is raised within: it takes no other measurement with it."""
        try:
            yield
        except Exception as error:
            self.add("error", f"{kind}: {name}", said=f"{type(error).__name__}: {error}"[:1500])
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()

    def lines(self) -> list[dict[str, Any]]:
        """Read all lines; of a process that was killed, the last may be torn."""
        if not self.path.exists():
            return []
        lines = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return lines


def milliseconds(work: Work, *, calls: int = 20, rounds: int = 5, warm_up: int = 3) -> float:
    """Return the time of a call: the median over rounds of calls that are queued one behind the other."""
    calls, rounds, warm_up = (calls, rounds, warm_up) if ON_GPU else (1, 1, 1)
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(rounds):
        wait_for_device(DEVICE)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        wait_for_device(DEVICE)
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return median(times)


def seconds(work: Work) -> float:
    """Return the time of one call, and of the device with it."""
    wait_for_device(DEVICE)
    start = time.perf_counter()
    work()
    wait_for_device(DEVICE)
    return time.perf_counter() - start


def size(full: int, small: int) -> int:
    """Return a size for a GPU, or for a rehearsal."""
    return full if ON_GPU else small


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

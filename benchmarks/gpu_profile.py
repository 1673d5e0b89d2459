"""What a step on a GPU consists of: its largest kernels, the share that the GPU is idle, its parts."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_record import DEVICE, ON_GPU, Record, size
from benchmarks.gpu_steps import BASE_STEP, DINOV2_STEP, SMALL_STEP, StepCase, WholeStep, measured
from benchmarks.host import PARTS
from dino_vit.core.runtime import wait_for_device
from tests.support.kernels import ELSEWHERE

SHOWN, NAMED = 25, 150  # kernels, characters of a name
PROFILED = 2  # steps


def run(record: Record, _: float) -> None:
    """Profile steps; their tables go to profile.txt, the first one's trace to trace.json.gz."""
    for case in (SMALL_STEP, DINOV2_STEP, BASE_STEP):
        with record.attempt("profile", case.name):
            profiled(record, case)


def profiled(record: Record, case: StepCase) -> None:
    """Profile one step."""
    step = WholeStep(case)
    ms = measured(step, case.images)["ms"]
    if ON_GPU:
        with record.attempt("parts", case.name):
            record.add("parts", case.name, **parts(step))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            step()
        wait_for_device(DEVICE)
    rows = sorted(profiler.key_averages(), key=own_time, reverse=True)
    total = sum(map(own_time, rows))
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    found: dict[str, float] = {"operations_ms": round(total / PROFILED / 1e3, 2), "ms": ms}
    if spans:
        busy = union(spans) / PROFILED / 1e3
        found |= {"kernels": len(spans) / PROFILED, "busy_ms": round(busy, 2)}
        found["idle_share"] = round(1 - min(1.0, busy / ms), 3)
    record.add("profile", case.name, **found)
    text = f"## {case.name}: {total / PROFILED / 1e3:.2f} ms of operations in a step of {ms} ms\n\n"
    text += "".join(f"{described(row, total)}\n" for row in rows[:SHOWN])
    print(text)
    folder = record.path.parent
    with (folder / "profile.txt").open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    if case is SMALL_STEP and ON_GPU:
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))


def own_time(row: FunctionEventAvg) -> float:
    """Return the microseconds of an operation by itself."""
    if not ON_GPU:
        return float(row.self_cpu_time_total)
    # The processor's operations are charged for the kernels that they start: count the kernels themselves.
    counts = row.device_type.name == "CUDA" and not row.is_user_annotation
    return float(row.self_device_time_total) if counts else 0.0


def described(row: FunctionEventAvg, total: float) -> str:
    ms, calls, name = own_time(row) / PROFILED / 1e3, row.count / PROFILED, str(row.key)
    return f"{ms:8.3f} ms {own_time(row) / total:6.1%} {calls:7.1f}x  {name[:NAMED]}"


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of some spans lasts."""
    busy, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return busy


def parts(step: WholeStep) -> dict[str, float]:
    """Return the milliseconds of each part on the GPU's time line, waits for the host included."""
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    inside: list[str] = []

    def wrapped(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if inside:  # the outermost counts
                return function(*arguments, **keywords)
            inside.append(part)
            start, end = events()
            start.record()
            try:
                return function(*arguments, **keywords)
            finally:
                end.record()
                marks.append((part, start, end))
                inside.pop()

        return call

    steps = size(5, 1)
    with ExitStack() as stack:
        for name, part in PARTS.items():
            stack.enter_context(patch(name, wrapped(pkgutil.resolve_name(name), part)))
        step()
        wait_for_device(DEVICE)
        marks.clear()
        start, end = events()
        start.record()
        for _ in range(steps):
            step()
        end.record()
        wait_for_device(DEVICE)
    found = Counter[str]()
    for part, before, after in marks:
        found[part] += before.elapsed_time(after) / steps
    whole = start.elapsed_time(end) / steps
    found[ELSEWHERE] = whole - sum(found.values())
    return {part: round(ms, 2) for part, ms in [*found.most_common(), ("the whole step", whole)]}


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end

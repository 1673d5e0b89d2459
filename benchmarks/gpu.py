"""The first minutes on a GPU: bandwidth and kernels, tests, the speed of steps and what they consist of.

    python -m benchmarks gpu [--seconds 480] [--parts facts steps] [--out gpu-out] [--data FOLDER]

Parts run in the order of their value, each in a process of its own that is killed at its limit; what it had
measured by then is kept. `--out` gets results.jsonl, a line for each measurement, summary.md, which sets them
beside those of an H200, profile.txt, tests.txt and log.txt. `--data` has train.parquet and test.parquet of
CIFAR-10, for the time that is left. `--device cpu` rehearses all of it with a small network.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.gpu_record import Record
from benchmarks.gpu_summary import page

ROOT = Path(__file__).parents[1]
KEPT = 8.0  # seconds, for ending the last part and writing the summary
SHORTEST = 12.0  # seconds; with less a part says nothing
PATIENCE = 20.0  # times the limits, in a rehearsal: other work may share its cores
GRACE = 5.0  # seconds between asking a part to end and killing it


class Part(NamedTuple):
    """A function that measures, and the seconds that it may take."""

    function: str
    limit: float


PARTS = {
    "facts": Part("benchmarks.gpu_facts:run", 60),
    "steps": Part("benchmarks.gpu_steps:steps", 160),
    "tests": Part("benchmarks.gpu_runs:tests", 120),
    "profile": Part("benchmarks.gpu_profile:run", 50),
    "compiled": Part("benchmarks.gpu_steps:compiled", 110),
    "input": Part("benchmarks.gpu_runs:feeding", 45),
    "cifar10": Part("benchmarks.gpu_runs:cifar10", 900),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all parts, or one, whose process this is."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=480, help="in all (default %(default)s)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="folder (default %(default)s)")
    parser.add_argument(
        "--data", type=Path, default=Path("gpu-data"), help="folder of CIFAR-10 (default %(default)s)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    record = Record(options.out.resolve() / "results.jsonl")
    if options.only:
        pkgutil.resolve_name(PARTS[options.only].function)(record, options.seconds)
        return 0
    record.path.write_text("")
    for name in ("profile.txt", "log.txt"):
        (options.out / name).write_text("")
    # A part's processes are to end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with TemporaryDirectory() as caches:
            environ = environment(options.device, options.data, Path(caches))
            patience = PATIENCE if options.device == "cpu" else 1.0
            failed = run(options.parts, record, options.seconds, environ, patience)
    finally:
        text = page(record.lines())
        (options.out / "summary.md").write_text(text, encoding="utf-8")
    print(text)
    return int(failed)


def environment(device: str, data: Path, caches: Path) -> dict[str, str]:
    """Return the variables of the parts: caches of their own, no network."""
    own = {name: str(caches / name.lower()) for name in CACHES}
    own |= {"GPU_DATA": str(data.resolve()), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    own |= {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":  # also without the minutes of a compiler
        own |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, **own}


CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DINO_VIT_CACHE", "MPLCONFIGDIR")


def run(
    names: Sequence[str], record: Record, seconds: float, environ: Mapping[str, str], patience: float = 1.0
) -> bool:
    """Run parts one after the other; return whether one failed."""
    began, failed = time.monotonic(), False
    for name in names:
        left = seconds - KEPT - (time.monotonic() - began)
        limit = min(PARTS[name].limit * patience, left)
        if limit < SHORTEST:
            record.add("left out", name, said=f"{max(left, 0):.0f} s are left")
            continue
        start = time.monotonic()
        command = [sys.executable, "-m", "benchmarks", "gpu", "--only", name]
        command += ["--seconds", f"{limit:.0f}", "--out", str(record.path.parent)]
        with (record.path.parent / "log.txt").open("a", encoding="utf-8") as log:
            status = killed_after(limit, command, environ, log.fileno())
        ended = (
            "killed at its limit" if status is None else "done" if status == 0 else f"failed with {status}"
        )
        failed |= bool(status)
        record.add("part", name, seconds=round(time.monotonic() - start, 1), ended=ended)
    return failed


def killed_after(limit: float, command: Sequence[str], environ: Mapping[str, str], log: int) -> int | None:
    """Run a command; return its exit status, or nothing if it and its processes had to be killed."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
            try:
                os.killpg(process.pid, number)
                process.wait(patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


if __name__ == "__main__":
    sys.exit(main())

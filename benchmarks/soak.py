"""Pretraining that is killed again and again, beside a twin that is left alone: memory, and what comes out.

    python -m benchmarks.soak --kills 20 [--config FILE] [key=value ...]

Both run `dino-vit pretrain` on one thread, by default for an hour, in folders of their own under `--folder`.
One is killed (SIGKILL, with its loader processes) at random steps and started again by the same command. The
memory of the other is sampled all the while. In the end all tensors of their last checkpoints must be the
same.

The record is of `--config configs/pretrain/cifar10_cpu.yaml data.source=train.parquet data.workers=1`; the
run that was left alone is also the one that `benchmarks.cifar10` judged, with `output=runs/soak/left`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.measure import Table, arguments, report
from dino_vit.core.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "dino_vit" / "commands" / "demo_runs" / "textures.yaml"
AN_HOUR = ("budget.steps=24000", "run.checkpoint_every=100", "run.log_every=20", "run.eval_every=5")
FIXED = ("data.augment_on=device",)  # what is measured could come out otherwise for the other
EVERY = 5  # seconds between two samples of the memory


class Pretraining:
    """A run, as a group of processes that can be killed."""

    def __init__(self, folder: Path, config: Path, settings: Sequence[str]) -> None:
        self.folder, self.starts = folder, 0
        self.command = [sys.executable, "-m", "dino_vit", "pretrain", "--config", str(config)]
        self.command += [*FIXED, *settings, f"output={folder}"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        """Start the run, or go on with it."""
        with self.folder.with_suffix(".log").open("a") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1

    def kill(self) -> None:
        """End all its processes at once, with no chance to save anything."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def ended(self) -> bool:
        """Tell whether it came to its end; fail if it came to another."""
        code = self.process.poll()
        if code:
            raise RuntimeError(f"{self.folder.with_suffix('.log')}: the run ended with {code}")
        return code == 0

    @property
    def step(self) -> int:
        """Return the step that was reported last."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [line for line in lines if line.endswith("}")]
        return int(json.loads(whole[-1])["step"]) if whole else 0

    @property
    def steps(self) -> int:
        """Return how many there will be, once that is known."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[0])["total_steps"]) if lines else sys.maxsize

    def memory(self) -> tuple[float, float]:
        """Return the MiB that the process and its loader processes have of their own, and no file's."""
        own = _anonymous(self.process.pid)
        return own / 2**10, sum(map(_anonymous, _children(self.process.pid))) / 2**10


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *_children(child)]
    return found


def _anonymous(pid: int) -> int:
    """Return the kB of a process that are no file's; those of libraries depend on who else maps them."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def soak(folder: Path, config: Path, settings: Sequence[str], kills: int) -> str:
    """Run both to their ends; return what was seen."""
    began, chance = time.monotonic(), random.Random(0)
    left, killed = (Pretraining(folder / name, config, settings) for name in ("left", "killed"))
    moments = sorted(chance.random() for _ in range(kills))  # of the run, from 0 to 1
    samples: list[tuple[float, float]] = []
    done = 0
    while not (left.ended and killed.ended):
        time.sleep(EVERY)
        if not left.ended:
            samples.append(left.memory())
        if done < kills and killed.step >= moments[done] * killed.steps:
            time.sleep(EVERY * chance.random())  # anywhere between two log lines, or in a checkpoint
            if not killed.ended:
                killed.kill()
                done += 1
                print(f"killed {done} times, last after step {killed.step}", file=sys.stderr, flush=True)
                killed.start()
    minutes = (time.monotonic() - began) / 60
    return (
        f"{left.steps:,} steps beside a twin on the same machine, {minutes:.0f} minutes. "
        f"{compared(left.folder, killed.folder)} after {done} kills. {memory(samples)}"
    )


def compared(one: Path, other: Path) -> str:
    """Say whether all tensors of two last checkpoints are the same."""
    first, second = (Checkpoints(folder).newest() for folder in (one, other))
    assert first is not None
    assert second is not None
    assert first.step == second.step, f"one ended at {first.step}, the other at {second.step}"
    differing = [
        name
        for name in first.tensors.keys() | second.tensors.keys()
        if not torch.equal(first.tensors[name], second.tensors[name])
    ]
    if differing:
        return f"{len(differing)} of {len(first.tensors)} tensors of the last checkpoint DIFFER"
    return f"All {len(first.tensors)} tensors of the last checkpoint are the same"


def memory(samples: Sequence[tuple[float, float]]) -> str:
    """Say what memory was early on, at the end, and at most."""
    said = []
    for name, sizes in zip(("process", "loader processes"), zip(*samples, strict=True), strict=True):
        tenth = max(1, len(sizes) // 10)
        early, late = median(sizes[tenth : 2 * tenth]), median(sizes[-tenth:])
        said.append(f"its {name} {early:.0f} MiB, then {late:.0f}, at most {max(sizes):.0f}")
    return (
        "Memory of the one that was left alone, in the second tenth of its time and in the last: "
        f"{'; '.join(said)} ({len(samples)} samples)."
    )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(repeats=0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--config", type=Path, default=DEMO)
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="default: an hour of the demo's recipe"
    )
    options = parser.parse_intermixed_args()
    settings = options.settings or (AN_HOUR if options.config == DEMO else ())
    said = soak(options.folder, options.config, settings, options.kills)
    report([Table("Killed and resumed", "", [], said)], options)


if __name__ == "__main__":
    main()

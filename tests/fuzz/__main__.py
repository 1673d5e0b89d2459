"""Run commands on thousands of hostile inputs: no traceback, no hang, no memory beyond a gigabyte.

    python -m tests.fuzz                              # 10,000 inputs, some minutes
    python -m tests.fuzz --seed 123 --inputs 1        # repeat one, and see what it says

An input is a pure function of its seed. Each command runs to its end in a process that serves many inputs.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from dino_vit.core.progress import progress
from tests.fuzz.inputs import KINDS, Input
from tests.fuzz.worker import Outcome, Worker


def outcomes(seeds: range, kinds: Mapping[str, Input], processes: int) -> Iterator[Outcome]:
    """Try all inputs, side by side, and yield what became of each."""
    free: SimpleQueue[Worker] = SimpleQueue()
    for _ in range(processes):
        free.put(Worker(kinds))

    def try_one(seed: int) -> Outcome:
        worker = free.get()
        try:
            return worker(seed)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(try_one, seeds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=None, help="seed of the first input; default: the time")
    parser.add_argument("--inputs", type=int, default=10_000, help="number of inputs (default: 10,000)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one per core")
    args = parser.parse_args(argv)
    first = int(time.time()) if args.seed is None else args.seed
    seeds = range(first, first + args.inputs)
    print(f"seeds {seeds[0]} to {seeds[-1]}, kinds {' '.join(args.kinds)}", flush=True)
    codes: Counter[str] = Counter()
    bad = 0
    with progress("Trying inputs", len(seeds)) as advance:
        for outcome in outcomes(seeds, {kind: KINDS[kind] for kind in args.kinds}, args.processes):
            codes[f"{outcome.kind} {'refused' if outcome.code == 2 else outcome.code or 'taken'}"] += 1
            advance(1)
            if outcome.bad or len(seeds) == 1:
                print(outcome.said)
            if outcome.bad:
                bad += 1
                kinds = " ".join(args.kinds)
                print(
                    f"BAD: {outcome.kind}, {outcome.code}: --seed {outcome.seed} --inputs 1 --kinds {kinds}"
                )
    print(f"{len(seeds):,} inputs, {bad} bad: " + ", ".join(f"{k} {n}" for k, n in sorted(codes.items())))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

"""Try hostile inputs: `python -m tests.fuzz --seed 1 --minutes 5`, or one with `--only KIND:NUMBER`."""

import argparse
import random
import sys
import time
from itertools import count, cycle

from tests.fuzz.generators import GENERATORS
from tests.fuzz.worker import Worker, try_here


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--kinds", nargs="+", choices=GENERATORS, default=list(GENERATORS))
    parser.add_argument("--only", metavar="KIND:NUMBER", help="try one input in this process")
    args = parser.parse_args()
    if args.only:
        kind, _, number = args.only.partition(":")
        print(try_here(GENERATORS[kind], f"{args.seed} {kind} {number}") or "ended well")
        return 0
    return fuzz(args.seed, 60 * args.minutes, args.kinds)


def fuzz(seed: int, seconds: float, kinds: list[str]) -> int:
    """Try inputs of each kind in turn until the time is over; return the number of problems."""
    print(f"seed {seed}", flush=True)
    worker, start, tried = Worker(seed), time.monotonic(), 0
    problems: dict[str, list[str]] = {}
    turns = zip(cycle(kinds), (number for number in count() for _ in kinds), strict=False)
    for kind, number in turns:
        if time.monotonic() - start > seconds:
            break
        problem = worker.try_input(kind, number)
        tried += 1
        if problem:
            last = problem.strip().splitlines()[-1]
            problems.setdefault(f"{kind}: {last[:80]}", []).append(f"{kind}:{number}")
            if len(problems[f"{kind}: {last[:80]}"]) == 1:
                print(f"\n{kind}:{number} (--seed {seed} --only {kind}:{number})\n{problem}", flush=True)
    worker.close()
    for title, inputs in problems.items():
        print(f"{len(inputs):6,} × {title}, such as {inputs[0]}")
    print(f"seed {seed}: {tried:,} inputs, {sum(map(len, problems.values())):,} ended badly")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

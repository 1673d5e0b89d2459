"""Try hostile inputs: `python -m tests.fuzz --seed 1 --inputs 1000`, or one with `--only KIND:NUMBER`."""

import argparse
import random
import sys

from tests.fuzz.generators import GENERATORS
from tests.fuzz.worker import Worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="+", choices=GENERATORS, default=list(GENERATORS))
    parser.add_argument("--only", metavar="KIND:NUMBER", help="try one input, and print all of what it says")
    args = parser.parse_args()
    if args.only:
        kind, _, number = args.only.partition(":")
        print(Worker(args.seed).try_input(kind, int(number)) or "ended well")
        return 0
    return fuzz(args.seed, args.inputs, args.kinds)


def fuzz(seed: int, inputs: int, kinds: list[str]) -> int:
    """Try `inputs` inputs, each kind in turn; return the exit code."""
    print(f"seed {seed}", flush=True)
    worker, problems = Worker(seed), dict[str, list[str]]()
    for tried in range(inputs):
        kind, number = kinds[tried % len(kinds)], tried // len(kinds)
        problem = worker.try_input(kind, number)
        if problem:
            title = f"{kind}: {problem.strip().splitlines()[-1][:80]}"
            if title not in problems:
                print(f"\n{kind}:{number} (--seed {seed} --only {kind}:{number})\n{problem}", flush=True)
            problems.setdefault(title, []).append(f"{kind}:{number}")
        if (tried + 1) % 500 == 0:
            print(f"{tried + 1:,} tried", flush=True)
    worker.close()
    for title, found in problems.items():
        print(f"{len(found):6,} × {title}, such as {found[0]}")
    print(f"seed {seed}: {inputs:,} inputs, {sum(map(len, problems.values())):,} failed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""An hour of two cores on each of three sets: what `recipe=auto` and nothing else comes to.

    python -m benchmarks.hours FOLDER --out benchmarks/results/cpu/hours.json

It is `benchmarks.small` with other defaults: one run at a time, judged by all images.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.small import main

SETS = ("groceries", "flowers", "cifar10")

if __name__ == "__main__":
    runs = Path("runs/hours")
    main(__doc__.splitlines()[0], sets=SETS, minutes=60, cores=2, seeds=1, whole=True, runs=runs)

"""Run the programs of this folder, each in a process of its own, and put RESULTS.md together.

    python -m benchmarks              all on this processor but `small`, which takes hours
    python -m benchmarks knn input    these; what the others measured before stays on the page
    python -m benchmarks --page       none: only put the page together
    python -m benchmarks gpu          variants of a step on a GPU (`benchmarks/gpu.py`)

`small` must be told what and where: `python -m benchmarks.small --help`. Each program leaves
`results/cpu/NAME.json`; one that fails leaves the one of before as it is. Records of other processors lie in
`results/cpu-NAME`, those of GPUs in `results/GPU/gpu.jsonl`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import REMOVED, gpu, gpu_table, measure

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
PROGRAMS = ("input", "knn", "sources", "step")
LONG = ("small", "hours", "race", "cifar10")  # records of `benchmarks.small`
HEAD = """# Results

Written by `python -m benchmarks`, or by `make bench` for all but those of `benchmarks.small`; nothing here is
typed by hand.

"""


def main() -> int:
    """Measure, and write down what was measured and how to repeat it."""
    if sys.argv[1:2] == ["gpu"]:
        return gpu.main(sys.argv[2:])
    parser = measure.arguments("Run benchmarks and write benchmarks/RESULTS.md.")
    parser.add_argument("programs", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if unknown := set(options.programs) - set(PROGRAMS):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    if REMOVED:
        print(f"measuring without {' and '.join(REMOVED)} of the environment", file=sys.stderr)
    chosen = [] if options.page else options.programs or PROGRAMS
    failed = [name for name in chosen if not measured(name, options.repeats, options.threads)]
    page = HEAD + (measure.__doc__ or "").strip() + "\n"
    page += "".join(section(name) for name in (*LONG, *PROGRAMS)) + gpus()
    (FOLDER / "RESULTS.md").write_text(page, encoding="utf-8")
    if failed:
        print(f"failed, and left as before: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def section(name: str) -> str:
    """Write what a program measured, on each processor; nothing if there is no record."""
    how = f"python -m benchmarks.small {name} FOLDER" if name in LONG else f"python -m benchmarks {name}"
    records = sorted(RESULTS.glob(f"cpu*/{name}.json"))
    results = [measure.Result.read(path).markdown() for path in records]
    return "\n".join([f"\n## {name}\n\n`{how}`\n", *results]) if results else ""


def gpus() -> str:
    """Write the part of the page that has what `benchmarks gpu` measured, GPU by GPU."""
    text = "\n## gpu\n\n`python -m benchmarks gpu`\n"
    text += "\nWhat earlier code measured on an H200 is in [docs/gpu.md](../docs/gpu.md#what-was-measured).\n"
    for path in sorted(RESULTS.glob("*/gpu.jsonl")):
        text += f"\n### {path.parent.name}\n\n{gpu_table.table(gpu_table.read(path))}\n"
    return text


def measured(name: str, repeats: int, threads: int) -> bool:
    """Run one program; return whether it succeeded."""
    print(f"benchmarks.{name}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--repeats", str(repeats)]
    command += ["--threads", str(threads), "--out", str(RESULTS / "cpu" / f"{name}.json")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, check=False, env=environ).returncode == 0


if __name__ == "__main__":
    sys.exit(main())

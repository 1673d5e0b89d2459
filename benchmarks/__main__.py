"""Run the programs of this folder, each in a process of its own, and put RESULTS.md together.

    python -m benchmarks              all but those that take an hour
    python -m benchmarks knn input    these; what the others measured before stays on the page
    python -m benchmarks --page       none: only put the page together

Those that take an hour want to be told where and on what: `python -m benchmarks.soak --help`.

Each leaves `results/NAME.json`; a program that fails leaves the one of before as it is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules

from benchmarks import measure

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
NO_PROGRAMS = ("__main__", "measure", "peer", "reference")
LONG = ("cifar10", "soak")
HEAD = """# Results

Written by `python -m benchmarks`, or by `make bench` for all but the longest; nothing here is typed by hand.
"""


def main() -> int:
    """Measure, and write down what was measured and how to repeat it."""
    programs = [module.name for module in iter_modules([str(FOLDER)]) if module.name not in NO_PROGRAMS]
    parser = measure.arguments("Run benchmarks and write benchmarks/RESULTS.md.")
    parser.add_argument("programs", nargs="*", metavar="NAME", help=f"of {', '.join(programs)}")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if unknown := set(options.programs) - set(programs):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(programs)}")
    RESULTS.mkdir(exist_ok=True)
    chosen = [] if options.page else options.programs or [name for name in programs if name not in LONG]
    failed = [name for name in chosen if not measured(name, options.repeats, options.threads)]
    page = HEAD + "\n" + (measure.__doc__ or "").strip() + "\n"
    for name in programs:
        path = RESULTS / f"{name}.json"
        unmeasured = f"## {name}\n\nNot measured yet: `python -m benchmarks.{name} --help`.\n"
        page += "\n" + (measure.Result.read(path).markdown(name) if path.exists() else unmeasured)
    (FOLDER / "RESULTS.md").write_text(page, encoding="utf-8")
    if failed:
        print(f"failed, and left as before: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def measured(name: str, repeats: int, threads: int) -> bool:
    """Run one program; tell whether it succeeded."""
    print(f"benchmarks.{name}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--repeats", str(repeats)]
    command += ["--threads", str(threads), "--out", str(RESULTS / f"{name}.json")]
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())

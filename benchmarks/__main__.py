"""Run every program of this folder and write RESULTS.md."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from benchmarks import measure

FOLDER = Path(__file__).parent
NO_PROGRAMS = ("__main__", "measure", "reference")


def main() -> None:
    """Measure, and write down what was measured and how to repeat it."""
    parser = measure.arguments("Run every benchmark and write benchmarks/RESULTS.md.")
    options = parser.parse_args()
    names = [module.name for module in iter_modules([str(FOLDER)]) if module.name not in NO_PROGRAMS]
    tables: list[measure.Table] = []
    for name in names:
        print(f"benchmarks.{name}", file=sys.stderr, flush=True)
        tables += import_module(f"benchmarks.{name}").run(repeats=options.repeats, threads=options.threads)
    (FOLDER / "RESULTS.md").write_text(results(tables, repeats=options.repeats), encoding="utf-8")
    measure.report(tables, options.out)


def results(tables: list[measure.Table], *, repeats: int) -> str:
    """Put the page together."""
    assert measure.__doc__ is not None
    how = f"Written by `make bench`: medians of {repeats} interleaved repeats."
    head = f"# Results\n\n{how}\nMachine: {measure.machine()}."
    return (
        "\n\n".join([head, measure.__doc__.strip(), *(table.markdown().strip() for table in tables)]) + "\n"
    )


if __name__ == "__main__":
    main()

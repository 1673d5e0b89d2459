"""Run the programs of this folder, each in a process of its own, and put RESULTS.md together.

    python -m benchmarks              all but those that take an hour; with CUDA those that use it
    python -m benchmarks knn input    these; what the others measured before stays on the page
    python -m benchmarks --page       none: only put the page together
    python -m benchmarks gpu          the first minutes on a GPU (`benchmarks/gpu.py`)

Those that take an hour want to be told where and on what: `python -m benchmarks.small --help`.

Each leaves `results/DEVICE/NAME.json`, of the CPU or, where there is such a device, of CUDA; a program that
fails leaves the one of before as it is. One that measures on CUDA too says in `ON_CUDA` what.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules

from benchmarks import gpu, gpu_record, gpu_summary, measure

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
CUDA = measure.here().type == "cuda"
NO_PROGRAMS = ["__main__", "measure", "peer", "reference"]
NO_PROGRAMS += ["gpu", "gpu_facts", "gpu_profile", "gpu_record", "gpu_runs", "gpu_steps", "gpu_summary"]
LONG = ("cifar10", "distillation", "hours", "small", "small_peer")
HEAD = """# Results

Written by `python -m benchmarks`, or by `make bench` for all but the longest; nothing here is typed by hand.
On a machine with CUDA both measure what uses it.{missing}

"""


def main() -> int:
    """Measure, and write down what was measured and how to repeat it."""
    if sys.argv[1:2] == ["gpu"]:
        return gpu.main(sys.argv[2:])
    programs = [module.name for module in iter_modules([str(FOLDER)]) if module.name not in NO_PROGRAMS]
    parser = measure.arguments("Run benchmarks and write benchmarks/RESULTS.md.")
    parser.add_argument("programs", nargs="*", metavar="NAME", help=f"of {', '.join(programs)}")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if unknown := set(options.programs) - set(programs):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(programs)}")
    usual = [name for name in programs if name not in LONG and (not CUDA or on_cuda(name))]
    chosen = [] if options.page else options.programs or usual
    failed = [name for name in chosen if not measured(name, options.repeats, options.threads)]
    missing = [name for name in programs if on_cuda(name) and not record(name, "cuda").exists()]
    said = f" Not measured there yet: {', '.join(missing)}." if missing else ""
    page = HEAD.format(missing=said) + (measure.__doc__ or "").strip() + "\n"
    page += gpus() + "".join(section(name) for name in programs)
    (FOLDER / "RESULTS.md").write_text(page, encoding="utf-8")
    if failed:
        print(f"failed, and left as before: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def gpus() -> str:
    """Write the part of the page that has what `benchmarks gpu` measured, GPU by GPU."""
    text = "\n## gpu\n\n`python -m benchmarks gpu`\n"
    for file in sorted(RESULTS.glob("*/results.jsonl")):
        heading, *parts = gpu_summary.parts(gpu_record.Record(file).lines())
        text += "\n" + "\n\n".join([f"##{heading}", *parts]) + "\n"
    return text


def section(name: str) -> str:
    """Write the part of the page that a program has, on each kind of device that it is for."""
    how = f"python -m benchmarks.{name} --help" if name in LONG else f"python -m benchmarks {name}"
    text = f"\n## {name}\n\n`{how}`\n"
    others = sorted(path.parent.name for path in RESULTS.glob(f"cpu-*/{name}.json"))  # another processor
    for kind, rows in (("cpu", "all"), *((other, "") for other in others), ("cuda", on_cuda(name))):
        if record(name, kind).exists():
            result = measure.Result.read(record(name, kind))
            text += f"\n{result.markdown()}"
        elif rows:
            text += f"\n**Not measured on {kind.upper()}**: {rows}.\n"
    return text


def record(name: str, kind: str) -> Path:
    """Return where a program leaves what it measured on a kind of device."""
    return RESULTS / kind / f"{name}.json"


def on_cuda(name: str) -> str:
    """Say what a program measures on CUDA, if anything."""
    for part in ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")).body:
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "ON_CUDA":
            return str(ast.literal_eval(part.value))
    return ""


def measured(name: str, repeats: int, threads: int) -> bool:
    """Run one program; tell whether it succeeded."""
    print(f"benchmarks.{name}", file=sys.stderr, flush=True)
    kind = "cuda" if CUDA and on_cuda(name) else "cpu"
    seen = {} if kind == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", f"benchmarks.{name}", "--repeats", str(repeats)]
    command += ["--threads", str(threads), "--out", str(record(name, kind))]
    return subprocess.run(command, check=False, env={**os.environ, **seen}).returncode == 0


if __name__ == "__main__":
    sys.exit(main())

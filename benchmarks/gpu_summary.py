"""What `python -m benchmarks gpu` measured, beside what was expected before any GPU was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Line = Mapping[str, Any]


class Expected(NamedTuple):
    """What a measurement was expected to be: of which kind and name, which of its values, from and to."""

    kind: str
    name: str
    value: str
    low: float
    high: float
    unit: str


# Estimates for an H100 from rehearsed steps with compiled functions: the time of `benchmarks/operations.py`
# and an eighth (ViT-S) or a fifth (ViT-B) more, as products do not reach the peak; about 20 % off.
EXPECTED = (
    Expected("copy", "on the device", "gb_s", 2600, 3000, "GB/s"),
    Expected("host", "a kernel", "us", 2, 5, "us"),
    Expected("product", "8192 squared", "tflop_s", 600, 700, "TFLOP/s"),
    Expected("step", "ViT-S/16, DINO, 64 images, eager", "images_s", 2200, 2700, "images/s"),
    Expected("step", "ViT-B/16, DINO, 64 images, eager", "images_s", 850, 1000, "images/s"),
    Expected("step", "ViT-S/16, DINOv2, 64 images, eager", "images_s", 1900, 2250, "images/s"),
    Expected("step", "ViT-B/16, DINOv2, 64 images, eager", "images_s", 750, 900, "images/s"),
    Expected("profile", "ViT-S/16, DINO, 64 images, eager", "kernels", 730, 800, "kernels"),
    Expected("profile", "ViT-S/16, DINO, 64 images, eager", "busy_ms", 22, 28, "ms"),
    Expected("profile", "ViT-S/16, DINO, 64 images, eager", "idle_share", 0, 0.05, "of the time"),
)


def page(lines: Sequence[Line]) -> str:
    """Write the summary: what was run, what was expected, what is fastest, and all that was measured."""
    parts = [heading(lines), ran(lines), expected(lines), fastest_attention(lines), compiling(lines)]
    parts += [measurements(lines), problems(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(lines: Sequence[Line]) -> str:
    """Say on what it was measured."""
    machine = next((line for line in lines if line["kind"] == "machine"), None)
    if machine is None:
        return "# Measured"
    rehearsed = (
        ""
        if "cuda" in machine
        else "A rehearsal on a CPU, with small networks: no figure tells anything.\n\n"
    )
    about = ", ".join(f"{key} {value}" for key, value in machine.items() if key not in ("kind", "name"))
    return f"# {machine['name']}\n\n{rehearsed}{about}"


def ran(lines: Iterable[Line]) -> str:
    """Say how each part ended."""
    found = [line for line in lines if line["kind"] == "part"]
    return table(
        ("part", "seconds", "ended"), [(o["name"], f"{o['seconds']:.0f}", o["ended"]) for o in found]
    )


def expected(lines: Sequence[Line]) -> str:
    """Set what was measured beside what was expected."""
    by_name = {(line["kind"], line["name"]): line for line in lines}
    rows = []
    for what in EXPECTED:
        value = by_name.get((what.kind, what.name), {}).get(what.value)
        bounds = f"{what.low:g} to {what.high:g}"
        against = "" if value is None else f"{float(value) / ((what.low + what.high) / 2):.2f}"
        shown = "not measured" if value is None else f"{value:g}"
        rows.append((f"{what.kind}: {what.name}, {what.unit}", bounds, shown, against))
    return table(("", "expected of an H100", "measured", "measured / expected"), rows)


def fastest_attention(lines: Iterable[Line]) -> str:
    """Say which kernel of attention is fastest, and how to choose it."""
    rows, others = [], set()
    for line in lines:
        if line["kind"] == "attention":
            times = {name: value["both_us"] for name, value in line.items() if isinstance(value, dict)}
            shown = ", ".join(f"{name} {us:g}" for name, us in times.items() if name != "chosen")
            rows.append((line["name"], shown or f"{times['chosen']:g}", line["chosen_is"], line["fastest"]))
            if "cudnn" in line["chosen_is"] and line["fastest"] != "cudnn":
                others.add(line["fastest"])
    note = ""
    if others:
        note = (
            f"\n\n{' or '.join(sorted(others))} is faster than cuDNN, which PyTorch chooses: "
            "set TORCH_CUDNN_SDPA_DEPRIORITIZED=1 (see docs/gpu.md)."
        )
    head = ("attention", "forward and backward, us", "PyTorch chooses", "fastest")
    return table(head, rows) + note if rows else ""


def compiling(lines: Sequence[Line]) -> str:
    """Say after how many steps compiling has repaid its seconds."""
    eager = {line["name"]: line["ms"] for line in lines if line["kind"] == "step"}
    rows = []
    for line in lines:
        if line["kind"] == "compiled":
            before = eager.get(line["name"].rpartition(", ")[0] + ", eager")
            saved = None if before is None else before - line["ms"]
            steps = f"{1e3 * line['compile_s'] / saved:,.0f}" if saved and saved > 0 else "never"
            rows.append(
                (line["name"], f"{line['compile_s']:g}", f"{line['ms']:g}", "" if saved is None else steps)
            )
    return table(("compiled", "seconds to compile", "ms a step", "repaid after so many steps"), rows)


def measurements(lines: Iterable[Line]) -> str:
    """List everything else."""
    shown = []
    for line in lines:
        if line["kind"] not in ("machine", "part", "attention", "error", "left out"):
            values = ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("kind", "name"))
            shown.append(f"- {line['kind']}: {line['name']}: {values}")
    return "\n".join(shown)


def problems(lines: Iterable[Line]) -> str:
    """List what failed or was left out."""
    return "\n".join(
        f"- {line['kind']}: {line['name']}: {line['said']}"
        for line in lines
        if line["kind"] in ("error", "left out")
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table, or nothing without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

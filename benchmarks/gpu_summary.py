"""What `python -m benchmarks gpu` measured, beside an H200."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Line = Mapping[str, Any]
STEPS = ("step", "compiled")


class H200Figure(NamedTuple):
    """What an H200 did with PyTorch 2.11, 2026-11-27: of which kind and name, which of its values."""

    kind: str
    name: str
    value: str
    measured: float
    unit: str


H200_FIGURES = (
    H200Figure("copy", "on the device", "gb_s", 4249, "GB/s"),
    H200Figure("host", "a kernel", "us", 7.2, "us"),
    H200Figure("product", "8192 squared", "tflop_s", 772, "TFLOP/s"),
    H200Figure("step", "ViT-S/16, DINO, 64 images", "images_s", 903, "images/s"),
    H200Figure("step", "ViT-S/16, DINO, 256 images", "images_s", 2132, "images/s"),
    H200Figure("step", "ViT-B/16, DINO, 64 images", "images_s", 832, "images/s"),
    H200Figure("step", "ViT-S/16, DINOv2, 64 images", "images_s", 660, "images/s"),
    H200Figure("profile", "ViT-S/16, DINO, 64 images", "kernels", 1175, "kernels"),
    H200Figure("profile", "ViT-S/16, DINO, 64 images", "busy_ms", 34.3, "ms"),
    H200Figure("profile", "ViT-S/16, DINO, 64 images", "idle_share", 0.465, "of the time"),
)


def page(lines: Sequence[Line]) -> str:
    """Write the summary: what was run, what an H200 does, what is fastest, and all that was measured."""
    first, *others = parts(lines)
    return "\n\n".join([first, beside_h200(lines), *others]) + "\n"


def parts(lines: Sequence[Line]) -> list[str]:
    """Return the parts of the summary that are of the lines alone."""
    found = [heading(lines), ran(lines), speeds(lines), fastest_attention(lines), compiling(lines)]
    found += [measurements(lines), problems(lines)]
    return [part for part in found if part]


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


def beside_h200(lines: Sequence[Line]) -> str:
    """Set what was measured beside an H200."""
    by_name = {(line["kind"], line["name"]): line for line in lines}
    rows = []
    for what in H200_FIGURES:
        value = by_name.get((what.kind, what.name), {}).get(what.value)
        against = "" if value is None else f"{float(value) / what.measured:.2f}"
        shown = "not measured" if value is None else f"{value:g}"
        rows.append((f"{what.kind}: {what.name}, {what.unit}", f"{what.measured:g}", shown, against))
    return table(("", "an H200, 2026-11-27", "measured", "measured / H200"), rows)


def speeds(lines: Iterable[Line]) -> str:
    """Set the steps one below the other."""
    rows = [
        (
            line["name"],
            *(f"{line[value]:,.0f}" for value in ("images_s", "ms", "ms_host")),
            f"{line['of_peak']:.0%}" if "of_peak" in line else "",
            f"{line['peak_mib']:,}" if "peak_mib" in line else "",
        )
        for line in lines
        if line["kind"] in STEPS
    ]
    head = ("step", "images a second", "ms", "ms of the host", "of 990 TFLOP/s", "peak MiB")
    return table(head, rows)


def fastest_attention(lines: Iterable[Line]) -> str:
    """Say which kernel of attention is fastest, and how to choose it."""
    rows, us = [], Counter[str]()
    for line in lines:
        if line["kind"] == "attention":
            times = {name: value["both_us"] for name, value in line.items() if isinstance(value, dict)}
            shown = ", ".join(f"{name} {took:g}" for name, took in times.items() if name != "chosen")
            rows.append((line["name"], shown or f"{times['chosen']:g}", line["chosen_is"], line["fastest"]))
            if "cudnn" in line["chosen_is"]:
                us.update(times)
    note = ""
    if us["flash"] < us["cudnn"]:  # of all shapes together, since the variable is for all
        note = (
            "\n\nflash is faster than cuDNN, which PyTorch chooses: "
            "set TORCH_CUDNN_SDPA_DEPRIORITIZED=1 (see docs/gpu.md)."
        )
    head = ("attention", "forward and backward, us", "PyTorch chooses", "fastest")
    return table(head, rows) + note if rows else ""


def compiling(lines: Sequence[Line]) -> str:
    """Say after how many steps compiling has repaid its seconds."""
    plain = {line["name"]: line["ms"] for line in lines if line["kind"] == "step"}
    rows = []
    for line in lines:
        if line["kind"] == "compiled":
            before = plain.get(line["name"].rpartition(", ")[0])
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
        if line["kind"] not in ("machine", "part", "attention", "error", "left out", *STEPS):
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

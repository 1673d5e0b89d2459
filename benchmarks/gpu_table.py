"""What `benchmarks gpu` has measured, line by line, as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

PEAK = 990e12  # operations a second of an H100 in bf16, by its data sheet


def read(path: Path) -> list[dict[str, Any]]:
    """Read all lines of a file of measurements."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the medians of all rounds, by name, with what was measured once."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(line["name"] for line in lines if line["kind"] == "round"):
        rounds = [line for line in lines if (line["kind"], line["name"]) == ("round", name)]
        found[name] = {key: median(line[key] for line in rounds) for key in ("ms", "host_ms", "peak_mib")}
        found[name]["spread"] = max(line["ms"] for line in rounds) / min(line["ms"] for line in rounds) - 1
    for line in lines:
        if line["kind"] in ("warmed", "busy") and line["name"] in found:
            found[line["name"]] |= line
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Write the summary as a table, and below it what failed, was left out or ended."""
    found = summary(lines)
    head = "| | images/s | ms, spread | ms of the host | GPU idle | of 990 TFLOP/s | MiB | warm-up |"
    rows = [head, "|---" + "|--:" * 7 + "|"]
    for name, v in found.items():
        cells = [name, "", f"{v['ms']:.3f}, {v['spread']:.0%}", f"{v['host_ms']:.2f}", "", "", "", ""]
        if "images" in v and "busy_ms" in v:
            gflop = found.get(f"{name.partition(': ')[0]}: plain", {}).get("gflop", 0)
            cells[1], cells[4] = f"{1e3 * v['images'] / v['ms']:,.0f}", f"{1 - v['busy_ms'] / v['ms']:.0%}"
            cells[5:] = f"{1e12 * gflop / v['ms'] / PEAK:.0%}", f"{v['peak_mib']:.0f}", f"{v['warm_s']:.0f} s"
        rows.append(f"| {' | '.join(cells)} |")
    others = (line for line in lines if line["kind"] in ("machine", "left out", "error", "process"))
    return "\n".join([*rows, "", *(f"- {dict(line)}" for line in others)])

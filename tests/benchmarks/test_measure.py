from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import measure
from benchmarks.measure import CLEAR_REFS, Result, Table, compare, peak_memory
from dino_vit import __version__
from tests.support.allocation import build_allocation

MEBIBYTES = 64


def test_rounds_are_interleaved_and_speed_is_items_over_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    waits = {"ours": 0.01, "slow": 0.05, "medium": 0.02}
    clock = [0.0]

    def work(name: str) -> None:
        calls.append(name)
        clock[0] += waits[name] if len(calls) != 4 else 0.3  # one outlier leaves the median as it is

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    row = compare("row", {name: partial(work, name) for name in waits}, items=10, repeats=3)
    assert calls == list(waits) * 4
    assert row.speed["ours"] == pytest.approx(1000)
    assert row.advantage == pytest.approx(2)


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the peak of a process is read from Linux's /proc")
@pytest.mark.slow
def test_peak_memory_is_what_the_work_allocates() -> None:
    peak = peak_memory(build_allocation, MEBIBYTES)
    assert peak is not None
    assert MEBIBYTES <= peak < MEBIBYTES + 32


def test_page_has_every_number_and_says_what_was_not_measured(tmp_path: Path) -> None:
    row = compare("a row", {"ours": lambda: None, "peer": lambda: None}, items=1, repeats=1)
    row.memory.update({"ours": 12.0, "peer": None})
    tables = [Table("CPU", "images a second", [row]), Table("Others", "x", [], "Nothing.")]
    Result(tables, 3, "some machine", "2026-01-31").write(tmp_path / "cpu" / "toy.json")
    page = Result.read(tmp_path / "cpu" / "toy.json").markdown()
    assert "2026-01-31, on some machine; medians of 3" in page
    assert f"| a row | {row.speed['ours']:.1f} (12) | {row.speed['peer']:.1f} | {row.advantage:.2f} |" in page
    assert "### Others\n\nNothing." in page
    assert "**The code has changed since.**" in page


def test_programs_run_one_by_one_and_one_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "FOLDER", tmp_path)
    monkeypatch.setattr(program, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(program, "PROGRAMS", ("bad", "good"))
    Result([Table("Older", "", [], "Measured before.")], 5, "a machine", "2025-12-31").write(
        tmp_path / "results" / "cpu" / "bad.json"
    )
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        fails = "benchmarks.bad" in command
        if not fails:
            Result([Table("A table", "", [], "A note.")], 1, "a machine", "2026-01-31", __version__).write(
                Path(command[-1])
            )
        return subprocess.CompletedProcess(command, int(fails))

    monkeypatch.setattr(program.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--repeats", "1"])
    assert program.main() == 1
    assert [command[2] for command in commands] == ["benchmarks.bad", "benchmarks.good"]
    page = (tmp_path / "RESULTS.md").read_text()
    assert "## bad" in page
    assert "Measured before." in page
    assert "2026-01-31, on a machine; medians of 1 interleaved repeats.\n" in page
    assert "A note." in page


def test_variables_that_make_products_slow_are_removed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import benchmarks, os; print(benchmarks.REMOVED, 'OPENBLAS_CORETYPE' in os.environ)"
    environ = {**os.environ, "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": ""}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert said == "['OPENBLAS_CORETYPE'] False\n"
    monkeypatch.setattr(measure, "REMOVED", ["OPENBLAS_CORETYPE"])
    assert measure.machine().endswith("; without OPENBLAS_CORETYPE of the environment")

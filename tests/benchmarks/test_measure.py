from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import measure
from benchmarks.measure import CLEAR_REFS, Result, Table, compare, peak_memory
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


def test_a_gpu_gets_ten_calls_between_two_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = [0.0]
    seconds = {"ours": 0.01, "other": 0.02}

    def work(name: str) -> None:
        calls.append(name)
        clock[0] += seconds[name]

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: calls.append("wait"))
    works = {name: partial(work, name) for name in seconds}
    row = compare("row", works, items=10, repeats=1, device="cuda")
    of_a_round = ["wait", *["ours"] * 10, "wait", "wait", *["other"] * 10, "wait"]
    assert calls == of_a_round * 2
    assert row.speed["ours"] == pytest.approx(1000)
    assert "10 calls between two waits for the device." in Table("A step", "x", [row], "A note.").markdown()
    once = compare("row", works, items=10, repeats=1)
    assert "between two waits" not in Table("A step", "x", [once]).markdown()


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


@pytest.mark.slow
def test_programs_run_one_by_one_and_one_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "benchmarks"
    package.mkdir()
    monkeypatch.setattr(program, "FOLDER", package)
    monkeypatch.setattr(program, "CUDA", False)
    monkeypatch.setattr(program, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    own = "from benchmarks.measure import Table, arguments, report\nON_CUDA = 'two more rows'\n"
    own += "report([Table('A table', '', [], 'A note.')], arguments('').parse_args())\n"
    monkeypatch.chdir(tmp_path)
    (package / "__init__.py").touch()
    (package / "good.py").write_text(own)
    (package / "bad.py").write_text("raise SystemExit(3)")
    (package / "measure.py").symlink_to(Path(measure.__file__))
    before = Result([Table("Older", "", [], "Measured before.")], 5, "a machine", "2025-12-31")
    before.write(tmp_path / "results" / "cpu" / "bad.json")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--repeats", "1"])
    assert program.main() == 1
    page = (package / "RESULTS.md").read_text()
    assert "Not measured there yet: good." in page
    assert "**Not measured on CUDA**: two more rows." in page
    assert "## bad" in page
    assert "Measured before." in page
    assert "## good" in page
    assert "A note." in page

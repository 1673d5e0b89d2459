from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks.__main__ import results
from benchmarks.backbone import CONTENDERS, Case, build_work
from benchmarks.measure import CLEAR_REFS, Table, compare, peak_memory

MEBIBYTES = 64


def build_allocation(mebibytes: int) -> Callable[[], object]:
    torch.ones(4 * mebibytes * 2**18)  # a larger peak before the work, which must not count
    return lambda: torch.ones(mebibytes * 2**18).sum()


def test_rounds_are_interleaved_and_speed_is_items_over_the_median() -> None:
    calls: list[str] = []
    waits = {"ours": 0.01, "slow": 0.05, "medium": 0.02}

    def work(name: str) -> None:
        calls.append(name)
        time.sleep(waits[name] if len(calls) != 4 else 0.3)  # one outlier leaves the median as it is

    row = compare("row", {name: partial(work, name) for name in waits}, items=10, repeats=3)
    assert calls == list(waits) * 4
    assert 500 < row.speed["ours"] <= 1000
    assert 1.2 < row.advantage <= 2.4


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="the peak of a process is read from Linux's /proc")
def test_peak_memory_is_what_the_work_allocates() -> None:
    peak = peak_memory(build_allocation, MEBIBYTES)
    assert peak is not None
    assert MEBIBYTES <= peak < MEBIBYTES + 32


def test_page_has_every_number_and_says_what_was_not_measured() -> None:
    row = compare("a row", {"ours": lambda: None, "peer": lambda: None}, items=1, repeats=1)
    row.memory.update({"ours": 12.0, "peer": None})
    page = results(
        [Table("CPU", "images a second", [row]), Table("CUDA", "x", [], "Not measured.")], repeats=1
    )
    assert f"| a row | {row.speed['ours']:.1f} (12) | {row.speed['peer']:.1f} | {row.advantage:.2f} |" in page
    assert "### CUDA\n\nNot measured." in page


@pytest.mark.parametrize("size", [224, 96])
def test_contenders_do_the_same_work(size: int) -> None:
    for name in CONTENDERS:
        features = build_work(name, Case(size, 1, False, "float32", "cpu"))()
        assert isinstance(features, torch.Tensor)
        assert features.shape == (1, 384)

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import knn, loop, sources
from benchmarks.step import Case, Ours, Reference, build_run, measure

TINY = {
    "model.arch": None,
    "model.width": 32,
    "model.depth": 2,
    "model.heads": 2,
    "model.patch_size": 4,
    "model.drop_path": 0.0,
    "head.prototypes": 64,
    "head.hidden_dim": 48,
    "head.bottleneck_dim": 16,
    "views.global_size": 32,
    "views.local_size": 16,
    "views.local_count": 3,
    "optim.clip": 0.05,
    "optim.lr": 1e-3,
    "optim.weight_decay": 0.3,
    "optim.lr_scaling": "none",
    "optim.warmup_epochs": 0,
}
CPU = torch.device("cpu")


def test_both_take_the_same_steps() -> None:
    """Loss, centre, gradients, clip, AdamW and teacher agree, or the losses would part within some steps."""
    case = Case(4, "no", changes=TINY)
    ours = Ours(case)
    theirs = Reference(case.config, CPU, ours.session)
    losses = []
    for _ in range(6):
        ours()
        losses.append((ours.loss(), theirs()))
    first, last = losses[0][0], losses[-1][0]
    assert abs(first - last) > 0.1
    for mine, other in losses:
        assert mine == pytest.approx(other, rel=2e-5)


def test_bf16_stays_near() -> None:
    case = Case(4, "bf16", changes=TINY)
    ours = Ours(case)
    theirs = Reference(case.config, CPU, ours.session)
    ours()
    assert ours.loss() == pytest.approx(theirs(), rel=2e-2)


def test_a_row_has_speed_memory_and_what_they_come_to() -> None:
    row, said = measure(Case(2, "bf16", changes=TINY), repeats=1)
    assert row.speed.keys() == row.memory.keys() == {"dino_vit", "reference"}
    assert "times the reference's speed" in said
    assert "TFLOP/s" in said


@pytest.mark.parametrize("name", ["dino_vit", "reference"])
def test_memory_is_measured_of_two_whole_steps(name: str) -> None:
    build_run(name, Case(2, "no", changes=TINY), CPU)()


def test_a_moment_counts_to_the_innermost_part() -> None:
    watch = loop.Stopwatch()
    with watch.part("outer"):
        time.sleep(0.02)
        with watch.part("inner"):
            time.sleep(0.1)
    assert 0.1 <= watch.seconds["inner"] < 0.2
    assert 0.02 <= watch.seconds["outer"] < 0.1


def test_the_loop_is_taken_apart() -> None:
    short = {"budget.steps": 6, "run.eval_every": None, "run.trackers": (), "data.workers": 0}
    phases = {"optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
    found = loop.shares({**short, **phases})
    assert found.keys() == {"loading", "forward", "backward", "optimiser", loop.REST}
    assert sum(found.values()) == pytest.approx(1)
    assert min(found.values()) > 0


@pytest.mark.skipif(not sources.ROLLUP.exists(), reason="memory is read from Linux's /proc")
def test_sources_are_opened_and_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "IMAGES", 2000)
    monkeypatch.setattr(sources, "FOLDERS", 2)
    for number in range(2):
        (tmp_path / f"n{number:08d}").mkdir()
    sources.MadeUp(tmp_path)
    for path in [tmp_path, *tmp_path.iterdir()]:
        os.utime(path, (time.time() - 60,) * 2)
    assert len(sources.MadeUp(tmp_path)) == 2000
    opener = partial(sources.FolderSource, tmp_path)
    assert opener().name(1999) == "n00000001/n00000001_00999.JPEG"
    seconds, memory = sources._open_and_ask(opener, workers=2, repeats=1)
    assert seconds > 0
    assert abs(memory) < 50


def test_files_are_read_from_every_kind(tmp_path: Path) -> None:
    (row,) = sources._files_table(tmp_path, repeats=1, images=20).rows
    assert row.speed.keys() == {"folder", "tar", "Parquet"}


def test_neighbours_vote_as_in_the_published_loop() -> None:
    assert "for 60 of 60 queries" in knn.check(knn.make_case(4000, 60, CPU))

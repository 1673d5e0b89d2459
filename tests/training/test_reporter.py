import re
from dataclasses import replace
from io import StringIO

import pytest

from dino_vit.core.text import duration, progress, shows_parts
from dino_vit.reports.metrics import Baseline
from dino_vit.reports.verdict import Verdict
from dino_vit.training import reporter
from dino_vit.training.progress import RunProgress
from dino_vit.training.reporter import describe_baseline
from tests.support.history import ADVICE, HEALTHY, NEWS, Clock, show_some
from tests.support.images import write_synthetic
from tests.support.training import opened, trained

FINE = Verdict("learning", "")


def test_lines_are_plain_and_aligned():
    stream, clock = StringIO(), Clock()
    show_some(RunProgress(total_steps=125_100, step=1000, stream=stream, clock=clock), clock)
    lines = stream.getvalue().splitlines()
    step = "step   1,050/125,100  epoch   0.2  loss  9.100 (-1.99)    2,310 img/s  wait  1%"
    assert lines[0] == "Resuming runs/demo [at step 1,000]."
    assert lines[1] == f"{step}  eta      -  too early to tell"
    assert lines[2].endswith("  learning  k-NN 47.5 %")
    assert lines[3].endswith("  collapsed  saved 1,120")
    assert lines[4] == f"step 1,150: collapsed. {NEWS} {ADVICE}"
    assert lines[5].endswith("  collapsed")
    assert lines[6].endswith("  eta  1d10h  learning")
    assert lines[7:] == ["step 1,250: learning. It has learned."]
    numbers = [line for line in lines if "img/s" in line]
    assert len({line.index("eta") for line in numbers}) == 1
    assert stream.getvalue().isascii()


def test_no_twenty_seconds_are_silent():
    """Neither between two log lines nor in an evaluation; where lines come often there is no other."""
    stream, clock = StringIO(), Clock()

    def lines():
        shown = stream.getvalue().splitlines()
        stream.truncate(stream.seek(0))
        return shown

    run = RunProgress(total_steps=100, stream=stream, clock=clock)
    with shows_parts(run.refresh), progress("Features", 8) as count:
        for step in range(1, 13):
            clock.now += 3
            run.advance(step, 100)
            run.refresh()
        assert [line.split()[:3] for line in lines()] == [
            ["step", f"{step}/100", "eta"] for step in (4, 8, 12)
        ]
        for _ in range(8):
            clock.now += 7
            count(1)
        assert [line.split(",")[0] for line in lines()] == [
            f"step 12/100  Features: {done} of 8" for done in (2, 4, 6)
        ] + ["step 12/100  Features: 8"]
        for step in (13, 14, 15):
            clock.now += 15
            run.advance(step, 100)
            run.show(replace(HEALTHY, step=step, total_steps=100), FINE)
        assert all("img/s" in line for line in lines())


def test_the_end_is_estimated_from_the_pace():
    stream, clock = StringIO(), Clock()
    progress = RunProgress(total_steps=1_000, stream=stream, clock=clock)
    clock.now += 500  # an evaluation before the first step, which is no step's time
    for step in range(100, 1_001, 100):
        clock.now += 100
        progress.show(replace(HEALTHY, step=step, total_steps=1_000), FINE)
    ends = [re.search(r"eta +(\S+)", line)[1] for line in stream.getvalue().splitlines()]
    assert (ends[0], ends[1], ends[-1]) == ("-", "13m20", "0s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (45, "45s"), (59.7, "1m00"), (750, "12m30"), (50_520, "14h02"), (284_400, "3d07h")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_the_time_left_of_a_budget_of_minutes_is_that_of_the_clock():
    """From the first line on, whatever the first steps took, and with a total that follows it."""
    clock, stream = Clock(), StringIO()
    left = lambda: 480 - clock.now  # noqa: E731
    progress = RunProgress(total_steps=600, stream=stream, clock=clock, seconds_left=left)
    for step, total in ((1, 600), (2, 240)):
        clock.now += 8
        progress.advance(step, total)
        progress.show(replace(HEALTHY, step=step, total_steps=total), FINE)
    first, second = stream.getvalue().splitlines()
    assert "eta   7m52" in first
    assert second.startswith("step   2/240")
    assert "eta   7m44" in second


def test_a_run_that_is_past_its_best_advises_the_best_checkpoint(tmp_path, monkeypatch, capsys, caplog):
    caplog.set_level("INFO", "dino_vit")  # at which a run shows its lines
    monkeypatch.setattr(
        reporter, "judge_run", lambda *_: Verdict("done", "It is past its best.", is_past_best=True)
    )
    state = trained(tmp_path / "run", {"budget.steps": 10, "compute.eval_every": 5 / 8})
    said = capsys.readouterr().err
    best = tmp_path / f"run/checkpoints/step-{state.evaluations.best['step']:08d}.safetensors"
    assert best.is_file()
    assert f"`dino-vit knn synthetic:64:32 {best}`" in said
    assert f"`dino-vit report {tmp_path / 'run'}`" in said


@pytest.mark.parametrize(
    ("labelled", "advised"),
    [
        (0, "label {}` writes a page to label a few by"),
        (20, "knn {}` classifies"),
        (16, "predict {} output=rest.csv` labels the other"),
    ],
)
def test_the_next_command_has_the_labels_of_the_run(labelled, advised, tmp_path, capsys, caplog):
    caplog.set_level("INFO", "dino_vit")
    for number in range(20):
        write_synthetic(tmp_path / f"photos/{number}.png", number)
    rows = (f"{number}.png,{number % 2}" for number in range(labelled))
    (tmp_path / "few.csv").write_text("\n".join(["name,label", *rows]))
    given = {"data.source": tmp_path / "photos"}
    given |= {"data.labels": tmp_path / "few.csv"} if labelled else {}
    trained(tmp_path / "run", {**given, "budget.steps": 4, "compute.eval_every": 1})
    arguments = f"{tmp_path / 'photos'} {tmp_path / 'run'}" + f" labels={tmp_path / 'few.csv'}" * bool(
        labelled
    )
    assert re.search(f"`dino-vit {advised.format(arguments)}", capsys.readouterr().err)


def test_the_figures_before_the_first_step_stand_beside_those_without_a_network(tmp_path):
    run = opened(tmp_path / "run", {"budget.steps": 100})
    assert describe_baseline(run, Baseline(knn=22.5, levelled_knn=25.5, pixels=45.0, chance=10.0)) == (
        "before the first step, k-NN accuracy on images, each labelled by those most similar to it (%): "
        "untrained network 22.5 by the CLS token, 25.5 by CLS and levelled cells; without a "
        "network, levelled if better: pixels 45.0, chance 10.0"
    )
    rank = describe_baseline(run, Baseline(rankme=9.0))
    assert rank == "before the first step the network tells images apart in about 9 ways (effective rank)"

import json
import math

import pytest
import torch

from dino_vit.data.images.decode import UnreadableImage
from dino_vit.training import interval as interval_module
from dino_vit.training.interval import Interval
from dino_vit.training.loop import take_step
from dino_vit.views.loader import Batch, UnreadableImages
from tests.support.images import broken_files, write_synthetic
from tests.support.processes import pair, run_in_two, torchrun_environs
from tests.support.runs import history, run
from tests.support.training import opened, trained


@pytest.fixture(scope="module")
def broken_set(tmp_path_factory):
    """Twelve files broken in as many ways among 228 good ones: 5 %."""
    folder = tmp_path_factory.mktemp("broken")
    for number in range(228):
        write_synthetic(folder / f"{number:03d}.png", number, size=24)
    for name, data in broken_files().items():
        (folder / f"broken-{name}").write_bytes(data)
    return folder


def named(output):
    return sorted(line.partition(": ")[0] for line in (output / "unreadable.txt").read_text().splitlines())


SETTINGS = {"budget.steps": 12, "data.batch_size": 40, "compute.log_every": 6, "compute.checkpoint_every": 12}
BROKEN = sorted(f"broken-{name}" for name in broken_files())


def test_a_set_with_broken_files_of_every_kind_trains_to_the_end(tmp_path, broken_set):
    """Two epochs, with loader processes; an evaluation names what it leaves out in a line."""
    assert len(BROKEN) >= 10
    settings = {**SETTINGS, "data.source": broken_set, "data.workers": 2, "compute.eval_every": 1}
    assert "cannot be read (unreadable.txt" in run(tmp_path / "run", settings)
    assert named(tmp_path / "run") == BROKEN
    assert history(tmp_path / "run")[-1]["step"] == 12


def test_two_processes_name_each_once_and_end_if_they_are_too_many(tmp_path, broken_set):
    settings = {**SETTINGS, "data.source": broken_set, "data.batch_size": 20}
    run_in_two(tmp_path / "run", settings)
    assert named(tmp_path / "run") == BROKEN
    assert history(tmp_path / "run")[-1]["step"] == 12
    started = pair(tmp_path / "strict", {**settings, "data.max_unreadable": 0}, torchrun_environs())
    codes = [process.wait() for process in started]
    sentence = started[codes.index(2)].said.splitlines()[-1]
    assert "images read so far cannot be read or used, more than data.max_unreadable=0" in sentence
    assert "unreadable.txt" in sentence


def test_an_interval_goes_on_where_it_was_left():
    whole, first, second = (Interval(torch.device("cpu")) for _ in range(3))
    steps = [(3.5, True), (math.nan, False), (0.1, True), (2.25, True), (math.inf, False), (math.nan, False)]
    for number, (loss, finite) in enumerate(steps):
        if number == 3:
            second.restore(json.loads(json.dumps(first.sums())), float(first.skipped))
        for interval in (whole, first if number < 3 else second):
            interval.add(torch.tensor(loss), torch.tensor(1.0), torch.tensor(finite), images=8)
    expected, found = whole.read(), second.read()
    assert (expected["loss"], expected["nonfinite_steps"]) == (pytest.approx(5.85 / 3), 3)
    assert whole.skipped_in_a_row == second.skipped_in_a_row == 2
    assert all(found[name] == expected[name] for name in ("loss", "gradient_norm", "nonfinite_steps"))


def batch(unreadable=0, images=10):
    failures = tuple(UnreadableImage(f"{number}.png", "broken") for number in range(unreadable))
    return Batch(
        epoch=0,
        step=0,
        samples=torch.zeros(images, dtype=torch.long),
        read=torch.zeros(images, dtype=torch.long),
        views={},
        augment={},
        unreadable=failures,
        times={},
    )


def test_a_share_beyond_the_limit_ends_a_run_but_not_its_first_few_images(tmp_path):
    unreadable = UnreadableImages(tmp_path, limit=0.1)
    for _ in range(10):
        unreadable.count(batch(unreadable=10, images=20))  # a third, but of 300 images only
    with pytest.raises(
        ValueError, match=r"^101 of the 311 images .* data.max_unreadable=0.1; see .*unreadable"
    ):
        unreadable.count(batch(unreadable=1))
    assert len((tmp_path / "unreadable.txt").read_text().splitlines()) == 10


def test_images_that_a_full_disk_left_out_are_listed_when_they_come_again(tmp_path):
    unreadable = UnreadableImages(tmp_path, limit=0.1)
    unreadable.path.mkdir()  # stands in for the full disk
    unreadable.count(batch(unreadable=2))
    assert unreadable.failed == 2
    unreadable.path.rmdir()
    unreadable.count(batch(unreadable=1))
    assert unreadable.path.read_text() == "0.png: broken\n"


def test_what_was_named_before_is_not_named_again(tmp_path):
    UnreadableImages(tmp_path, limit=0.1).count(batch(unreadable=2))
    UnreadableImages(tmp_path, limit=0.1).count(batch(unreadable=3))
    assert (tmp_path / "unreadable.txt").read_text() == "0.png: broken\n1.png: broken\n2.png: broken\n"


def test_a_skipped_step_counts_by_the_scale_that_it_was_taken_with(tmp_path, monkeypatch):
    """Not by the one that the next will try, or a run would end before it tries the smallest."""
    state, scales = opened(tmp_path, {"compute.precision": "fp16", "data.workers": 0}), []
    monkeypatch.setattr(state.interval, "add", lambda *sums: scales.append(float(sums[-1])))
    torch.nn.init.constant_(next(state.student.parameters()), torch.nan)
    batches = state.loader.batches()
    for _ in range(2):
        take_step(state, batches)
    assert scales == [65536, 32768]


def test_the_first_line_of_a_run_that_resumes_does_not_count_its_setup(tmp_path, monkeypatch):
    settings = {"budget.steps": 8, "compute.log_every": 4, "optim.warmup_epochs": 0}
    trained(tmp_path / "run", settings)
    now = [0.0]
    monkeypatch.setattr(interval_module.time, "perf_counter", lambda: now[0])
    state = opened(tmp_path / "run", {**settings, "budget.steps": 12, "compute.resume": "changed"})
    loss = float(state.interval.loss)
    now[0] += 1000.0  # of compiling, say
    state.interval.start_timing()
    now[0] += 10.0
    state.interval.images, state.interval.finite = 50, torch.ones(())
    assert state.interval.read()["images_per_second"] == pytest.approx(5)
    assert float(state.interval.loss) == loss

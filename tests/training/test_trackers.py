"""The figures of a run arrive where its trackers write them."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from itertools import pairwise

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dino_vit
from tests.support.runs import SETTINGS


def test_tensorboard_gets_every_scalar_of_the_record(tmp_path):
    settings = {**SETTINGS, "compute.trackers": "tensorboard", "compute.eval_every": 1}
    run = dino_vit.pretrain(output=tmp_path / "run", verbose=False, **settings)
    events = EventAccumulator(str(tmp_path / "run" / "logs"))
    events.Reload()
    for title in ("train/loss", "train/lr", "train/entropy_gap", "eval/knn", "eval/rankme"):
        name = title.partition("/")[2]
        written = {event.step: event.value for event in events.Scalars(title)}
        logged = {line["step"]: line[name] for line in run.metrics() if line[name] is not None}
        written.pop(0, None)  # of the network before the first step, in baseline.json
        assert logged.keys() == written.keys()
        assert len(logged) > 1
        assert written == pytest.approx(logged, rel=1e-6), "events are in float32"


@pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio")
def test_trackio_gets_them_too_under_the_name_of_the_run_when_it_resumes(tmp_path):
    output = tmp_path / "run"
    environ = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    for steps in (10, 20):
        given = {
            **SETTINGS,
            "compute.trackers": "[trackio]",
            "compute.resume": "changed",
            "budget.steps": steps,
        }
        settings = [f"{key}={'null' if value is None else value}" for key, value in given.items()]
        settings.append(f"output={output}")
        command = [sys.executable, "-m", "dino_vit", "pretrain", *settings]
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=300)
    with closing(sqlite3.connect(tmp_path / "trackio" / "logs.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {str(output)}
    lines = {line["step"]: line for line in dino_vit.RunFolder(output).metrics()}
    logged = {step: json.loads(metrics) for _, step, metrics in rows if step}
    assert logged.keys() == lines.keys() == set(range(1, 21))
    assert all(before < after for before, after in pairwise(logged))
    assert {step: one["train/loss"] for step, one in logged.items()} == {
        step: line["loss"] for step, line in lines.items()
    }

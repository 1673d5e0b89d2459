import json
import math
from dataclasses import replace

import pytest

from dino_vit.reports.metrics import (
    METRICS,
    append_record,
    drop_later_records,
    read_records,
    to_json,
)
from tests.support.history import HEALTHY


def test_scalars_are_grouped_and_hold_every_number():
    scalars = replace(HEALTHY, knn=47.5, terms={"koleo": 0.5}).scalars()
    assert (scalars["eval/knn"], scalars["train/excess"]) == (47.5, HEALTHY.excess)
    assert scalars["train/koleo"] == 0.5
    assert len(scalars) == sum(value is not None for value in HEALTHY.to_record().values())
    assert not {"eval/knn", "eval/rankme", "train/diagnosis"} & set(HEALTHY.scalars())


def test_metrics_come_back_from_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_records(path, METRICS) == []
    odd = replace(HEALTHY, step=10_050, loss=math.nan, gradient_norm=math.inf, knn=47.5)
    odd = replace(odd, terms={"koleo": math.nan, "gram": 0.5})
    append_record(path, HEALTHY.to_record())
    append_record(path, odd.to_record())
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["excess"] == HEALTHY.excess
    assert [second[key] for key in ("loss", "excess", "gradient_norm", "rankme")] == [None] * 4
    same, back = read_records(path, METRICS)
    assert same == HEALTHY
    assert math.isnan(back.loss)
    assert math.isnan(back.gradient_norm)
    assert math.isnan(back.terms["koleo"])
    assert back.terms["gram"] == 0.5
    assert (back.knn, back.rankme) == (47.5, None)


def append(path, steps):
    for step in steps:
        append_record(path, replace(HEALTHY, step=step).to_record())


def test_a_torn_line_does_not_take_the_next_one_with_it(tmp_path):
    """A disk that was full for a while leaves half a line in the middle."""
    path = tmp_path / "metrics.jsonl"
    append(path, [50])
    with path.open("ab") as file:
        file.write(path.read_bytes()[:100])
    append(path, [150, 200])
    assert [metrics.step for metrics in read_records(path, METRICS)] == [50, 150, 200]


@pytest.mark.parametrize("length", [1, 20, -2])
def test_a_torn_last_line_is_dropped(tmp_path, length):
    path = tmp_path / "metrics.jsonl"
    append(path, [50, 100, 150])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:length])
    assert [metrics.step for metrics in read_records(path, METRICS)] == [50, 100]
    drop_later_records(path, 1000)
    assert path.read_bytes() == b"".join(lines[:2])
    append(path, [150])
    assert [metrics.step for metrics in read_records(path, METRICS)] == [50, 100, 150]


DAMAGED = [b"\xff\n", to_json({**HEALTHY.to_record(), "loss": "low"}) + b"\n", b'{"step": 75}\n']


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_is_dropped_with_a_warning(tmp_path, caplog, damage):
    path = tmp_path / "metrics.jsonl"
    append(path, [50, 100])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + second)
    assert [metrics.step for metrics in drop_later_records(path, 100)] == [50, 100]
    assert "left out" in caplog.text
    assert path.read_bytes() == first + second

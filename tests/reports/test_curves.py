import json
import math
from dataclasses import replace

import pytest

from dino_vit.config.display import to_yaml
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.reports.curves import charts, live_data, thin
from dino_vit.reports.record import read_run, state
from dino_vit.training.diagnosis import UNIFORM
from dino_vit.training.readings import append_record
from tests.support.readings import HEALTHY


def test_a_long_curve_keeps_its_ends_and_its_peaks():
    points = [(step, math.sin(step / 900)) for step in range(20_000)]
    points[7_777] = (7_777, 50.0)
    points[12_345] = (12_345, -50.0)
    kept = thin(points)
    assert len(kept) <= 602
    assert {points[0], points[-1], points[7_777], points[12_345]} <= set(kept)
    assert kept == sorted(kept)
    assert thin(points[:100]) == points[:100]


def record_of(tmp_path, readings, baseline):
    """A run folder with these readings alone, and what is read from it."""
    for reading, name in readings:
        append_record(tmp_path / "metrics.jsonl", replace(reading, state=name).to_record())
    (tmp_path / "config.yaml").write_text(to_yaml(load(PretrainConfig)))
    (tmp_path / "baseline.json").write_text(json.dumps(baseline))
    return read_run(tmp_path)


def test_captions_explain_the_numbers(tmp_path):
    last = replace(HEALTHY, step=100, knn=40.0, rankme=55.0, data_wait=0.3)
    baseline = {"knn": 20.0, "raw_pixels": 10.0, "rankme": 12.0}
    record = record_of(
        tmp_path, [(replace(HEALTHY, step=50), "too early to say"), (last, "learning")], baseline
    )
    captions = {chart["id"]: chart["caption"] for chart in charts(record)}
    assert captions["loss"].startswith(
        f"{last.loss:.3f}, which is {-last.excess:.3f} below ln({last.prototypes})"
    )
    assert "40.0 %, 20.0 points above the untrained network" in captions["knn"]
    assert "30.0 points above the raw pixels" in captions["knn"]
    assert "55 of 384 dimensions, 12 before training" in captions["rank"]
    assert "try a higher data.workers" in captions["data_wait"]
    diagnosis, history = state(record)
    assert diagnosis.state == "learning"
    assert history == "since step 100; earlier: too early to say from step 50."


def test_numbers_that_no_run_has_leave_a_page(tmp_path):
    odd = replace(HEALTHY, images_per_second=1e-320, data_wait=1e308, nonfinite_steps=2**53)
    data = live_data(record_of(tmp_path, [(HEALTHY, "learning"), (odd, "learning")], {"knn": math.inf}))
    json.dumps(data, allow_nan=False)
    assert {chart["id"] for chart in data["charts"]} >= {"loss", "data_wait", "images_per_second"}


def test_a_collapse_is_named_with_advice(tmp_path):
    flat = replace(HEALTHY, loss=math.nan, embedding_std=math.nan)
    data = live_data(record_of(tmp_path, [(flat, UNIFORM.state)], {}))
    assert data["tone"] == "bad"
    assert data["texts"]["state"] == UNIFORM.state
    by_id = {chart["id"]: chart for chart in data["charts"]}
    assert "loss" not in by_id
    assert "entropies" in by_id
    json.dumps(data, allow_nan=False)


def test_masked_patches_have_charts_of_their_own(tmp_path):
    patches = {"mean_output_entropy": 7.0, "output_entropy": 5.0, "entropy_gap": 2.0}
    last = replace(HEALTHY, patch_loss=4.5, koleo=1.2, **{f"patch_{k}": v for k, v in patches.items()})
    drawn = {chart["id"]: chart for chart in charts(record_of(tmp_path, [(last, "learning")], {}))}
    assert drawn["patch_loss"]["series"] == {"loss": [(10_000, 4.5)]}
    # A student that gives every masked patch the same flat output: half of the views have one.
    assert drawn["patch_loss"]["levels"] == {
        f"0.5 · ln({last.prototypes})": pytest.approx(math.log(last.prototypes) / 2)
    }
    assert [points[0][1] for points in drawn["patch_entropies"]["series"].values()] == [7.0, 5.0, 2.0]
    assert drawn["koleo"]["series"] == {"koleo": [(10_000, 1.2)]}
    plain = tmp_path / "plain"
    plain.mkdir()
    drawn = {chart["id"] for chart in charts(record_of(plain, [(HEALTHY, "learning")], {}))}
    assert not drawn & {"patch_loss", "patch_entropies", "koleo"}

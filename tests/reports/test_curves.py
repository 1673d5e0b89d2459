import json
import math
from dataclasses import replace

import pytest

from dino_vit.config.loading import load, to_yaml
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.reports.curves import charts, figures, thin
from dino_vit.reports.page import Pictures, render
from dino_vit.reports.record import read_run, state
from dino_vit.training.metrics import append_record
from dino_vit.training.verdict import UNIFORM
from tests.support.history import HEALTHY


def test_a_long_curve_keeps_its_ends_and_its_peaks():
    points = [(step, math.sin(step / 900)) for step in range(20_000)]
    points[7_777] = (7_777, 50.0)
    points[12_345] = (12_345, -50.0)
    kept = thin(points)
    assert len(kept) <= 602
    assert {points[0], points[-1], points[7_777], points[12_345]} <= set(kept)
    assert kept == sorted(kept)
    assert thin(points[:100]) == points[:100]


def record_of(folder, history, baseline):
    """A run folder with this history alone, and what is read from it."""
    for metrics, name in history:
        append_record(folder / "metrics.jsonl", replace(metrics, state=name).to_record())
    (folder / "config.yaml").write_text(to_yaml(load(PretrainConfig)))
    (folder / "baseline.json").write_text(json.dumps(baseline))
    return read_run(folder)


def by_title(record):
    return {chart["title"]: chart for chart in charts(record)}


def test_figures_start_before_training_and_are_compared_with_their_levels(tmp_path):
    last = replace(HEALTHY, step=100, knn=40.0, rankme=55.0)
    baseline = {"knn": 20.0, "raw_pixels": 10.0, "rankme": 12.0}
    history = [(replace(HEALTHY, step=50), "too early to say"), (last, "learning")]
    record = record_of(tmp_path, history, baseline)
    drawn = by_title(record)
    assert drawn["k-NN accuracy"]["series"] == {"k-NN": [(0, 20.0), (100, 40.0)]}
    assert drawn["k-NN accuracy"]["levels"] == {"untrained network": 20.0, "raw pixels": 10.0}
    assert drawn["Effective rank"]["series"] == {"effective rank": [(0, 12.0), (100, 55.0)]}
    assert drawn["Loss"]["levels"] == {f"ln({last.prototypes})": pytest.approx(math.log(last.prototypes))}
    assert figures(record)["k-NN"] == "40.0 %"
    diagnosis, spans = state(record)
    assert diagnosis.state == "learning"
    assert spans == "since step 100; earlier: too early to say from step 50."


def test_a_collapse_is_named_and_a_loss_that_is_not_finite_is_left_out(tmp_path):
    flat = replace(HEALTHY, loss=math.nan, embedding_std=math.nan)
    record = record_of(tmp_path, [(flat, UNIFORM.state)], {})
    assert f'<span class="pill bad">{UNIFORM.state}</span>' in render(record, Pictures())
    assert "Teacher entropies" in by_title(record)
    assert "Loss" not in by_title(record)


def test_masked_patches_have_charts_of_their_own(tmp_path):
    patches = {"mean_output_entropy": 7.0, "output_entropy": 5.0, "entropy_gap": 2.0}
    last = replace(HEALTHY, patch_loss=4.5, koleo=1.2, **{f"patch_{k}": v for k, v in patches.items()})
    drawn = by_title(record_of(tmp_path, [(last, "learning")], {}))
    loss, entropies = drawn["Loss of masked patches"], drawn["Teacher entropies of masked patches"]
    assert loss["series"] == {"loss": [(10_000, 4.5)]}
    # A student that gives every masked patch the same flat output: half of the views have one.
    uniform = pytest.approx(math.log(last.prototypes) / 2)
    assert loss["levels"] == {f"0.5 · ln({last.prototypes})": uniform}
    assert [points[0][1] for points in entropies["series"].values()] == [7.0, 5.0, 2.0]
    assert drawn["KoLeo"]["series"] == {"KoLeo": [(10_000, 1.2)]}
    (tmp_path / "plain").mkdir()
    plain = by_title(record_of(tmp_path / "plain", [(HEALTHY, "learning")], {}))
    assert not {"Loss of masked patches", "Teacher entropies of masked patches", "KoLeo"} & set(plain)

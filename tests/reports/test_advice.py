"""The one thing to do after a run, recorded ones and ones of three evaluations."""

import math
import re
from dataclasses import replace

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.reports.metrics import Baseline
from dino_vit.reports.verdict import judge_run
from dino_vit.training.reporter import Reporter
from tests.reports.test_verdict import EARLY, recorded
from tests.support.history import HEALTHY, evaluated
from tests.support.training import opened


def test_collapses_and_steps_that_are_not_finite_get_a_setting_to_change():
    settled = ["optim.warmup_epochs=0", "optim.freeze_last_layer_epochs=0"]
    flat = evaluated(rankme=[50.0, 20.0, 12.0], settings=settled)
    assert flat.diagnosis == "collapsed"
    assert flat.advice == "In a new run, try optim.lr=0.00025."  # recipe=auto is in force
    history, config, baseline = recorded("flowers-hot")
    assert judge_run(history, config, baseline).advice == "In a new run, try recipe=auto."
    last = replace(HEALTHY, step=40, total_steps=40, epoch=0.5, loss=math.nan)  # a short run hears it too
    said = judge_run([last], load(PretrainConfig, None, ["compute.precision=fp16"]), None)
    assert (said.diagnosis, said.advice) == ("diverged", "In a new run, try compute.precision=bf16.")


def test_a_run_that_saw_few_images_hears_how_long_to_train():
    history, config, baseline = recorded("flowers-brief")
    config = load(PretrainConfig, config, {"budget.minutes": 2})
    assert history[-1].epoch < 1
    said = judge_run(history, config, baseline)
    assert said.diagnosis == EARLY
    least = "300 steps are the least to judge by"
    assert said.advice == f"In a new run, try budget.minutes=15: {least}."
    assert judge_run(history[:-1], config, baseline).advice == ""  # it is under way


def test_a_run_of_few_steps_is_not_stuck_by_a_single_evaluation():
    """As of a minute of photos, each seen once: the rank falls at first where k-NN rises, too."""
    last = replace(HEALTHY, step=68, total_steps=68, epoch=1.2, rankme=20.8, prototypes=256)
    minutes = load(PretrainConfig, None, ["budget.minutes=1", "recipe=auto"])
    said = judge_run([last], minutes, Baseline(rankme=29.3))
    assert str(said) == (
        "too early. Too little is measured to judge by.\n"
        "In a new run, try budget.minutes=4.4: 300 steps are the least to judge by."
    )
    labelled = replace(last, knn=40.0, best_knn=40.0)
    assert judge_run([labelled], minutes, Baseline(knn=41.0, best_knn=41.0, queries=500)).diagnosis == EARLY
    thrice = [replace(last, step=step) for step in (20, 40, 68)]
    assert judge_run(thrice, minutes, Baseline(rankme=29.3)).diagnosis == EARLY
    longer = [replace(record, step=5 * record.step, total_steps=340) for record in thrice]
    assert judge_run(longer, minutes, Baseline(rankme=29.3)).diagnosis == "stuck"


def test_a_best_step_is_named_beside_the_last_one(tmp_path, capsys, caplog):
    caplog.set_level("INFO", "dino_vit")  # at which a run shows its lines
    state = opened(tmp_path / "run", {})
    for step, text in (
        (0, "holds the last step\n"),
        (5, "last step, and step 5, the best by effective rank"),
    ):
        state.evaluations.best = {"figure": "rankme", "value": 20.8, "step": step}
        with Reporter(state) as reporter:
            reporter.finish()
        assert text in capsys.readouterr().err


def test_a_difference_that_may_be_chance_asks_for_more_time_or_labels():
    unsure = evaluated(knn=[40.0, 43.0, 44.0], settings=["budget.minutes=10"])
    assert unsure.advice == (
        "In a new run, try budget.minutes=20, or label more images: 341 are few to tell by."
    )


def test_longer_is_no_advice_where_accuracy_is_flat_or_far_below_baselines():
    rising = {"knn": [30.0, 42.0, 45.0], "best_knn": [30.0, 42.0, 45.0], "probe": [41.0, 43.0, 47.0]}
    first = {"knn": 30.0, "best_knn": 30.0}
    near = evaluated(**rising, before={**first, "pixels": 54.9}, settings=["budget.minutes=10"])
    rises = "it still rises (42.0 after two thirds, 45.0 at the end)"
    assert near.advice == f"In a new run, try budget.minutes=20: {rises}."
    far = evaluated(**rising, before={**first, "pixels": 55.1})
    assert far.sentence.startswith("It has learned, but k-NN is 10.1 points below pixels: k-NN, which")
    assert far.advice.startswith("Try weights that have seen 142 million photos: the same command with")
    flat = {**rising, "knn": [30.0, 44.1, 45.0]}
    assert evaluated(**flat, before={**first, "pixels": 20.0}).advice == ""


def test_what_is_far_below_baselines_is_to_start_from_published_weights():
    knn = {"knn": [30.0, 42.0, 45.0], "before": {"knn": 30.0, "pixels": 70.0}}
    advice = evaluated(**knn, settings=["budget.minutes=10"]).advice
    (setting,) = re.findall(r"init\.weights=\S+(?=,)", advice)
    assert load(PretrainConfig, None, [setting, "recipe=auto"]).init.weights.startswith("hf:")
    assert evaluated(**knn, settings=["budget.minutes=10", setting]).advice == ""

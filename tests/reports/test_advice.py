"""The one thing to do after a run, recorded ones and ones of three evaluations."""

import math
import re
from dataclasses import replace

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.reports.metrics import Baseline
from dino_vit.reports.verdict import judge_run
from tests.reports.test_verdict import EARLY, recorded
from tests.support.history import HEALTHY, evaluated


def test_collapses_and_steps_that_are_not_finite_get_a_setting_to_change():
    settled = ["optim.warmup_epochs=0", "optim.freeze_last_layer_epochs=0"]
    flat = evaluated(rankme=[50.0, 20.0, 12.0], settings=settled)
    assert flat.diagnosis == "collapsed"
    assert flat.advice == "In a new run, try optim.lr=0.00025."  # recipe=auto is in force
    history, config, baseline = recorded("flowers-hot")
    assert judge_run(history, config, baseline).advice == "In a new run, try recipe=auto."
    last = replace(HEALTHY, step=40, total_steps=40, epoch=0.5)  # a short run hears it too
    last = replace(last, loss=math.nan, nonfinite_steps=3)
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
        "too early to tell. Too little has been measured to judge by.\n"
        "In a new run, try budget.minutes=4.4: 300 steps are the least to judge by."
    )
    labelled = replace(last, knn=40.0, levelled_knn=40.0)
    assert (
        judge_run([labelled], minutes, Baseline(knn=41.0, levelled_knn=41.0, queries=500)).diagnosis == EARLY
    )
    thrice = [replace(last, step=step) for step in (20, 40, 68)]
    assert judge_run(thrice, minutes, Baseline(rankme=29.3)).diagnosis == EARLY
    longer = [replace(record, step=5 * record.step, total_steps=340) for record in thrice]
    assert judge_run(longer, minutes, Baseline(rankme=29.3)).diagnosis == "stuck"


def test_a_run_of_few_steps_is_not_stuck_where_the_loss_of_healthy_runs_passes_too():
    """As of a minute of generated images, which was told to change its rate, and had learned at its end."""
    settled = load(PretrainConfig, None, ["optim.warmup_epochs=0", "optim.freeze_last_layer_epochs=0"])
    first = replace(HEALTHY, epoch=1.2, loss=math.log(65536) - 0.01)
    for every, diagnosis in ((10, EARLY), (60, "stuck")):
        history = [replace(first, step=every * n, total_steps=5 * every) for n in range(1, 6)]
        assert judge_run(history, settled, None).diagnosis == diagnosis


def test_a_difference_that_may_be_chance_asks_for_more_labels():
    unsure = evaluated(knn=[40.0, 43.0, 44.0], settings=["budget.minutes=10"])
    assert unsure.advice == "Label more images: 341 are too few to tell by."


def bits(*parts):
    """Of images in parts of these sizes, those that are right: of each second part."""
    text = "".join(str(number % 2) * size for number, size in enumerate(parts))
    return f"{int(text, 2):x}"


def test_longer_is_advised_where_accuracy_rises_by_more_than_chance_on_its_images():
    """A rise from 68 to 72 % is chance on 150 images, on 5,000 it is not; the same ones tell it sooner."""
    rising, before = {"knn": [50.0, 68.0, 72.0]}, {"knn": 30.0, "pixels": 20.0}
    rises = "the accuracy still rises (at step 700 it was 68.0 %)"
    longer = f"In a new run, try budget.minutes=20: {rises}."
    ten = ["budget.minutes=10"]
    assert evaluated(**rising, before={**before, "queries": 150}, settings=ten).advice == ""
    assert evaluated(**rising, before={**before, "queries": 5000}, settings=ten).advice == longer
    before |= {"queries": 500}
    assert evaluated(**rising, before=before, settings=ten).advice == ""
    same = [None, bits(160, 340), bits(140, 360)]  # 20 more images right, and none of the others wrong
    assert evaluated(**rising, knn_answers=same, before=before, settings=ten).advice == longer
    mixed = [None, bits(160, 340), bits(0, 60, 80, 300)]
    assert evaluated(**rising, knn_answers=mixed, before=before, settings=ten).advice == ""


def test_longer_is_no_advice_far_below_baselines():
    rising = {"knn": [30.0, 42.0, 55.0], "before": {"knn": 30.0}, "settings": ["budget.minutes=10"]}
    rising["before"]["pixels"] = 64.9
    assert evaluated(**rising).advice.startswith("In a new run, try budget.minutes=20: the accuracy still")
    rising["before"]["pixels"] = 68.0
    far = evaluated(**rising)
    assert far.sentence == "It has learned, but pixels without a network are better."
    assert far.advice.startswith("Try weights that have seen 142 million photos: the same command with")
    (setting,) = re.findall(r"init\.weights=\S+(?=,)", far.advice)
    assert load(PretrainConfig, None, [setting, "recipe=auto"]).init.weights.startswith("hf:")
    assert not evaluated(**{**rising, "settings": [setting]}).advice.startswith("Try weights")
    few = evaluated(**{**rising, "before": {**rising["before"], "queries": 30}})
    assert "pixels" not in few.sentence, "on 30 images 13 points may be chance"

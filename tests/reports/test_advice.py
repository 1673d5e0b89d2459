"""What is advised after runs, recorded ones and ones of three evaluations."""

import math
import shlex
from dataclasses import replace

from dino_vit.cli import build_parser
from dino_vit.config.loading import config_from, load
from dino_vit.config.loading import replace as replace_settings
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.reports.verdict import judge
from tests.reports.test_verdict import BELOW, EARLY, recorded
from tests.support.history import HEALTHY, evaluated


def test_a_run_that_saw_few_images_hears_how_long_to_train():
    history, config, baseline = recorded("flowers-brief")
    config = replace_settings(config, {"budget.minutes": 2})
    assert history[-1].epoch < 1
    said = judge(history, config, baseline)
    assert said.diagnosis.state == EARLY
    assert said.advice == "Try budget.minutes=2.8: 300 steps or one epoch are the least to judge by."
    assert judge(history[:-1], config, baseline).advice == ""  # it is under way


def test_advice_follows_what_was_measured():
    # Less colour was tried where it explains the features, and took points from k-NN on each set of photos.
    assert "augment" not in evaluated(colour=[0.8, 0.8, 0.77]).advice
    flat = evaluated(rankme=[50.0, 20.0, 12.0], settings=["loss.centering=sinkhorn", "loss.koleo_weight=0.1"])
    assert flat.advice == "Try optim.lr=0.00025: the effective rank fell from 50.0 to 12.0."
    knn = {"knn": [41.0, 43.0, 45.0]}
    rising = evaluated(probe=[41.0, 43.0, 47.0], **knn, settings=["budget.minutes=10"])
    assert rising.advice == "Try budget.minutes=20: the ridge probe still rises (43.0 halfway, 47.0 now)."
    hardly = evaluated(probe=[41.0, 46.9, 47.0], settings=["budget.minutes=10"])
    assert "the ridge probe still rises" not in hardly.advice
    past = evaluated(knn=[60.0, 70.0, 52.0], settings=["budget.steps=1000"])
    assert past.advice == (
        "Try budget.steps=700: k-NN was the best at step 700 (70.0 %), and its checkpoint is kept."
    )


def test_longer_is_no_advice_where_accuracy_is_flat_or_far_below_raw_pixels():
    rising = {"knn": [30.0, 42.0, 45.0], "best_knn": [30.0, 42.0, 45.0], "probe": [41.0, 43.0, 47.0]}
    first = {"knn": 30.0, "best_knn": 30.0}
    assert "budget.epochs=200" in evaluated(**rising, before={**first, "raw_pixels": 54.9}).advice
    far = evaluated(**rising, before={**first, "raw_pixels": 55.1})
    assert far.diagnosis.state == BELOW
    assert far.figures.startswith("10 points below raw pixels: k-NN 45.0 ± 5.3 % (raw pixels 55.1, before")
    assert far.advice.startswith("Try model.stem=conv: early convolutions learn shapes")
    flat = {**rising, "knn": [30.0, 44.1, 45.0]}
    assert evaluated(**flat, before={**first, "raw_pixels": 20.0}).advice == ""


def test_what_is_below_raw_pixels_in_spite_of_convolutions_gets_a_command_for_published_weights():
    knn = {"knn": [30.0, 42.0, 45.0], "before": {"knn": 30.0, "raw_pixels": 70.0}}
    settings = ["data.source=my photos", "output=runs/a", "budget.minutes=10", "model.stem=conv"]
    labels = "data.labels=my labels.csv"
    for sources in (["my photos", labels], ["a=b", labels], ["[a, b c]", "data.mix=[0.5, 0.5]"]):
        own = [f"data.source={sources[0]}", sources[1], *settings[1:]]
        advice = evaluated(**knn, settings=own).advice
        program, *words = shlex.split(advice.partition("`")[2].rpartition("`")[0])
        assert (program, words[0]) == ("dino-vit", "pretrain")
        config = config_from(build_parser(words).parse_args(words), PretrainConfig)
        assert config.data == load(PretrainConfig, None, ["recipe=auto", *own]).data
        assert config.output == "runs/a-published"
        assert config.init.weights.startswith("timm:")
        assert (config.recipe, config.budget.minutes) == ("auto", 10)
    advice = evaluated(**knn, settings=["data.source=object:Photos", *settings[1:]]).advice
    assert advice.startswith("Try init.weights=timm:")


def test_a_short_run_of_steps_that_are_not_finite_is_not_told_to_go_on():
    last = replace(HEALTHY, step=40, total_steps=40, epoch=0.5, loss=math.nan)
    said = judge([last], load(PretrainConfig, None, ["run.precision=fp16"]), None)
    assert (said.diagnosis.state, said.advice) == ("non-finite steps", "Try run.precision=bf16.")

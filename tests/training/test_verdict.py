"""What is said of runs that really happened: their readings, rounded, lie in `recorded`.

Each took a core some minutes. flowers: 3,586 photos at 48 pixels, width 96 (small: a ViT-S), recipe=auto;
textures: 4,000 of the generated ones, width 64; unlabelled: 2,500 photos. mean: loss.centring=ema without
KoLeo; good: sinkhorn with KoLeo.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.training.readings import BASELINE, READING, Baseline
from dino_vit.training.verdict import STATES, circumstances, diagnose, summarise

RECORDED = Path(__file__).parent / "recorded"
EARLY, LEARNING, BELOW = "too early to say", "learning", "learning, but still below raw pixels"
LOSING, COLLAPSING, STUCK = "learning, but losing rank", "collapsing", "stuck at ln(prototypes)"
PAST = "past its best"
COLLAPSE = ["one prototype", "all images alike", "uniform collapse"]
# The states that each run went through, with its labels and as if it had none.
TABLE = {
    "flowers-good": ([EARLY, LEARNING], [EARLY, LEARNING]),
    "flowers-mean": ([EARLY, LEARNING, LOSING], [EARLY, COLLAPSING]),
    "flowers-small": ([EARLY, COLLAPSING], [EARLY, COLLAPSING]),
    "flowers-hot": ([EARLY, COLLAPSING], [EARLY, COLLAPSING]),
    "flowers-brief": ([EARLY, "no better than before training"], [EARLY, "no better than before training"]),
    # Grey views teach nothing of the colours that tell flowers apart; without labels nobody can see that.
    "flowers-always-grey": ([EARLY, "worse than before training"], [EARLY, LEARNING]),
    "flowers-no-batch-norm": ([EARLY, *COLLAPSE], [EARLY, *COLLAPSE]),
    "two-processes": ([EARLY, COLLAPSING], [EARLY, COLLAPSING]),
    "textures-good": ([EARLY, BELOW, LEARNING], [EARLY, LEARNING, EARLY]),
    "textures-short": ([EARLY, LOSING], [EARLY, COLLAPSING]),
    "textures-flat": ([EARLY, BELOW, "uniform collapse"], [EARLY, "uniform collapse"]),
    "textures-hot": ([EARLY, LEARNING, LOSING, PAST, LOSING], [EARLY, COLLAPSING]),
    "textures-past-best": (  # k-NN rises to 39 %, falls to 28 % and stays at 30 %
        [EARLY, BELOW, LEARNING, "all images alike", LOSING, PAST, "uniform collapse"],
        [EARLY, "all images alike", COLLAPSING, "uniform collapse"],
    ),
    "textures-no-evaluation": (["not evaluated", STUCK], ["not evaluated", STUCK]),
    "unlabelled-good": ([EARLY, LEARNING], [EARLY, LEARNING]),
    "unlabelled-mean": ([EARLY, COLLAPSING], [EARLY, COLLAPSING]),
}


def recorded(name, *, labels=True):
    """Return the readings of a run and its circumstances, possibly as if it had no labels."""
    found = json.loads((RECORDED / f"{name}.json").read_text())
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    baseline = found["baseline"] and BASELINE.validate_python(found["baseline"])
    if not labels:
        rows = [{**row, "knn": None, "best_features": None, "best_knn": None} for row in rows]
        baseline = baseline and Baseline(rankme=baseline.rankme)
    readings = [READING.validate_json(json.dumps(row)) for row in rows]
    config = load(
        PretrainConfig, None, [f"{key}={json.dumps(value)}" for key, value in found["settings"].items()]
    )
    return readings, circumstances(config, readings, baseline, images=3586)


def test_every_recorded_run_is_in_the_table():
    assert {path.stem for path in RECORDED.glob("*.json")} == set(TABLE)


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("name", TABLE)
def test_a_recorded_run_is_called_what_it_was(name, labels):
    readings, run = recorded(name, labels=labels)
    told = [diagnose(readings[:count], run).state for count in range(len(readings) + 1)]
    changes = [state for place, state in enumerate(told) if place == 0 or told[place - 1] != state]
    expected = TABLE[name][not labels]
    assert changes == (expected if expected[0] == EARLY else [EARLY, *expected])


def test_nearly_every_state_has_a_real_run():
    reached = {state for runs in TABLE.values() for states in runs for state in states}
    # No run was found yet in which patches collapse and images do not.
    assert reached == set(STATES) - {"non-finite steps", "all patches alike"}


def test_the_last_line_has_the_figures_their_reason_and_what_to_do():
    said = summarise(*recorded("flowers-good"))
    assert said.startswith(
        "learning: k-NN 53.0 % (before training 41.3, raw pixels 42.9, largest class 24.3, chance 20.0), "
        "55.7 % by CLS + mean patch, effective rank 52.4 (before training 14.4)."
    )
    assert "k-NN rose by 2.5 in the last two thirds: a larger budget.epochs should bring more." in said
    assert "With 3,586 images, trained weights are the better start: init.weights=FILE_OR_RUN." in said
    said = summarise(*recorded("flowers-small"))
    assert said.startswith("collapsing: k-NN 39.6 % (before training 44.4,")
    assert "Try loss.centring=sinkhorn" in said
    said = summarise(*recorded("unlabelled-good", labels=False))
    assert said.startswith("learning: effective rank 38.0 (before training 14.1), entropy gap 2.54.")
    assert "k-NN" not in said


def test_a_run_from_trained_weights_of_many_images_is_not_told_to_start_from_some():
    readings, run = recorded("flowers-good")
    for changes in ({"from_scratch": False}, {"images": 1_000_000}):
        assert "init.weights" not in summarise(readings, replace(run, **changes))


def test_without_readings_nothing_is_claimed():
    _, run = recorded("flowers-good")
    assert diagnose([], run).state == EARLY
    assert summarise([], run).startswith("too early to say.")


def test_what_a_run_has_already_is_not_advised():
    readings, run = recorded("flowers-always-grey")
    config = load(PretrainConfig, None, ["recipe=auto", "loss.centring=sinkhorn", "loss.koleo_weight=0.03"])
    remedy = circumstances(config, readings, None, images=3586).remedy
    assert diagnose(readings, replace(run, remedy=remedy)).advice.endswith(". Try a lower optim.lr.")
    config = load(PretrainConfig, None, ["recipe=auto"])
    remedy = circumstances(config, readings, None, images=3586).remedy
    assert remedy == "Try loss.centring=sinkhorn, loss.koleo_weight=0.03, or a lower optim.lr."

"""What is said of runs: recorded ones, whose records lie rounded in `recorded`, and ones spoilt on purpose.

Each of the recorded runs took a core some minutes. flowers: 3,586 photos at 48 pixels, width 96 (small: a
ViT-S), recipe=auto; textures: 4,000 of the generated ones, width 64; unlabelled: 2,500 photos. mean:
loss.centering=ema without KoLeo; good: sinkhorn with KoLeo.
"""

import contextlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.reports import collapse as collapses
from dino_vit.reports.collapse import PATIENCE, collapse
from dino_vit.reports.metrics import BASELINE, METRICS, Baseline
from dino_vit.reports.verdict import WAITING, judge_run, waits_for_images
from dino_vit.training.loop import take_step
from dino_vit.training.reporter import Reporter
from tests.support.history import HEALTHY, evaluated
from tests.support.training import opened

RECORDED = Path(__file__).parent / "recorded"
EARLY, LEARNING, STUCK, COLLAPSED, DONE = "too early to tell", "learning", "stuck", "collapsed", "done"
# The states that each run went through, with its labels and as if it had none.
TABLE = {
    "flowers-good": ([EARLY, LEARNING, DONE], [EARLY, LEARNING, DONE]),
    "flowers-mean": ([EARLY, LEARNING, DONE], [EARLY, COLLAPSED]),
    "flowers-small": ([EARLY, COLLAPSED], [EARLY, COLLAPSED]),
    "flowers-hot": ([EARLY, COLLAPSED], [EARLY, COLLAPSED]),
    "flowers-brief": ([EARLY], [EARLY]),  # 40 steps, and not every image seen
    # Grey views teach nothing of the colours that tell flowers apart; without labels nobody can see that.
    "flowers-always-grey": ([EARLY, STUCK], [EARLY, LEARNING, DONE]),
    "flowers-no-batch-norm": ([EARLY, COLLAPSED], [EARLY, COLLAPSED]),
    "two-processes": ([EARLY, COLLAPSED], [EARLY, COLLAPSED]),
    "textures-good": ([EARLY, LEARNING, DONE], [EARLY]),
    "textures-short": ([EARLY], [EARLY]),  # the same
    "textures-flat": ([EARLY, LEARNING, COLLAPSED], [EARLY, COLLAPSED]),
    "textures-hot": ([EARLY, LEARNING, DONE], [EARLY, COLLAPSED]),
    # k-NN rises to 39 %, falls to 28 % and stays at 30 %
    "textures-past-best": ([EARLY, LEARNING, COLLAPSED, LEARNING, COLLAPSED], [EARLY, COLLAPSED]),
    "textures-no-evaluation": ([EARLY, DONE], [EARLY, DONE]),  # 100 steps
    "unlabelled-good": ([EARLY, LEARNING, DONE], [EARLY, LEARNING, DONE]),
    "unlabelled-mean": ([EARLY, COLLAPSED], [EARLY, COLLAPSED]),
}


def recorded(name, *, labels=True):
    """Return the history of a run, its settings and its baseline, possibly as if it had no labels."""
    record = json.loads((RECORDED / f"{name}.json").read_text())
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]
    baseline = record["baseline"] and BASELINE.validate_python(record["baseline"])
    if not labels:
        rows = [{**row, "knn": None, "levelled_knn": None} for row in rows]
        baseline = baseline and Baseline(rankme=baseline.rankme)
    history = [METRICS.validate_json(json.dumps(row)) for row in rows]
    config = load(
        PretrainConfig, None, [f"{key}={json.dumps(value)}" for key, value in record["settings"].items()]
    )
    return history, config, baseline


def test_every_recorded_run_is_in_the_table():
    assert {path.stem for path in RECORDED.glob("*.json")} == set(TABLE)


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("name", TABLE)
def test_a_recorded_run_is_called_what_it_was(name, labels):
    history, *run = recorded(name, labels=labels)
    names = [judge_run(history[:count], *run).diagnosis for count in range(len(history) + 1)]
    changes = [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]
    expected = TABLE[name][not labels]
    assert changes == expected


def test_a_plain_sentence_comes_before_the_figures_and_one_thing_to_do_after_them():
    sentence, figures, advice = str(judge_run(*recorded("flowers-small"))).splitlines()
    assert sentence == (
        "collapsed. Images have become alike: the network tells images apart in about 8 ways (effective "
        "rank), at its best in 93."
    )
    assert figures == (
        "k-NN accuracy on 3,586 images, each labelled by those most similar to it: by the CLS token "
        "39.6 ± 1.6 %, before training 44.4 %, by CLS and levelled cells 39.9 ± 1.6 %, the same before "
        "training 44.4 %, pixels without a network 42.9 %, chance 20.0 %."
    )
    assert advice == "In a new run, try recipe=auto."
    assert judge_run(*recorded("flowers-good")).paragraphs == [
        "It has learned.",
        "k-NN accuracy on 3,586 images, each labelled by those most similar to it: by the CLS token "
        "53.0 ± 1.6 %, before training 41.3 %, by CLS and levelled cells 55.7 ± 1.6 %, the same before "
        "training 41.3 %, pixels without a network 42.9 %, chance 20.0 %.",
    ]
    *run, baseline = recorded("flowers-small")
    for of_each_other, images in ((True, "training images"), (False, "held-out images")):
        said = judge_run(*run, replace(baseline, leave_one_out=of_each_other, queries=500))
        assert said.accuracy.startswith(f"k-NN accuracy on 500 {images}, each labelled by")
    said = judge_run(*recorded("unlabelled-good", labels=False))
    assert said.sentence == (
        "The network tells images apart in about 38 ways (effective rank), before training in 14; only "
        "labels can say whether these are the ways that matter."
    )
    assert (said.accuracy, said.advice) == ("", "")


def test_without_figures_from_before_nothing_is_worse_than_them():
    history = [
        replace(HEALTHY, step=step, total_steps=900, knn=step / 10, rankme=step) for step in (300, 600, 900)
    ]
    config = load(PretrainConfig, None, [])
    assert [judge_run(history[:count], config, None).diagnosis for count in (1, 3)] == [EARLY, DONE]


def test_what_may_be_chance_on_its_images_is_neither_a_rise_nor_a_fall():
    sentence = "It is not clearly better than before training: on 341 images the difference may be chance."
    for last, diagnosis in ((36.5, EARLY), (34.5, STUCK)):  # of more or less than its standard error
        said = evaluated(knn=[34.0, 37.0, last], before={"knn": 32.0})
        assert (said.diagnosis, said.sentence) == (diagnosis, sentence)
    learned = {"knn": [20.0, 30.0, 40.0], "before": {"knn": 20.0, "pixels": 45.0}}
    assert evaluated(**learned).sentence == "It has learned.", "5 points below pixels may be chance"
    learned["before"]["edges"] = 58.0
    below = "It has learned, but edges without a network are better."
    assert evaluated(**learned).sentence == below
    read_better = evaluated(**learned, levelled_knn=[30.0, 45.0, 55.0])
    assert read_better.sentence == "It has learned.", "cells see what the CLS token does not"
    worse = evaluated(knn=[33.0, 28.0, 20.0])
    assert (worse.diagnosis, worse.sentence) == (STUCK, "It is worse than before training.")


def test_figures_of_several_labels_have_their_name_and_standard_errors():
    """A rise of 6 points: sure with a standard error of one point each, not of three."""
    before = {"knn": 40.0, "knn_error": 1.0, "metric": "mAP"}
    knn = [40.0, 43.0, 46.0]
    said = evaluated(knn=knn, knn_error=[1.0] * 3, before=before)
    assert said.accuracy.startswith("k-NN mAP on 341 images, each")
    assert ": by the CLS token 46.0 ± 2.0 %, before training 40.0 %, " in said.accuracy
    assert said.diagnosis == DONE
    unsure = evaluated(knn=knn, knn_error=[3.0] * 3, before=before | {"knn_error": 3.0})
    assert unsure.diagnosis == EARLY


def test_the_same_images_before_and_after_are_compared_one_by_one():
    """21 of 341 images more: as if of other images that may be chance, of the same images it is not."""
    before = {"knn": 40.0, "knn_answers": f"{(1 << 136) - 1:x}"}
    knn = {"knn": [40.0, 43.0, 46.0], "levelled_knn": [40.0] * 3}
    assert evaluated(**knn, before={"knn": 40.0}).diagnosis == EARLY
    assert evaluated(**knn, knn_answers=[None, None, f"{(1 << 157) - 1:x}"], before=before).diagnosis == DONE
    mixed = f"{((1 << 157) - 1) << 90:x}"  # 90 images of those before are wrong now, and 111 others right
    assert evaluated(**knn, knn_answers=[None, None, mixed], before=before).diagnosis == EARLY


def test_a_run_past_its_best_names_the_checkpoint_to_take():
    past = evaluated(knn=[60.0, 70.0, 52.0], settings=["budget.steps=1000"])
    assert (past.diagnosis, past.is_past_best, past.advice) == (DONE, True, "")
    assert past.sentence == (
        "It is past its best: k-NN was 70.0 % at step 700; the checkpoint of that step is kept."
    )
    chance = evaluated(knn=[60.0, 70.0, 65.0])
    assert not chance.is_past_best, "on 341 images"


def test_a_dead_run_stays_dead():
    """Its loss wavers around ln(prototypes), while the rank of its features, which nobody trains, spreads."""
    level = math.log(65536)
    losses = [level, level, level, level, level, 0.997 * level, level, 0.995 * level]
    settled = [f"optim.{name}_epochs=0" for name in ("warmup", "freeze_last_layer")]
    config = load(PretrainConfig, None, settled)
    history = []
    for number, loss in enumerate(losses, 1):
        step = 1000 * number
        record = replace(HEALTHY, step=step, total_steps=8000, loss=loss, knn=None, rankme=20.0 + number)
        history.append(replace(record, mean_output_entropy=level, output_entropy=level - 0.1))
        history[-1] = replace(history[-1], entropy_gap=0.1, epoch=float(number))
        verdict = judge_run(history, config, Baseline(rankme=18.0))
        history[-1] = replace(history[-1], diagnosis=verdict.diagnosis)
    assert [record.diagnosis for record in history[4:]] == [STUCK] * 4
    spread = [replace(record, rankme=record.rankme * (1 + record.step / 4000)) for record in history]
    assert judge_run(spread, config, Baseline(rankme=18.0)).diagnosis == STUCK
    # With labels: a rise before it died does not make it one that learns, if nothing has risen since.
    labelled = [replace(record, knn=45.0, levelled_knn=45.0) for record in history]
    answers = Baseline(knn=20.0, levelled_knn=20.0, rankme=18.0, queries=2000)
    assert judge_run(labelled, config, answers).diagnosis == STUCK
    labelled[-1] = replace(labelled[-1], knn=47.0, levelled_knn=47.0)
    assert judge_run(labelled, config, answers).diagnosis == STUCK, "on 2,000 images that may be chance"
    labelled[-1] = replace(labelled[-1], knn=52.0, levelled_knn=52.0)
    assert judge_run(labelled, config, answers).diagnosis == DONE
    awake = [*history[:-1], replace(history[-1], loss=0.98 * level, entropy_gap=3.0, rows=1024)]
    assert judge_run(awake, config, Baseline(rankme=18.0)).diagnosis == DONE


def test_without_records_nothing_is_claimed():
    _, *run = recorded("flowers-good")
    assert str(judge_run([], *run)) == f"{EARLY}. There is no evaluation yet."
    unevaluated = load(PretrainConfig, None, ["compute.eval_every=null"])
    said = "Nothing is evaluated (compute.eval_every=null)."
    assert str(judge_run([HEALTHY], unevaluated, None)) == f"{EARLY}. {said}"
    last = replace(HEALTHY, step=HEALTHY.total_steps)
    assert str(judge_run([last], unevaluated, None)) == f"done. {said}"


FLAT = math.log(65536)


def repeated(*, count=PATIENCE, **changes):
    return [replace(HEALTHY, step=10_000 + 50 * n, **changes) for n in range(count)]


FLAT_OUTPUTS = {"mean_output_entropy": FLAT, "output_entropy": FLAT, "entropy_gap": 0.001, "loss": FLAT}
ONE = {"mean_output_entropy": 0.1, "output_entropy": 0.1, "entropy_gap": 0.0, "loss": 0.2}
ALIKE = {"mean_output_entropy": 7.0, "output_entropy": 7.0, "entropy_gap": 0.0, "loss": 7.1}
FLAT_LOSS = {"loss": FLAT + 0.01}


@pytest.mark.parametrize(
    ("changes", "diagnosis"),
    [
        ({}, None),
        (FLAT_OUTPUTS, collapses.UNIFORM),
        (ONE, collapses.ONE_PROTOTYPE),
        (ALIKE, collapses.IMAGES_ALIKE),
        (FLAT_LOSS, collapses.STUCK_AT_LN),
        ({"prototypes": 2, "mean_output_entropy": 0.69, "entropy_gap": 0.6, "loss": 0.3}, None),
        ({**FLAT_OUTPUTS, "entropy_gap": 0.02, "loss": FLAT - 0.03}, None),  # hardly, but on its way
        ({**ALIKE, "rows": 8}, None),  # too few to tell
        ({"terms": {"patch_entropy_gap": 0.001, "patch_rows": 900}}, collapses.PATCHES_ALIKE),
        ({"terms": {"patch_entropy_gap": 0.001, "patch_rows": 1}}, None),  # too few to tell
        ({"terms": {"patch_entropy_gap": 0.5, "patch_rows": 900}}, None),
    ],
)
def test_several_records_in_a_row_make_a_collapse(changes, diagnosis):
    history = repeated(**changes)
    assert diagnosis_of(history) == diagnosis
    assert diagnosis_of(history[1:]) is None
    assert diagnosis_of(history, settled_step=history[0].step + 1) is None
    assert diagnosis_of([*history[:2], HEALTHY, *history[3:]]) is None
    # At the end of a run there will be no more history.
    last = replace(history[1], total_steps=history[1].step)
    assert diagnosis_of([history[0], last]) == (None if changes is FLAT_LOSS else diagnosis)
    assert diagnosis_of([last]) is None


def diagnosis_of(history, settled_step=0):
    return collapse(history, settled_step=settled_step)


def test_lost_steps_are_named_even_before_it_has_settled():
    def diagnosis(counts, **changes):
        history = [replace(r, nonfinite_steps=c) for r, c in zip(repeated(count=6), counts, strict=True)]
        history[-1] = replace(history[-1], **changes)
        return diagnosis_of(history, settled_step=10**6)

    assert diagnosis([0, 0, 0, 0, 0, 50]) is None  # a fifth
    assert diagnosis([0, 0, 0, 0, 0, 51]) == collapses.NONFINITE
    assert diagnosis([51] * 6) is None  # long ago
    assert diagnosis([1] * 6, loss=math.nan) == collapses.NONFINITE
    assert diagnosis([0] * 6, loss=math.nan) is None, "float16 seeks its scale"
    assert diagnosis_of([replace(HEALTHY, nonfinite_steps=9)]) is None


def waiting(*shares):
    return [replace(HEALTHY, step=5 * n, data_wait=share) for n, share in enumerate(shares, start=1)]


@pytest.mark.parametrize(
    ("shares", "waits"),
    [
        ([0.5] * PATIENCE, False),  # the first record does not count
        ([0.0, *[0.5] * PATIENCE], True),
        ([0.5] * (PATIENCE + 1) + [WAITING], False),
        ([float("nan")] * 9, False),
    ],
)
def test_several_records_in_a_row_that_wait_get_advice(shares, waits):
    assert waits_for_images(waiting(*shares)) == waits


def test_it_is_said_once_with_what_was_measured(tmp_path, capsys, caplog):
    caplog.set_level("INFO", "dino_vit")  # at which a run shows its lines
    state = opened(tmp_path / "run", {"data.workers": 1, "compute.eval_every": "null"})
    with Reporter(state) as reporter, contextlib.closing(state.loader.batches()) as batches:
        take_step(state, batches)
        for metrics in waiting(*[0.5] * (PATIENCE + 4)):
            reporter.log(metrics)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "waits for images" in line]
    times = re.search(
        r"waits for images 50% of its time; an image takes (\S+) ms to read, (\S+) ms to decode, (\S+) ms "
        r"to crop, with data.workers=1",
        line,
    )
    assert all(float(time) > 0 for time in times.groups())

"""The linear evaluations as programs, on cached features."""

import json

import numpy as np
import pytest
import torch

import dino_vit
from dino_vit import load_backbone
from dino_vit.config.commands import SupervisedConfig
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.logistic import train_logistic
from dino_vit.eval.probes import count_correct
from dino_vit.eval.sets import LabelledFeatures, hold_out, open_sets
from dino_vit.eval.statistics import accuracy
from tests.support.backbones import extracted
from tests.support.images import write_classes
from tests.support.processes import command_in_two
from tests.support.runs import command_here

FAST = ["rates=[0.001, 0.01, 0.1]", "steps=40"]


def arguments(weights, *more, source="synthetic:120:16", output="found.json"):
    settings = [f"weights={weights}", f"output={weights.parent / output}", "precision=no", "overwrite=true"]
    return ["linear", str(source), *settings, *more]


def evaluate(weights, *more, output="found.json", **keywords):
    said = command_here(*arguments(weights, *more, output=output, **keywords))
    return json.loads((weights.parent / output).read_text()), said


def evaluate_in_two(weights, *more):
    log = weights.parent / "log"
    _, second = command_in_two(log, *arguments(weights, *more, output="two.json"))
    assert "top-1" not in second, "only rank 0 prints"
    return json.loads((weights.parent / "two.json").read_text())


def test_the_grid_reports_every_cell_and_the_best(weights):
    found, said = evaluate(weights, *FAST, "select=source")
    assert found["images"] == {"train": 96, "val": 24}
    cells = [(cell["rate"], cell["blocks"], cell["mean"]) for cell in found["table"]]
    assert cells == [
        (rate, blocks, mean) for rate in (0.001, 0.01, 0.1) for blocks in (1, 3) for mean in (False, True)
    ]
    best = found["best"]
    assert best["top1"]["percent"] == max(cell["top1"] for cell in found["table"])
    assert best["top1"]["low"] < best["top1"]["percent"] < best["top1"]["high"]
    assert sum(one["correct"] for one in best["per_class"].values()) == best["top1"]["correct"]
    assert best["top5"]["correct"] >= best["top1"]["correct"]
    assert "chosen on the images that it is evaluated on" in said
    assert ("tried; give others with rates=" in said) == (best["rate"] != 0.01)
    assert said.count("*") == 2
    assert found["settings"]["steps"] == 40
    assert found["weights"]["source"] == str(weights)


def test_two_processes_find_what_one_does(weights):
    """With fewer rates than processes."""
    method = [*FAST, "rates=[0.1]"]
    (one, said), two = evaluate(weights, *method), evaluate_in_two(weights, *method)
    assert "tried; give others" not in said, "of one"
    for key in ("best", "table", "images", "chosen_on"):
        assert two[key] == one[key]


def test_the_best_is_chosen_on_held_out_training_images(weights):
    """Here in half precision."""
    found, said = evaluate(weights, *FAST, "precision=bf16")
    held_out = [cell["held_out"] for cell in found["table"]]
    assert found["images"]["train"] == 87
    assert {round(percent * 9 / 100, 3) % 1 for percent in held_out} == {0}, "of nine images"
    assert found["best"]["held_out"] == max(held_out)
    assert found["chosen_on"] == "train"
    assert "chosen on 9 training images" in said


def test_random_labels_are_told_by_chance_unless_heads_are_chosen_by_the_answers(tmp_path, weights):
    """Of two classes, over eight draws of labels: 192 images to judge by."""
    source = make_textures(length=120, size=16)
    settings = {"steps": 20, "rates": [0.001, 0.01, 0.1, 1], "precision": "no", "verbose": False}
    right, names = {"train": 0, "source": 0}, [source.name(index) for index in range(120)]
    for seed in range(8):
        drawn = np.random.default_rng(seed).integers(2, size=120)
        rows = (f"{name},{label}\n" for name, label in zip(names, drawn, strict=True))
        (tmp_path / "labels.csv").write_text("name,label\n" + "".join(rows))
        for select in right:
            given = {"labels": tmp_path / "labels.csv", "seed": seed, "select": select}
            result = dino_vit.linear("synthetic:120:16", weights, **given, **settings)
            right[select] += result.figure.correct
            assert result.details["chosen_on"] == select
            assert result.top5 is None
            assert "top-5" not in str(result)
    by_train, by_source = (accuracy(correct, 192) for correct in right.values())
    assert by_train.low < 50 < by_train.high
    assert by_source.value > 54, "this test would see it"


def test_an_unreadable_image_is_skipped_and_classes_match_by_name(weights, tmp_path):
    train, val = write_classes(tmp_path / "train", "abc", 8), write_classes(tmp_path / "val", "bc", 4)
    (train / "a" / "0.png").write_bytes(b"no image")
    found, said = evaluate(weights, *FAST, f"train={train}", source=val)
    assert found["images"] == {"train": 23 - 2, "val": 8}
    assert set(found["best"]["per_class"]) == {"b", "c"}
    assert "a/0.png" in said


def test_held_out_images_are_those_of_the_seed(weights):
    whole = LabelledFeatures(torch.arange(50.0)[:, None], torch.arange(50), np.arange(50), ())
    left, held_out = hold_out(whole, 3)
    assert len(held_out) == 5
    assert sorted([*left.targets.tolist(), *held_out.targets.tolist()]) == list(range(50))
    assert torch.equal(left.features[:, 0].long(), left.targets)
    assert hold_out(whole, 3)[1].targets.tolist() == held_out.targets.tolist()
    assert hold_out(whole, 4)[1].targets.tolist() != held_out.targets.tolist()


def test_a_regression_has_the_best_penalty(weights):
    found, said = evaluate(weights, "method=logistic", "standardise=false", "cs=[0.1, 10]", "select=source")
    sets, model = open_sets(SupervisedConfig(source="synthetic:120:16")), load_backbone(weights)
    train, val = (extracted(model, each.images) for each in sets)
    heads = train_logistic(train, torch.from_numpy(sets[0].targets), cs=[0.1, 10], classes=10)
    right = count_correct(heads, val, torch.from_numpy(sets[1].targets)).tolist()
    assert [(cell["C"], cell["top1"]) for cell in found["table"]] == [
        (c, pytest.approx(100 * count / len(val), abs=1e-4))
        for c, count in zip((0.1, 10), right, strict=True)
    ]
    assert found["best"]["top1"]["correct"] == max(right)
    assert "the best C is at the end of those that were tried; give others with cs=" in said, "of two"


def test_images_that_cannot_be_read_are_named_once(weights, tmp_path):
    photos = write_classes(tmp_path / "photos", "ab", 20)
    for name in ("a/3.png", "b/11.png", "b/17.png"):
        (photos / name).write_bytes(b"")
    said = evaluate(weights, *FAST, source=photos)[1]
    assert said.count("cannot be read and are left out") == 1
    assert "3 of 40 images cannot be read" in said


def test_by_default_regressions_on_standardised_features_are_chosen_on_training_images(weights):
    found, said = evaluate(weights)
    assert (found["method"], found["settings"]["standardise"]) == ("logistic", True)
    assert len({cell["C"] for cell in found["table"]}) == 13
    assert {(cell["blocks"], cell["mean"]) for cell in found["table"]} == {
        (1, False),
        (1, True),
        (3, False),
        (3, True),
    }
    assert "chosen on 9 training images" in said
    assert evaluate(weights, "steps=20")[0]["method"] == "grid"
    said = command_here(*arguments(weights, "method=logistic", "steps=20"), code=2)
    assert "steps are for method=grid" in said

"""The linear grid as published: each head is a layer in training alone; the program as it is started."""

import json

import pytest
import torch
from torch import nn

from dino_vit import load_backbone
from dino_vit.config.commands import SupervisedConfig
from dino_vit.eval.linear import count_correct
from dino_vit.eval.logistic import train_logistic
from dino_vit.eval.sets import open_sets
from dino_vit.views.sampler import Sampler
from eval import linear_grid
from eval.linear_grid import LinearGridConfig, run, train_heads
from tests.support.backbones import extracted
from tests.support.images import write_classes
from tests.support.processes import command_in_two

COLUMNS = (slice(8, 16), slice(0, 24), slice(8, 24))
RATES = (0.024, 2.4, 24.0)  # at a batch of 256
SOURCE = "synthetic:120:16"


def labelled(count, seed, classes=5, width=24):
    """Features whose classes overlap, so that the accuracy of a good probe is far from 0 and 100 %."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (count,), generator=generator)
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    return 0.5 * centers[targets] + torch.randn(count, width, generator=generator), targets


def trained(features, targets, **changes):
    settings = {"columns": COLUMNS, "rates": RATES, "classes": 5, "steps": 60, "batch_size": 32, "seed": 3}
    return train_heads(features, targets, **{**settings, **changes}, device=torch.device("cpu"))


def single_probe(features, targets, columns, rate, *, steps=60, batch_size=32):
    """One cell by torch's own layer, loss, optimiser and schedule, from the same start in the same order."""
    (start,) = trained(features, targets, columns=[columns], rates=[0.0], steps=1)
    probe = nn.Linear(start.weight.shape[-1], 5)
    with torch.no_grad():
        probe.weight.copy_(start.weight[0])
        probe.bias.zero_()
    optimizer = torch.optim.SGD(probe.parameters(), lr=rate * batch_size / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    plans = Sampler(length=len(features), global_batch=batch_size, seed=3).batch_specs()
    for _, plan in zip(range(steps), plans, strict=False):
        loss = nn.functional.cross_entropy(
            probe(features[plan.samples][:, columns]), targets[plan.samples], reduction="mean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return probe


def test_every_cell_of_the_grid_is_the_single_probe_with_that_setting():
    features, targets = labelled(400, seed=0)
    images, truth = labelled(2000, seed=1)
    percents = []
    for heads in trained(features, targets):
        right = count_correct(heads, images, truth)
        for cell, rate in enumerate(RATES):
            probe = single_probe(features, targets, heads.columns, rate)
            torch.testing.assert_close(heads.weight[cell], probe.weight.data, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(heads.bias[cell], probe.bias.data, atol=1e-4, rtol=1e-4)
            alone = (probe(images[:, heads.columns]).argmax(1) == truth).sum()
            percents.append(100 * float(right[cell]) / len(truth))
            assert percents[-1] == pytest.approx(100 * float(alone) / len(truth), abs=0.2)
    assert max(percents) - min(percents) > 5, "the cells differ, or this would show nothing"


def settings(weights, output, **more):
    files = {"source": SOURCE, "weights": str(weights), "output": str(weights.with_name(output))}
    return {**files, "precision": "no", "overwrite": True, **more}


def evaluate(weights, **more):
    return run(LinearGridConfig(**settings(weights, "found.json", **more)))


def test_the_grid_reports_every_cell_and_the_best_on_the_images_it_is_judged_by(weights):
    result = evaluate(weights, rates=(0.001, 0.01, 0.1), steps=40)
    found = json.loads(weights.with_name("found.json").read_text())
    assert found["images"] == {"train": 96, "val": 24}
    cells = [(cell["rate"], cell["blocks"], cell["mean"]) for cell in found["table"]]
    assert cells == [
        (rate, blocks, mean) for rate in (0.001, 0.01, 0.1) for blocks in (1, 3) for mean in (False, True)
    ]
    best = max(cell["top-1"] for cell in found["table"])
    assert found["figures"]["top-1"]["value"] == pytest.approx(best, abs=1e-4)
    assert "chosen on the images that it is evaluated on" in str(result)
    assert (found["settings"]["steps"], found["weights"]["source"]) == (40, str(weights))


def test_two_processes_with_one_rate_find_what_one_does(weights):
    evaluate(weights, rates=(0.1,), steps=40)
    words = [f"{key}={value}" for key, value in settings(weights, "two.json", steps=40).items()]
    _, second = command_in_two(weights.with_name("log"), "eval/linear_grid.py", *words, "rates=[0.1]")
    assert "top-1" not in second, "only rank 0 prints"
    one, two = (json.loads(weights.with_name(name).read_text()) for name in ("found.json", "two.json"))
    assert {key: two[key] for key in ("figures", "table", "images")} == {
        key: one[key] for key in ("figures", "table", "images")
    }


def test_regressions_as_published_read_the_class_token_as_it_is(weights, monkeypatch):
    monkeypatch.setattr(linear_grid, "CS", (0.1, 10.0))
    found = evaluate(weights, method="logistic").details
    sets, model = open_sets(SupervisedConfig(source=SOURCE)), load_backbone(weights)
    train, val = (extracted(model, each.images) for each in sets)
    heads = train_logistic(train, torch.from_numpy(sets[0].targets), cs=[0.1, 10], classes=10)
    right = count_correct(heads, val, torch.from_numpy(sets[1].targets)).tolist()
    assert [(cell["C"], cell["top-1"]) for cell in found["table"]] == [
        (c, pytest.approx(100 * count / len(val), abs=1e-4))
        for c, count in zip((0.1, 10), right, strict=True)
    ]
    assert found["figures"]["top-1"]["correct"] == max(right)


def test_several_labels_are_refused(weights, tmp_path):
    labels, photos = tmp_path / "several.csv", write_classes(tmp_path / "photos", "ab", 4)
    rows = (f"{kind}/{number}.png,x;y" for kind in "ab" for number in range(3))
    labels.write_text("\n".join(["name,label", "a/3.png,x", *rows]))
    with pytest.raises(ValueError, match=r"linear_grid\.py needs one class for each image"):
        evaluate(weights, source=str(photos), labels=str(labels), several=True)

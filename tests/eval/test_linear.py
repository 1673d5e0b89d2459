"""The linear evaluation as a command, on cached features; the figures of many heads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dino_vit.eval import linear
from dino_vit.eval.linear import count_correct, head_losses, judge_head, nth_head
from dino_vit.eval.sets import LabelledFeatures
from dino_vit.models.classifiers import LinearHeads
from tests.support.images import write_classes
from tests.support.processes import command_in_two
from tests.support.runs import command_here


def arguments(weights, *more, source="synthetic:120:16", output="found.json", folder=None):
    output = (folder or weights.parent) / output
    settings = [f"weights={weights}", f"output={output}", "precision=no", "overwrite=true"]
    return ["linear", str(source), *settings, *more]


def evaluate(weights, *more, output="found.json", **keywords):
    given = arguments(weights, *more, output=output, **keywords)
    said = command_here(*given)
    return json.loads(Path(given[3].removeprefix("output=")).read_text()), said


def test_the_best_is_chosen_on_held_out_training_images_and_two_processes_find_it_too(weights):
    """With all penalties."""
    found, said = evaluate(weights)
    assert found["images"] == {"train": 87, "val": 24}
    assert len({head["C"] for head in found["heads"]}) == 13
    assert {(head["blocks"], head["mean"]) for head in found["heads"]} == {
        (1, False),
        (1, True),
        (3, False),
        (3, True),
    }
    held_out = [head["held_out"] for head in found["heads"]]
    assert {round(percent * 9 / 100, 3) % 1 for percent in held_out} == {0}, "of nine images"
    assert found["best"]["held_out"] == max(held_out)
    assert "the best of 52 heads on 9 training images" in said
    top1, top5, _ = found["figures"].values()
    assert top1["low"] < top1["value"] < top1["high"]
    assert sum(row["top-1"]["correct"] for row in found["per_class"].values()) == top1["correct"]
    assert top5["correct"] >= top1["correct"]
    assert found["weights"]["source"] == str(weights)
    _, second = command_in_two(weights.parent / "log", *arguments(weights, output="two.json"))
    assert "top-1" not in second, "only rank 0 prints"
    two = json.loads((weights.parent / "two.json").read_text())
    shared = "best", "heads", "images", "figures", "per_class"
    assert [two[key] for key in shared] == [found[key] for key in shared]


@pytest.mark.usefixtures("few_penalties")
def test_an_unreadable_image_is_skipped_and_classes_match_by_name(weights, tmp_path):
    """Here in half precision."""
    train, val = write_classes(tmp_path / "train", "abc", 8), write_classes(tmp_path / "val", "bc", 4)
    (train / "a" / "0.png").write_bytes(b"no image")
    found, said = evaluate(weights, "precision=bf16", f"train={train}", source=val)
    assert found["images"] == {"train": 23 - 2, "val": 8}
    assert set(found["per_class"]) == {"b", "c"}
    assert "a/0.png" in said


@pytest.mark.usefixtures("few_penalties")
def test_every_head_reads_the_backbones_beside_too(weights, monkeypatch):
    trained, seen = linear._train, []
    monkeypatch.setattr(linear, "_train", lambda *given: seen.append(given[1]) or trained(*given))
    evaluate(f"{weights}+pixels", folder=weights.parent)
    beside = range(32 * 4, 32 * 4 + 3 * 32 * 32)  # after CLS of three blocks, the mean; pixels
    starts = [(64, 96), (64, 128), (0, 96), (0, 128)]
    assert sorted(map(tuple, seen[0])) == sorted((*range(*each), *beside) for each in starts)


@pytest.fixture
def heads():
    """Three heads of five classes that read some columns."""
    return LinearHeads(torch.randn(3, 5, 6), torch.randn(3, 5), slice(2, 8))


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_the_loss_of_each_head_is_that_of_its_scores(task, heads, monkeypatch):
    monkeypatch.setattr(linear, "_MAX_SCORES", 40)  # a few images at a time
    features, targets = torch.randn(23, 9), torch.randint(5, (23,))
    if task != "multiclass":
        targets = F.one_hot(targets, 5).float()
    naive = {"multiclass": F.cross_entropy, "multilabel": F.binary_cross_entropy_with_logits}[task]
    expected = [naive(features[:, 2:8] @ w.T + b, targets) for w, b in zip(*heads[:2], strict=True)]
    found = head_losses(heads, LabelledFeatures(features, targets, np.arange(23), (), task))
    torch.testing.assert_close(found.float(), torch.stack(expected), rtol=1e-5, atol=0)


def test_classifying_in_blocks_equals_classifying_at_once(heads, monkeypatch):
    features, targets = torch.randn(50, 9), torch.randint(5, (50,))
    expected = heads.scores(features[:, heads.columns])
    monkeypatch.setattr(linear, "_MAX_SCORES", 7 * heads.bias.numel())
    right = [int((expected[:, head].argmax(1) == targets).sum()) for head in range(3)]
    assert count_correct(heads, features, targets).tolist() == right
    images = LabelledFeatures(features, targets, np.arange(50), tuple("abcde"))
    ranked = torch.from_numpy(judge_head(nth_head([heads, heads], 2), images).predictions.ranked)
    assert torch.equal(ranked, expected[:, 1].argsort(dim=1, descending=True))

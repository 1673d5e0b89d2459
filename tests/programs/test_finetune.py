"""Supervised training of a whole network: its arithmetic, resuming, several processes."""

import json

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dino_vit import load_backbone
from dino_vit.config.commands import SupervisedConfig
from dino_vit.config.loading import load
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.eval.sets import open_sets
from eval.finetune import FinetuneConfig, run
from tests.support.backbones import extracted
from tests.support.naive import ranked_classes
from tests.support.processes import command_in_two
from tests.support.runs import save_and_fail, tensors

FAST = ["epochs=3", "warmup_epochs=1", "batch_size=16", "workers=0", "precision=no", "lr=0.01"]


def arguments(output, *more):
    return ["source=synthetic:100:16", f"output={output}", *FAST, *more]


def tune(output, *more):
    text = str(run(load(FinetuneConfig, None, arguments(output, *more))))
    return json.loads((output / "eval" / "finetune.json").read_text()), text


def test_it_learns_and_the_network_loads_with_its_classifier(tmp_path, weights):
    output = tmp_path / "run"
    found, said = tune(
        output, f"weights={weights}", "epochs=6", "lr=0.05", "layer_decay=1", "crop=[1, 1]", "smoothing=0"
    )
    losses = [epoch["loss"] for epoch in found["history"]]
    assert losses[-1] < losses[0] - 0.1
    assert [epoch["epoch"] for epoch in found["history"]] == list(range(1, 7))
    assert "after 6 epochs: top-1" in said

    model, start = load_backbone(output, num_classes=10), load_backbone(weights)
    train, val = open_sets(SupervisedConfig(source="synthetic:100:16"))
    bank, queries = (F.normalize(extracted(start, one.images).double()) for one in (train, val))
    by_loop = [ranked_classes((bank @ query).tolist(), train.targets.tolist(), 20)[0] for query in queries]
    assert found["history"][0]["knn_before"] == found["knn_before"]
    assert found["knn_before"]["correct"] == sum(by_loop == val.targets)
    assert model.provenance.mean == (0.5, 0.5, 0.5)
    assert model.provenance.config["classes"] == list(val.classes)
    right = int((model.head(extracted(model, val.images)).argmax(1) == torch.from_numpy(val.targets)).sum())
    assert found["figures"]["top-1"]["correct"] == right
    assert found["figures"]["top-1"]["images"] == 20
    assert load_backbone(output).architecture["num_classes"] == 0, "it serves as a backbone too"


@pytest.mark.parametrize("name", ["backbone.safetensors", "eval/finetune.json"])
def test_files_of_others_in_its_folder_stay(name, tmp_path, weights):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"of a user")
    with pytest.raises(ValueError, match="already exists"):
        tune(tmp_path / "run", f"weights={weights}")
    assert path.read_bytes() == b"of a user"


def test_a_short_run_has_a_short_warm_up(tmp_path, weights):
    for number in range(100):  # a brightness for each of four classes, which neighbours tell at once
        (tmp_path / "abcd"[number % 4]).mkdir(exist_ok=True)
        colour = (60 * (number % 4) + number // 10,) * 3
        Image.new("RGB", (16, 16), colour).save(tmp_path / "abcd"[number % 4] / f"{number}.png")
    settings = [f"source={tmp_path}", f"weights={weights}", f"output={tmp_path / 'run'}", "workers=0"]
    result = run(load(FinetuneConfig, None, [*settings, "epochs=1", "lr=1e-9", "precision=no"]))
    assert result.details["config"]["warmup_epochs"] == 0.1
    assert result.figure.value < result.details["knn_before"]["value"], "its classifier has learned nothing"
    assert "fine-tuning ends below it, so try more epochs" in str(result)


def test_a_run_resumes_after_its_last_epoch_with_the_same_numbers(tmp_path, weights, monkeypatch, caplog):
    start = f"weights={weights}"
    whole, _ = tune(tmp_path / "whole", start)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_fail(Checkpoints.save))
        with pytest.raises(OSError, match="the disk is full"):
            tune(tmp_path / "killed", start)
    assert not (tmp_path / "killed" / "eval").exists()
    with caplog.at_level("INFO"):
        again, _ = tune(tmp_path / "killed", start)
    assert "resuming after epoch 1" in caplog.text
    assert again["history"] == whole["history"]
    for name, tensor in tensors(tmp_path / "whole" / "state", 3).items():
        assert torch.equal(tensors(tmp_path / "killed" / "state", 3)[name], tensor), name
    with pytest.raises(ValueError, match="a run with another config"):
        tune(tmp_path / "killed", start, "smoothing=0")


def test_two_processes_train_as_one(tmp_path, weights):
    """Stochastic depth is drawn in each process for its own images, so it is off."""
    more = (f"weights={weights}", "drop_path=0")
    one, _ = tune(tmp_path / "one", *more)
    _, second = command_in_two(
        tmp_path / "log", "eval/finetune.py", *arguments(tmp_path / "two", *more, "batch_size=8")
    )
    assert "top-1" not in second, "only rank 0 prints"
    two = json.loads((tmp_path / "two" / "eval" / "finetune.json").read_text())
    for ours, theirs in zip(two["history"], one["history"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["top-1"]["images"] == theirs["top-1"]["images"] == 20
    alone, together = (tensors(tmp_path / name / "state", 3) for name in ("one", "two"))
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, atol=2e-4, rtol=1e-2, msg=name)


@pytest.mark.parametrize("turned", [(), (2, 3)], ids=["upright", "turned by 180"])
def test_one_step_is_that_of_the_written_out_recipe(tmp_path, weights, turned):
    """One batch of all images, whose loss and moves are written out."""
    more = (f"weights={weights}", "epochs=1", "warmup_epochs=0", "drop_path=0", "layer_decay=0.5")
    more += (f"flip={int(3 in turned)}", f"vertical_flip={int(2 in turned)}")
    found, _ = tune(tmp_path / "run", *more, "batch_size=80", "crop=[1, 1]", "clip=0.5", "smoothing=0.3")
    after = tensors(tmp_path / "run" / "state", 1)

    torch.manual_seed(derive_seed(0, RngPurpose.NETWORK))
    model, (train, _) = load_backbone(weights), open_sets(SupervisedConfig(source="synthetic:100:16"))
    model.add_classifier(10)
    images = torch.stack([train.images.read(place) for place in range(80)])
    images = ((images / 255 - 0.5) / 0.5).flip(turned)
    targets = torch.from_numpy(train.targets)
    truth = 0.7 * F.one_hot(targets, 10) + 0.03
    loss = -(model(images).log_softmax(1) * truth).sum(1).mean()
    assert found["history"][0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    rate = 0.01 * 80 / 256  # Adam's first step is the rate up or down
    torch.testing.assert_close(after["model.head.bias"].abs(), torch.full((10,), rate), rtol=1e-3, atol=0)
    before = load_backbone(weights).state_dict()
    for layer, name in enumerate(
        ("patch_embed.proj.bias", "blocks.0.norm1.bias", "blocks.1.norm1.bias", "norm.bias")
    ):
        scale = 0.5 ** (4 - layer) if layer < 3 else 1
        moved = (after[f"model.{name}"] - before[name]).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, rate * scale), rtol=0.02, atol=0)

"""The linear protocol of 2021: its heads, resuming, several processes."""

import json

import pytest
import torch
import torch.nn.functional as F

from dino_vit import load_backbone
from dino_vit.config.commands import SupervisedConfig
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.eval.sets import open_sets
from dino_vit.models.backbone import FeatureSpec
from eval.dino2021 import Dino2021Config, run
from tests.support.backbones import extracted
from tests.support.images import write_classes
from tests.support.processes import command_in_two
from tests.support.runs import save_and_fail

SOURCE = "synthetic:120:16"


def settings(weights, name="found", **more):
    fast = {"precision": "no", "lr": 0.1, "workers": 0, "batch_size": 32, "epochs": 2, "blocks": 2}
    files = {"weights": str(weights), "output": str(weights.with_name(f"{name}.json")), "overwrite": True}
    return {"source": SOURCE, **fast, **files, **more}


def train(weights, name="found", **more):
    return run(Dino2021Config(**settings(weights, name, **more))).details


def head_of(weights, name="found"):
    return torch.load(weights.with_name(f"{name}.pth"), weights_only=True)["state_dict"]


@pytest.mark.parametrize(("blocks", "mean"), [(2, False), (1, True)])
def test_heads_are_written_as_the_reference_does(weights, blocks, mean):
    details = train(weights, blocks=blocks, mean=mean, epochs=3)
    weight, bias = (head_of(weights)[f"module.linear.{name}"] for name in ("weight", "bias"))
    assert weight.shape == (10, 64)
    (_, val), model = open_sets(SupervisedConfig(source=SOURCE)), load_backbone(weights)
    spec = FeatureSpec(tokens="cls+mean" if mean else "cls", blocks=blocks)
    features = extracted(model, val.images, spec=spec)
    if mean:  # c0, p0, c1, p1, ...
        features = torch.stack([features[:, :32], features[:, 32:]], dim=2).flatten(1)
    scores = F.linear(features, weight, bias)
    assert details["figures"]["top-1"]["correct"] == int(
        (scores.argmax(1) == torch.from_numpy(val.targets)).sum()
    )
    assert details["figures"]["top-1"]["value"] == pytest.approx(details["percents"][-1], abs=1e-4)


def test_a_head_resumes_and_two_processes_train_the_same(weights, monkeypatch):
    alone = train(weights)
    with pytest.raises(ValueError, match="holds a run with another settings"):
        train(weights, epochs=3)
    given = settings(weights, "two", batch_size=16)
    words = (f"{key}={value}" for key, value in given.items())
    said, second = command_in_two(weights.with_name("log"), "eval/dino2021.py", *words)
    assert "top-1" not in second, "only rank 0 prints"
    assert f"best after epoch {1 + alone['percents'].index(max(alone['percents']))}" in said
    together = json.loads(weights.with_name("two.json").read_text())
    assert together["percents"] == pytest.approx(alone["percents"], abs=0.2)
    for name, tensor in head_of(weights).items():
        torch.testing.assert_close(head_of(weights, "two")[name], tensor, atol=1e-5, rtol=1e-4)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_fail(Checkpoints.save))
        with pytest.raises(OSError, match="the disk is full"):
            train(weights, "killed")
    assert weights.with_name("killed.state").is_dir()
    assert not weights.with_name("killed.pth").exists()
    assert train(weights, "killed")["percents"] == alone["percents"]
    assert all(torch.equal(head_of(weights, "killed")[n], t) for n, t in head_of(weights).items())


def test_what_the_protocol_lacks_is_refused(weights, tmp_path):
    labels, photos = tmp_path / "several.csv", write_classes(tmp_path / "photos", "ab", 6)
    names = (path.relative_to(photos) for path in sorted(photos.rglob("*.png")))
    labels.write_text(
        "path,label\n" + "".join(f"{name},{'x;y' if row % 2 else 'x'}\n" for row, name in enumerate(names))
    )
    with pytest.raises(ValueError, match=r"dino2021\.py needs one class for each image"):
        train(weights, source=str(photos), labels=str(labels), several=True)
    (problem,) = Dino2021Config(**settings(weights, mean=True)).contradictions()
    assert problem == "mean=true needs blocks=1, not 2"

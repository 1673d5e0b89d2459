"""`examples/minimal.py`, the whole method on a page: it takes the steps that the library takes."""

import runpy
import sys
from itertools import islice
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.testing import assert_close

from dino_vit import load_backbone
from dino_vit.training.loop import take_step
from tests.support.documents import ROOT
from tests.support.images import saved, smooth
from tests.support.training import opened, without_key_biases

PATH = ROOT / "examples/minimal.py"
STEPS, TOTAL, PER_EPOCH = 5, 20, 8


@pytest.fixture
def minimal():
    """The names of the example, whose functions see what is changed in it."""
    return SimpleNamespace(**runpy.run_path(str(PATH)))


def settings_of(minimal):
    return {
        "model.patch_size": minimal.PATCH,
        "model.width": minimal.WIDTH,
        "model.depth": minimal.DEPTH,
        "model.heads": minimal.HEADS,
        "model.drop_path": 0,
        "head.hidden_dim": minimal.HIDDEN,
        "head.bottleneck_dim": minimal.BOTTLENECK,
        "head.prototypes": minimal.PROTOTYPES,
        "views.global_size": minimal.SIDE,
        "views.local_size": minimal.SIDE // 2,
        "views.local_count": minimal.LOCALS,
        "loss.teacher_temp": minimal.TEACHER_TEMP,
        "loss.warmup_teacher_temp_epochs": 0,
        "teacher.momentum": minimal.EMA_MOMENTUM,
        "optim.lr": minimal.LR,
        "optim.lr_scaling": "none",
        "optim.min_lr": minimal.MIN_LR,
        "optim.weight_decay": minimal.WEIGHT_DECAY,
        "optim.weight_decay_end": minimal.WEIGHT_DECAY_END,
        "optim.clip": minimal.CLIP,
        "optim.clip_mode": "tensor",
        "optim.warmup_epochs": minimal.WARMUP * TOTAL / PER_EPOCH,
        "optim.freeze_last_layer_epochs": 1 / PER_EPOCH,
        "budget.steps": TOTAL,
        "compute.eval_every": "null",
        "compute.precision": "no",
    }


def assert_same_network(ours, theirs):
    for mine, other in (
        (without_key_biases(ours.backbone.state_dict()), without_key_biases(theirs.backbone.state_dict())),
        (ours.mlp.state_dict(), theirs.head.mlp.state_dict()),
        (ours.prototypes.detach(), theirs.head.last_layer.weight_v.detach()),
    ):
        assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_five_steps_equal_those_of_the_library(minimal, tmp_path):
    state = opened(tmp_path / "run", settings_of(minimal))
    assert state.plan.steps_per_epoch == PER_EPOCH
    student = minimal.Network()
    for block in student.backbone.blocks:
        block.drop.p = 0.0
    student.backbone.load_state_dict(state.student.backbone.state_dict())
    student.mlp.load_state_dict(state.student.head.mlp.state_dict())
    student.prototypes.data.copy_(state.student.head.last_layer.weight_v)
    dino = minimal.DINO(student, TOTAL)
    assert_same_network(dino.teacher, state.teacher)

    batches = list(islice(state.loader.batches(), STEPS))
    losses = [dino.step(state.views_of(batch)) for batch in batches]
    taken = []
    for batch in batches:
        state.interval.restart()
        take_step(state, iter([batch]))
        taken.append(state.interval.loss.item())
    assert losses == pytest.approx(taken, rel=1e-5)
    assert_same_network(dino.student, state.student)
    assert_same_network(dino.teacher, state.teacher)
    assert_close(dino.center, state.objective.state["cls"].center, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["parquet", "folders"])
def test_it_runs_from_images_to_weights_that_load(kind, tmp_path, monkeypatch, capsys):
    for split, count in (("train", 70), ("test", 6)):
        images = [(saved(smooth(), "PNG"), number % 2) for number in range(count)]
        if kind == "parquet":
            rows = [{"image": {"bytes": data, "path": None}, "label": label} for data, label in images]
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
        for number, (data, label) in enumerate(images if kind == "folders" else []):
            folder = tmp_path / split / f"class {label}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.png").write_bytes(data)
    suffix = ".parquet" if kind == "parquet" else ""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minimal.py", f"train{suffix}", f"test{suffix}", "--steps", "1"])
    runpy.run_path(str(PATH), run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("raw pixels: k-NN ")
    assert "step 1: loss " in said
    backbone = load_backbone(tmp_path / "minimal.pth", heads=3, verbose=False)
    assert backbone(torch.zeros(1, 3, 32, 48)).shape == (1, 96)


def test_it_is_a_page_without_the_library():
    text = PATH.read_text()
    assert "import dino_vit" not in text
    assert "from dino_vit" not in text

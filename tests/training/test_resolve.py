"""How a configuration is completed, and that the place of photometry does not change the result on a CPU."""

from pathlib import Path

import pytest
import torch

from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import ConfigError
from dino_vit.core.checkpoint import Checkpoint
from dino_vit.data.sources.synthetic import make_textures
from dino_vit.training.resolve import RunContext, kept_choices, resolve
from tests.support.runs import assert_same_end, run

CPU = torch.device("cpu")


def test_a_run_learns_the_same_wherever_colours_are_changed(tmp_path):
    settings = {"budget.steps": 5, "optim.warmup_epochs": 0, "data.workers": 2}
    for place in ("worker", "device"):
        run(tmp_path / place, {**settings, "data.augment_on": place})
    assert_same_end(tmp_path / "worker", tmp_path / "device", 5)


def test_what_auto_leaves_contradictory_is_refused() -> None:
    given = ["recipe=auto", "loss.warmup_teacher_temp_epochs=5", "budget.epochs=50"]  # auto leaves 0.04
    context = RunContext(source=make_textures(length=20), processes=1, device=CPU)
    with pytest.raises(ConfigError, match=r"loss\.teacher_temp=0\.04 must exceed 0\.04"):
        resolve(load(PretrainConfig, None, [*given, "data.batch_size=4"]), context)


def test_what_auto_chose_at_the_start_gives_way_to_what_a_resume_gives():
    """An interval in steps instead of epochs, a length in another unit: not both."""
    chosen = ["recipe=auto", "budget.epochs=450", "compute.eval_every=3", "teacher.momentum=0.97"]
    before = load(PretrainConfig, None, chosen).model_dump(mode="json")
    resumed = Checkpoint(path=Path("step"), tensors={}, metadata={"config": before})
    given = load(PretrainConfig, None, ["recipe=auto", "budget.steps=16", "compute.eval_every_steps=8"])
    context = RunContext(source=make_textures(length=20), processes=1, device=CPU, resumed=resumed)
    kept = {choice.key: choice.value for choice in kept_choices(given, context)}
    assert kept["teacher.momentum"] == 0.97
    assert not {"budget.epochs", "compute.eval_every"} & set(kept)
    assert {"budget.epochs", "compute.eval_every"} <= {
        choice.key for choice in kept_choices(load(PretrainConfig, None, ["recipe=auto"]), context)
    }
    assert replace(given, kept).run.eval_every_steps == 8

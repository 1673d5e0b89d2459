from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from benchmarks import cifar10, end_to_end, host, knn, libraries, loop, objective
from benchmarks.input import MEAN, STD, Photos, published_views, tensor_views
from benchmarks.step import FIXED, Case, cases, make_batch
from dino_vit.config.loading import load, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.sources.open import open_source
from tests.support.runs import TINY as SETTINGS
from tests.support.runs import run

TINY: dict[str, Any] = {
    **{name: value for name, value in SETTINGS.items() if name.startswith(("model.", "head.", "views."))},
    "model.arch": None,
    "model.drop_path": 0.0,
    "optim.clip": 0.05,
    "optim.lr": 1e-3,
    "optim.weight_decay": 0.3,
    "optim.lr_scaling": "none",
    "optim.warmup_epochs": 0,
}
CPU = torch.device("cpu")
pytestmark = pytest.mark.slow  # they measure; what they compare with is tested in tests/training/test_loop.py


def test_the_step_of_dinov2_is_compared_with_that_of_dino() -> None:
    row, said = objective.measure(4, "bf16", objective.NAMES[:2], repeats=1, changes=TINY)
    assert row.speed.keys() == row.memory.keys() == set(objective.NAMES[:2])
    assert "times as long as DINO's" in said


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")  # lightly's
@pytest.mark.parametrize("name", ["lightly", "stable_pretraining"])
def test_steps_of_other_libraries_change_their_networks(name: str) -> None:
    pytest.importorskip(name)
    config = Case(4, "no", {**TINY, "views.global_size": 224}).config  # the size that one of them asks first
    step = {"lightly": libraries.lightly_step, "stable_pretraining": libraries.stable_step}[name](config)
    views = [view for size in make_batch(config, CPU).views.values() for view in torch.split(size, 4)]
    losses = torch.tensor([step(views) for _ in range(5)])
    assert losses.isfinite().all()
    assert losses.unique().numel() == 5


def test_the_pipelines_of_pil_and_of_tensors_make_views_that_are_alike() -> None:
    random.seed(0)
    torch.manual_seed(0)
    config, image = PretrainConfig(), Image.open(BytesIO(Photos(1).read(0))).convert("RGB")
    pixels, draws = pil_to_tensor(image), 100
    by_pil, by_tensors = published_views(config), tensor_views(config)
    ours = torch.stack([facts_of(by_pil(image)) for _ in range(draws)])
    theirs = torch.stack([facts_of(by_tensors(pixels)) for _ in range(draws)])
    spread = [(facts - facts.mean(0)).abs() for facts in (ours, theirs)]  # which jitter of colours changes
    for one, other in ((ours, theirs), spread):
        apart = (one.mean(0) - other.mean(0)).abs()
        error = ((one.var(0) + other.var(0)) / draws).sqrt()  # of a difference of means
        assert (apart / error).max() < 4.5  # of 30, one is further apart by chance once in 5,000 times


def facts_of(views: list[torch.Tensor]) -> torch.Tensor:
    """Return brightness, contrast, sharpness, colour and whether it is grey, of each kind of view."""
    channels = [view.mean(dim=(1, 2)) * torch.tensor(STD) + torch.tensor(MEAN) for view in views]
    colour = [channel.max() - channel.min() for channel in channels]
    sharpness = [view.diff(dim=-1).abs().mean() for view in views]
    light = [[view.mean() for view in views], [view.std() for view in views]]
    facts = torch.tensor([*light, sharpness, colour, [float(each < 1e-4) for each in colour]])
    return torch.stack([facts[:, 0], facts[:, 1], facts[:, 2:].mean(1)])


def test_parts_of_the_host_time_add_up() -> None:
    *parts, whole = host.parts("DINOv2", repeats=1).rows
    for column, total in whole.speed.items():
        assert sum(row.speed[column] for row in parts) == pytest.approx(total)
    assert {"augmentation", "teacher", "student", "loss", "backward"} <= {row.name for row in parts}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_of_a_device_are_valid_configs(device: str) -> None:
    rows = cases(device, None)
    assert len({case.name for case in rows}) == len(rows)
    for case in rows:
        assert case.config.data.batch_size == case.batch


def test_the_loop_is_taken_apart() -> None:
    short = {"budget.steps": 6, "run.eval_every": None, "run.trackers": (), "data.workers": 0}
    phases = {"optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
    found = loop.shares({**short, **phases})
    assert found.keys() == {"loading", "forward", "backward", "optimiser", loop.REST}
    assert sum(found.values()) == pytest.approx(1)
    assert min(found.values()) > 0


def test_neighbours_vote_as_in_the_published_loop() -> None:
    assert "for 60 of 60 queries" in knn.check(knn.make_case(4000, 60, CPU))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")  # lightly's head
def test_the_whole_program_of_everybody_takes_steps(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, data in enumerate(Photos(8, 40).files):
        (photos / f"{number}.jpg").write_bytes(data)
    own = {"data.source": str(photos), "data.batch_size": 4, "output": str(tmp_path / "run")}
    config = replace(PretrainConfig(), {**FIXED, **TINY, **own, "run.precision": "bf16"})
    works = end_to_end.contenders(config, steps=2)
    assert set(works) >= {"dino_vit", "reference"}
    before = {
        name: [p.clone() for p in network_of(work).parameters() if p.requires_grad]
        for name, work in works.items()
    }
    for name, work in works.items():
        assert isinstance(work, end_to_end.Ours | end_to_end.Theirs)
        with work.opened():
            work()
        after = [p for p in network_of(work).parameters() if p.requires_grad]
        assert not all(map(torch.equal, before[name], after)), name


def network_of(work: object) -> torch.nn.Module:
    if isinstance(work, end_to_end.Ours):
        return work.state.student
    assert isinstance(work, end_to_end.Theirs)
    owner = work.take.__self__  # type: ignore[attr-defined]
    network = owner.student if hasattr(owner, "student") else owner.trainer.student
    assert isinstance(network, torch.nn.Module)
    return network


def test_a_run_is_judged_beside_its_beginning_and_raw_pixels(tmp_path: Path) -> None:
    phases = {"optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
    run(tmp_path / "run", {"data.source": "synthetic:200:32", "run.eval_every": 1, **phases})
    config = load(PretrainConfig, tmp_path / "run" / "config.yaml")
    train, test = open_source("synthetic:200:32"), open_source("synthetic:90:32")
    (row, same) = cifar10.judge(config, train, test)
    assert row.speed == same.speed  # the bank is smaller than what it could hold
    assert row.speed.keys() == {"trained", "untrained", "raw pixels"}
    assert row.speed["raw pixels"] == 100  # each query is in the bank, and is its own nearest neighbour
    assert "epochs of 200 images" in cifar10.story(config, 200)

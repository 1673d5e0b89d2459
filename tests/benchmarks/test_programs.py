from __future__ import annotations

import random
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from benchmarks import judging, knn, peer, small, step
from benchmarks.__main__ import RESULTS
from benchmarks.input import MEAN, STD, Photos, published_views, tensor_views
from benchmarks.measure import Result
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.open import open_source
from tests.support.image_sets import write_parquet
from tests.support.runs import TINY as SETTINGS

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


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")  # lightly's
@pytest.mark.parametrize("name", peer.STEPS)
def test_steps_of_other_libraries_change_their_networks(name: str) -> None:
    pytest.importorskip(name.replace("-", "_"))
    # The size that one of them asks first.
    config = step.Case(4, "no", {**TINY, "views.global_size": 224}).config
    views = step.split_views(step.make_batch(config, CPU), 4)
    take = peer.STEPS[name](config)
    losses = torch.tensor([take(views) for _ in range(5)])
    assert losses.isfinite().all()
    assert losses.unique().numel() == 5


def test_a_step_is_measured_beside_the_code_of_2021() -> None:
    row, said = step.measure(step.Case(2, "bf16", TINY), repeats=1)
    assert row.speed.keys() == row.memory.keys() == set(step.CONTENDERS)
    assert "times the 2021 code's speed" in said
    assert "TFLOP/s" in said


def test_what_a_step_costs_the_host_is_measured_beside_the_code_of_2021() -> None:
    row = step.host_row("DINOv2", {"method": "dinov2"}, repeats=1)
    assert min(row.speed.values()) > 0
    assert row.advantage == pytest.approx(row.speed["dino_vit"] / row.speed["2021 code"])


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


def test_neighbours_vote_as_in_the_published_loop() -> None:
    assert "for 60 of 60 queries" in knn.check(knn.make_case(4000, 60))


def test_small_sets_are_trained_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{number % 2}/{number}.jpg": data for number, data in enumerate(Photos(40, 40).files)}
    for part in ("train", "test"):
        write_parquet(tmp_path / "flowers" / f"{part}.parquet", files, classes="01")
    (tmp_path / "tiny.yaml").write_text("")
    short = ["budget.steps=10", "optim.warmup_epochs=0", "optim.freeze_last_layer_epochs=0"]
    tiny = [f"{key}={value}" for key, value in SETTINGS.items() if key not in ("data.source", "budget.steps")]
    given = ["cifar10", str(tmp_path), "--sets", "flowers", "flowers-grey", "--cores", "1"]
    given += ["--config", str(tmp_path / "tiny.yaml"), "--runs", str(tmp_path / "runs")]
    given += ["--out", str(tmp_path / "out.json"), *short, *tiny]
    monkeypatch.setattr(sys, "argv", ["small", *given])
    monkeypatch.setattr(judging, "LABELS", 20)
    small.main()
    neighbours, others = Result.read(tmp_path / "out.json").tables
    assert [row.name for row in neighbours.rows] == ["flowers: k-NN", "flowers-grey: k-NN"]
    assert neighbours.rows[0].speed.keys() == {"trained", "untrained", "pixels", "edges"}
    assert neighbours.rows[0].speed["edges"] == 100  # both parts are the same images
    assert others.rows[0].name == "flowers: k-NN of CLS + cells, levelled"
    predicted = next(row for row in others.rows if row.name == "flowers: predict, 200 labels")
    assert predicted.speed.keys() == {"trained", "untrained", "pixels", "edges"}


def test_labels_that_predict_gets_right_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        name = "turned" if number % 2 else "upright"
        path = tmp_path / "photos" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").resize((32, 32)).rotate(90 * (number % 2)).save(path)
    monkeypatch.setattr(judging, "LABELS", 20)
    photos = open_source(str(tmp_path / "photos"))
    assert judging.predicted(photos, "pixels", str(tmp_path / "cache")) == 100


def test_a_race_is_drawn(tmp_path: Path) -> None:
    small.draw(Result.read(RESULTS / "cpu" / "race.json").tables[0].rows, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as plot:
        assert plot.size == (1320, 330)

import re
from typing import Any

import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.training.plan import make_plan


def test_a_run_is_planned_as_the_reference_does() -> None:
    plan = make_plan(PretrainConfig(), images=1_281_167, world_size=8)
    assert (plan.global_batch, plan.steps_per_epoch, plan.total_steps) == (512, 2502, 250_200)
    assert (plan.warmup_steps, plan.freeze_steps, plan.head_steps) == (25_020, 2502, 0)
    assert plan.lr == pytest.approx(1e-3)
    assert plan.epochs == 100


@pytest.mark.parametrize(
    ("overrides", "total"),
    [(["budget.epochs=20"], 20 * 31), (["budget.steps=700"], 700), (["budget.images=44831"], 700)],
)
def test_every_unit_of_the_budget_ends_the_run(overrides: list[str], total: int) -> None:
    config = load(PretrainConfig, None, [*overrides, "optim.accumulate=4", "data.batch_size=16"])
    plan = make_plan(config, images=2000, world_size=1)
    assert (plan.global_batch, plan.total_steps) == (64, total)


@pytest.mark.parametrize("method", ["dino", "dinov2"])
def test_the_temperature_warms_up_by_epoch_in_2021_and_by_step_in_dinov2(method: str) -> None:
    settings = [f"method={method}", "loss.teacher_temp=0.07", "loss.warmup_teacher_temp_epochs=3"]
    settings += ["budget.epochs=5", "optim.warmup_epochs=1", "data.batch_size=10"]
    plan = make_plan(load(PretrainConfig, None, settings), images=40, world_size=1)
    values = [plan.rates(step).teacher_temp for step in range(20)]
    ramp = [0.04, 0.055, 0.07] if method == "dino" else [0.04 + 0.03 * step / 11 for step in range(12)]
    whole = [value for value in ramp for _ in range(4 if method == "dino" else 1)]
    assert values == pytest.approx([*whole, *[0.07] * 8])


@pytest.mark.parametrize(
    ("override", "steps"),
    [
        ("run.eval_every=2", [20, 25]),
        ("run.eval_every=0.25", [2, 5, 8, 10, 12, 15, 18, 20, 22, 25]),
        ("run.eval_every_steps=7", [7, 14, 21, 25]),
        ("run.eval_every=null", []),
    ],
)
def test_evaluations_are_due_after_epochs_parts_of_them_or_steps(override: str, steps: list[int]) -> None:
    settings = ["budget.steps=25", "optim.warmup_epochs=0", "data.batch_size=10", override]
    plan = make_plan(load(PretrainConfig, None, settings), images=100, world_size=1)
    assert [step for step in range(1, 26) if plan.is_evaluated(step)] == steps


@pytest.mark.parametrize(
    ("overrides", "run", "message"),
    [
        ([], {"images": 100, "world_size": 2}, "100 images do not fill a global batch of 128"),
        (["budget.steps=100"], {"images": 64_000, "world_size": 1}, "set optim.warmup_epochs=0.01"),
        (["optim.lr=5e-3"], {"images": 100_000, "world_size": 16}, "is 0.02 at a global batch of 1024"),
        (["optim.lr=2e-7", "optim.min_lr=0"], {"images": 6400, "world_size": 1}, "learns between"),
        (
            ["optim.lr=2e-6"],
            {"images": 6400, "world_size": 1},
            "optim.min_lr=1e-06 is above the peak of 5e-07",
        ),
    ],
)
def test_what_only_shows_with_the_data_is_refused(
    overrides: list[str], run: dict[str, Any], message: str
) -> None:
    config = load(PretrainConfig, None, overrides)
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(config, **run)


def test_a_run_of_minutes_that_became_shorter_goes_on() -> None:
    config = load(PretrainConfig, None, ["budget.epochs=null", "budget.minutes=10"])
    with pytest.raises(ValueError, match=r"optim.warmup_epochs=10 is not shorter than the run"):
        make_plan(config, 6400, 1, 950)
    assert make_plan(config, 6400, 1, 950, resumed=True).total_steps == 950

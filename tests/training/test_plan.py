import re
from fractions import Fraction
from typing import Any

import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import Budget, Compute, Init
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


@pytest.mark.parametrize("per_epoch", [1, 7, 100, 2502])
def test_all_phases_have_the_steps_of_their_decimal_number(per_epoch: int) -> None:
    """0.29 epochs of 100 steps are 29, though the product of the floats is 28.999..."""
    config = PretrainConfig(init=Init(weights="x"), budget=Budget(epochs=1000))
    for text in [f"{number / 100:.2f}" for number in range(0, 500, 1 + per_epoch % 3)] + [
        "0.333",
        "1e-3",
        "1.005",
        "12.3456",
    ]:
        epochs = float(text)
        optim = config.optim.model_copy(
            update={"warmup_epochs": epochs, "freeze_last_layer_epochs": epochs, "accumulate": 4}
        )
        assert config.init is not None
        init, compute = (
            config.init.model_copy(update={"head_epochs": epochs}),
            Compute(eval_every=epochs or None),
        )
        changed = config.model_copy(update={"optim": optim, "init": init, "compute": compute})
        plan = make_plan(changed, images=per_epoch * 256, world_size=1)
        exact = Fraction(text) * per_epoch
        assert {plan.warmup_steps, plan.freeze_steps, plan.head_steps} == {round(exact)}, text
        if epochs:
            due = {step for number in range(1, 12) if (step := round(number * exact)) < plan.total_steps}
            assert all(plan.is_evaluated(step) for step in due - {0}), text


def test_a_phase_that_is_rounded_up_to_the_whole_run_is_refused() -> None:
    settings = ["budget.steps=29", "optim.warmup_epochs=0.287", "optim.freeze_last_layer_epochs=0"]
    config = load(PretrainConfig, None, settings)
    with pytest.raises(
        ValueError, match=r"0.287 is not shorter than the run \(0.29 epochs, both of 29 steps\)"
    ):
        make_plan(config, images=6400, world_size=1)
    assert make_plan(config, images=6300, world_size=1).warmup_steps == 28


def test_rates_go_on_from_where_they_are_when_the_length_changes() -> None:
    phases = ["optim.warmup_epochs=0.1", "optim.freeze_last_layer_epochs=0"]
    config = load(PretrainConfig, None, ["budget.steps=100", *phases])
    plan = make_plan(config, images=6400, world_size=1)
    assert plan.with_total(60, 5).rates(50) == make_plan(
        load(PretrainConfig, None, ["budget.steps=60", *phases]), 6400, 1
    ).rates(50), "in the warm-up nothing depends on the length"
    for total in (41, 60, 300):
        changed = plan.with_total(total, 40)
        assert changed.rates(40) == pytest.approx(plan.rates(40))
        assert changed.rates(total) == plan.rates(100)
        again = changed.with_total(total + 7, 41)
        assert again.rates(41) == pytest.approx(changed.rates(41))
        assert again.rates(total + 7) == plan.rates(100)
    assert plan.with_total(100, 40) is plan
    ended = plan.with_total(120, 100)
    assert {ended.rates(step) for step in range(100, 120)} == {plan.rates(100)}


def test_patches_are_dropped_until_a_part_of_the_schedule_has_passed() -> None:
    settings = ["budget.steps=100", "optim.warmup_epochs=0.1", "optim.freeze_last_layer_epochs=0"]
    settings.append("model.patch_drop=0.75")
    config = load(PretrainConfig, None, ["model.patch_drop_until=0.8", *settings])
    plan = make_plan(config, 6400, 1)
    assert [plan.patch_drop(step) for step in (0, 79, 80, 99)] == [0.75, 0.75, 0, 0]
    longer = plan.with_total(180, 60)  # the schedule goes on from there, at a third of its speed
    assert [longer.patch_drop(step) for step in (119, 120)] == [0.75, 0]
    always = make_plan(load(PretrainConfig, None, settings), 6400, 1)
    assert always.patch_drop(99) == 0.75


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
        ("compute.eval_every=2", [20, 25]),
        ("compute.eval_every=0.25", [2, 5, 8, 10, 12, 15, 18, 20, 22, 25]),
        ("compute.eval_every_steps=7", [7, 14, 21, 25]),
        ("compute.eval_every=null", []),
    ],
)
def test_evaluations_are_due_after_epochs_parts_of_them_or_steps(override: str, steps: list[int]) -> None:
    settings = ["budget.steps=25", "optim.warmup_epochs=0", "data.batch_size=10", override]
    plan = make_plan(load(PretrainConfig, None, settings), images=100, world_size=1)
    assert [step for step in range(1, 26) if plan.is_evaluated(step)] == steps


def test_the_rate_may_stay_at_its_peak() -> None:
    config = load(PretrainConfig, None, ["optim.lr=1e-6", "optim.min_lr=1e-6", "optim.lr_scaling=none"])
    plan = make_plan(config, images=6400, world_size=1)
    assert plan.rates(plan.warmup_steps).lr == plan.rates(plan.total_steps - 1).lr == plan.lr == 1e-6


def test_steps_are_logged_at_their_interval_at_evaluations_and_at_the_end() -> None:
    settings = ["budget.steps=25", "optim.warmup_epochs=0", "data.batch_size=10"]
    settings += ["compute.log_every=6", "compute.eval_every=null", "compute.eval_every_steps=10"]
    plan = make_plan(load(PretrainConfig, None, settings), images=100, world_size=1)
    assert [step for step in range(1, 26) if plan.is_logged(step)] == [6, 10, 12, 18, 20, 24, 25]


@pytest.mark.parametrize(
    ("overrides", "run", "message"),
    [
        ([], {"images": 100, "world_size": 2}, "100 images do not fill a global batch of 128"),
        (["budget.steps=100"], {"images": 64_000, "world_size": 1}, "set optim.warmup_epochs=0.01"),
        (["optim.lr=5e-3"], {"images": 100_000, "world_size": 16}, "is 0.02 at a global batch of 1024"),
        (
            ["optim.weight_decay_end=2000"],
            {"images": 6400, "world_size": 8},
            "optim.weight_decay_end=2000 at a learning rate of 0.001 takes more than the weights in a step",
        ),
        (["loss.koleo_weight=0.1", "data.batch_size=1"], {"images": 640, "world_size": 1}, "is one image"),
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

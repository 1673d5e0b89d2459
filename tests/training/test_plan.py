from dataclasses import replace
from fractions import Fraction

import pytest

from dino_vit.config.sections import Compute
from dino_vit.training.plan import Plan
from tests.support.facts import run_of

PHASES = ["optim.warmup_epochs=0", "optim.freeze_last_layer_epochs=0"]


def test_a_run_is_planned_as_the_reference_does() -> None:
    plan = Plan(run_of(images=1_281_167, processes=8))
    assert (plan.steps_per_epoch, plan.length) == (2502, 250_200)
    assert (plan.warmup_steps, plan.freeze_steps, plan.head_steps) == (25_020, 2502, 0)
    assert plan.lr == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("overrides", "total"),
    [(["budget.epochs=20"], 20 * 31), (["budget.steps=700"], 700)],
)
def test_every_unit_of_the_budget_ends_the_run(overrides: list[str], total: int) -> None:
    plan = Plan(run_of(*overrides, "optim.accumulate=4", "data.batch_size=16", images=2000))
    assert plan.length == total
    assert [plan.by_step(step).is_last for step in (total - 2, total - 1)] == [False, True]


@pytest.mark.parametrize("per_epoch", [1, 7, 100, 2502])
def test_all_phases_have_the_steps_of_their_decimal_number(per_epoch: int) -> None:
    """0.29 epochs of 100 steps are 29, though the product of the floats is 28.999..."""
    settings = ["init.weights=x", "budget.epochs=1000", "optim.accumulate=4"]
    run = run_of(*settings, images=per_epoch * 256)
    texts = [f"{number / 100:.2f}" for number in range(0, 500, 1 + per_epoch % 3)]
    for text in [*texts, "0.333", "1e-3", "1.005", "12.3456"]:
        epochs, config = float(text), run.config
        assert config.init is not None
        phases = {"warmup_epochs": epochs, "freeze_last_layer_epochs": epochs}
        sections = {
            "optim": config.optim.model_copy(update=phases),
            "init": config.init.model_copy(update={"head_epochs": epochs}),
            "compute": Compute(eval_every=epochs or None),
        }
        plan = Plan(replace(run, config=config.model_copy(update=sections)))
        exact = Fraction(text) * per_epoch
        assert {plan.warmup_steps, plan.freeze_steps, plan.head_steps} == {round(exact)}, text
        if epochs:
            due = {step for number in range(1, 12) if (step := round(number * exact)) < plan.length}
            assert all(plan.by_step(step - 1).is_evaluated for step in due - {0}), text


@pytest.mark.parametrize("method", ["dino", "dinov2"])
def test_the_temperature_warms_up_by_epoch_in_2021_and_by_step_in_dinov2(method: str) -> None:
    settings = [f"method={method}", "loss.teacher_temp=0.07", "loss.warmup_teacher_temp_epochs=3"]
    settings += ["budget.epochs=5", "optim.warmup_epochs=1", "data.batch_size=10"]
    plan = Plan(run_of(*settings, images=40))
    values = [plan.rates(step).teacher_temp for step in range(20)]
    ramp = [0.04, 0.055, 0.07] if method == "dino" else [0.04 + 0.03 * step / 11 for step in range(12)]
    whole = [value for value in ramp for _ in range(4 if method == "dino" else 1)]
    assert values == pytest.approx([*whole, *[0.07] * 8])


@pytest.mark.parametrize(
    ("override", "steps"),
    [
        ("compute.eval_every=2", [20, 25]),
        ("compute.eval_every=0.25", [2, 5, 8, 10, 12, 15, 18, 20, 22, 25]),
        ("compute.eval_every=null", []),
    ],
)
def test_evaluations_are_due_after_epochs_parts_of_them_or_steps(override: str, steps: list[int]) -> None:
    plan = Plan(run_of("budget.steps=25", *PHASES, "data.batch_size=10", override, images=100))
    assert [step for step in range(1, 26) if plan.by_step(step - 1).is_evaluated] == steps


def test_the_rate_may_stay_at_its_peak() -> None:
    plan = Plan(run_of("optim.lr=1e-6", "optim.min_lr=1e-6", "optim.lr_scaling=none"))
    assert plan.rates(plan.warmup_steps).lr == plan.rates(plan.length - 1).lr == plan.lr == 1e-6


def test_steps_are_logged_at_their_interval_at_evaluations_and_at_the_end() -> None:
    settings = ["budget.steps=25", *PHASES, "data.batch_size=10", "compute.log_every=6"]
    settings += ["compute.eval_every=1"]
    plan = Plan(run_of(*settings, images=100))
    logged = [step for step in range(1, 26) if plan.by_step(step - 1).is_logged]
    assert logged == [6, 10, 12, 18, 20, 24, 25]

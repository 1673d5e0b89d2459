import math
from dataclasses import replace

import numpy as np
import pytest

from dino_vit.method.centring import Center
from dino_vit.training.diagnosis import PATIENCE, collapse
from dino_vit.training.plan import Plan
from dino_vit.training.readings import READING, read_records
from tests.support.readings import HEALTHY
from tests.support.training import trained

PROTOTYPES = 64
SETTINGS = {
    "data.batch_size": 24,
    "model.heads": 4,
    "model.drop_path": 0,
    "head.prototypes": PROTOTYPES,
    "views.global_size": 16,
    "views.global_scale": "[0.6, 1]",
    "views.local_scale": "[0.6, 1]",
    "photometry.jitter": 0,  # an image is told by its colour and by the direction of its wave
    "photometry.grey": 0,
    "photometry.flip": 0,
    "photometry.noise": 1,
    "optim.lr": 2e-3,
    "optim.lr_scaling": "none",
    "optim.warmup_epochs": 2,
    "optim.freeze_last_layer_epochs": 0,
    "teacher.momentum": 0.97,
    "budget.steps": 100,
    "run.log_every": 4,
    "run.checkpoint_every": 100,
}
FLAT = math.log(65536)


def coloured_waves():
    generator = np.random.default_rng(1)
    axis = np.linspace(-1, 1, 16)
    colour = generator.normal(size=(240, 1, 1, 3))
    turn, phase = np.pi * generator.random((240, 1, 1)), 2 * np.pi * generator.random((240, 1, 1))
    along = np.cos(turn) * axis[:, None] + np.sin(turn) * axis
    waves = colour + np.sin(6 * along + phase)[..., None]
    return (128 + 40 * waves).clip(0, 255).astype(np.uint8)


def train(folder, monkeypatch, *, seed=0, centred=True, **rates):
    """Train a tiny network, with rates that no setting allows; return readings and what was said of each."""
    np.save(folder / "waves.npy", coloured_waves())
    settings = {**SETTINGS, "data.source": folder / "waves.npy", "seed": seed}
    with monkeypatch.context() as patch:
        planned = Plan.rates
        patch.setattr(Plan, "rates", lambda plan, step: planned(plan, step)._replace(**rates))
        if not centred:
            patch.setattr(Center, "update", lambda center: None)
        trained(folder / f"run{seed}", settings)
    readings = read_records(folder / f"run{seed}" / "metrics.jsonl", READING)
    return readings, [reading.state for reading in readings]


@pytest.mark.parametrize("changes", [{}, {"teacher_temp": 0.07}], ids=str)
def test_a_healthy_run_is_not_accused(tmp_path, monkeypatch, changes):
    readings, told = train(tmp_path, monkeypatch, **changes)
    assert readings[-1].embedding_std > 0.7  # it is healthy
    assert told == ["not evaluated"] * len(told)


def collapsed_to_one(readings):
    return all(reading.mean_output_entropy < 0.01 for reading in readings[-PATIENCE:])


def collapsed_to_uniform(readings):
    flat = math.log(PROTOTYPES)
    return all(reading.output_entropy > 0.99 * flat for reading in readings[-PATIENCE:])


def never_below_flat(readings):
    return all(reading.excess > 0 and reading.entropy_gap > 0.1 for reading in readings[-PATIENCE:])


@pytest.mark.parametrize(
    ("changes", "happened", "state"),
    [
        ({"centred": False, "teacher_temp": 0.02, "lr": 0.02}, collapsed_to_one, "one prototype"),
        ({"teacher_temp": 0.2}, collapsed_to_uniform, "uniform collapse"),
        ({"lr": 1e-7}, never_below_flat, "stuck at ln(prototypes)"),
    ],
    ids=["one prototype", "uniform", "stuck"],
)
def test_a_failure_made_on_purpose_is_named_for_good(tmp_path, monkeypatch, changes, happened, state):
    """So few steps are chaotic, and a run may escape: of two, those that did fail count."""
    failed = 0
    for seed in range(2):
        readings, told = train(tmp_path, monkeypatch, seed=seed, **changes)
        if happened(readings):
            failed += 1
            assert told[told.index(state) :] == [state] * (len(told) - told.index(state))
    assert failed


def repeated(*, count=PATIENCE, **changes):
    return [replace(HEALTHY, step=10_000 + 50 * n, **changes) for n in range(count)]


UNIFORM = {"mean_output_entropy": FLAT, "output_entropy": FLAT, "entropy_gap": 0.001, "loss": FLAT}
ONE = {"mean_output_entropy": 0.1, "output_entropy": 0.1, "entropy_gap": 0.0, "loss": 0.2}
ALIKE = {"mean_output_entropy": 7.0, "output_entropy": 7.0, "entropy_gap": 0.0, "loss": 7.1}
STUCK = {"loss": FLAT + 0.01}


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, None),
        (UNIFORM, "uniform collapse"),
        (ONE, "one prototype"),
        (ALIKE, "all images alike"),
        (STUCK, "stuck at ln(prototypes)"),
        ({"prototypes": 2, "mean_output_entropy": 0.69, "entropy_gap": 0.6, "loss": 0.3}, None),
        ({**UNIFORM, "entropy_gap": 0.02, "loss": FLAT - 0.03}, None),  # hardly, but on its way
        ({**ALIKE, "rows": 8}, None),  # too few to tell
        ({"patch_entropy_gap": 0.001, "patch_rows": 900}, "all patches alike"),
        ({"patch_entropy_gap": 0.001, "patch_rows": 1}, None),  # too few to tell
        ({"patch_entropy_gap": 0.5, "patch_rows": 900}, None),
    ],
)
def test_several_readings_in_a_row_make_a_collapse(changes, state):
    readings = repeated(**changes)
    assert state_of(readings) == state
    assert state is None or collapse(readings, settled_step=0).advice
    assert state_of(readings[1:]) is None
    assert state_of(readings, settled_step=readings[0].step + 1) is None
    assert state_of([*readings[:2], HEALTHY, *readings[3:]]) is None
    # At the end of a run there will be no more readings.
    last = replace(readings[1], total_steps=readings[1].step)
    assert state_of([readings[0], last]) == (None if changes is STUCK else state)
    assert state_of([last]) is None


def state_of(readings, settled_step=0):
    found = collapse(readings, settled_step=settled_step)
    return found and found.state


def test_before_it_has_settled_nothing_is_held_against_a_run():
    assert state_of(repeated(**UNIFORM, count=20), settled_step=10**6) is None


def test_lost_steps_are_named_even_before_it_has_settled():
    def state(counts, **changes):
        readings = [replace(r, nonfinite_steps=c) for r, c in zip(repeated(count=6), counts, strict=True)]
        readings[-1] = replace(readings[-1], **changes)
        return state_of(readings, settled_step=10**6)

    assert state([0, 0, 0, 0, 0, 50]) is None  # a fifth
    assert state([0, 0, 0, 0, 0, 51]) == "non-finite steps"
    assert state([51] * 6) is None  # long ago
    assert state([0] * 6, loss=math.nan) == "non-finite steps"
    assert state_of([replace(HEALTHY, nonfinite_steps=9)]) is None

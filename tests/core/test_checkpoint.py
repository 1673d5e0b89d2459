from functools import partial

import pytest
import torch

from dino_vit.core.checkpoint import BackgroundWriter, Checkpoints, NotFinite, collect, restore
from dino_vit.core.storage import StorageError
from dino_vit.method.cross_entropy import LazyLogits, logits_of
from dino_vit.method.optim import build_optimizer, parameter_groups, set_rates, step_if_finite
from dino_vit.method.targets import Center
from dino_vit.models.head import DINOHead
from dino_vit.models.student_teacher import Need, build_networks

STATE = {"a": torch.arange(4.0)}


def write(checkpoints, *steps, best=None):
    for step in steps:
        checkpoints.save(step, {"a": torch.full((300,), float(step))}, {"best": best and {"step": best}})


def kept(checkpoints):
    return [int(path.stem.removeprefix("step-")) for path in checkpoints.paths()]


def test_the_last_two_the_best_and_every_nth_are_kept(tmp_path):
    last_two = Checkpoints(tmp_path / "a")
    write(last_two, 5, 10, 15, 20)
    assert kept(last_two) == [15, 20]
    every = Checkpoints(tmp_path / "b", keep_every=10)
    write(every, 5, 10, 15, 20, 25, 30, 35)
    assert kept(every) == [10, 20, 30, 35]
    later = Checkpoints(tmp_path / "b", keep_every=15)
    later.kept_steps = {*every.newest().metadata["kept_steps"]}
    write(later, 40, 45, 50, 55)
    assert kept(later) == [10, 20, 30, 45, 50, 55], "and what another start kept"
    best = Checkpoints(tmp_path / "c")
    write(best, 5)
    write(best, 10, 15, 20, best=5)
    assert kept(best) == [5, 15, 20]
    write(best, 25, 30, best=25)
    assert kept(best) == [25, 30]


def test_steps_ahead_were_given_up_and_do_not_push_a_good_one_out(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_every=20)
    write(checkpoints, 5, 10, 15, 20)
    write(checkpoints, 12)
    assert kept(checkpoints) == [12]
    write(checkpoints, 15, 1_000_000_000)
    assert kept(checkpoints) == [15, 1_000_000_000]
    assert checkpoints.newest().step == 1_000_000_000


def test_the_newest_is_read(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    write(checkpoints, 5, 10)
    assert checkpoints.newest().step == 10
    assert torch.equal(checkpoints.newest().tensors["a"], torch.full((300,), 10.0))
    assert checkpoints.newest().metadata == {
        "best": None,
        "kept_steps": [],
        "kind": "checkpoint",
        "step": 10,
        "version": 1,
    }


def test_a_damaged_newest_is_passed_over_and_named(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5, 10)
    older, newer = checkpoints.paths()
    newer.write_bytes(newer.read_bytes()[:-9])
    assert checkpoints.newest().step == 5
    assert str(newer) in caplog.text
    older.write_bytes(b"")
    with pytest.raises(StorageError, match=r"none of the checkpoints in .* can be read; move the folder"):
        checkpoints.newest()


def test_a_state_that_is_not_finite_is_never_written(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 5)
    for value in (torch.inf, torch.nan):
        with pytest.raises(NotFinite, match="1 tensor is not finite; the first is b"):
            checkpoints.save(10, {**STATE, "b": torch.tensor([1.0, value])}, {})
    assert kept(checkpoints) == [5]


def test_what_is_written_in_the_background_is_the_state_at_the_call(tmp_path):
    """Each time, though the state changes in place while the thread writes."""
    checkpoints, state = Checkpoints(tmp_path), {"a": torch.zeros(1_000_000)}
    writer = BackgroundWriter(checkpoints)
    with writer.thread:
        for step in (1, 2):
            state["a"].fill_(step)
            writer.begin(step, state.items(), {})
            state["a"].fill_(9)
            assert writer.finish(wait=True) == checkpoints.paths()[-1]
            assert writer.finish(wait=True) is None
            assert torch.equal(checkpoints.newest().tensors["a"], torch.full((1_000_000,), float(step)))
        state["a"][-1] = torch.nan
        writer.begin(3, state.items(), {})
        with pytest.raises(NotFinite, match="1 tensor is not finite"):
            writer.finish(wait=True)
        state["a"].fill_(4)
        writer.begin(4, state.items(), {})
    assert kept(checkpoints) == [2, 4], "leaving waits until it is on the disk"


def build(optimizer, batch_norm):
    sizes = {"prototypes": 12, "hidden_dim": 8, "bottleneck_dim": 4, "batch_norm": batch_norm}
    student, teacher = build_networks(
        backbone={"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2},
        drop_path=0.0,
        heads={"head": partial(DINOHead, **sizes)},
    )
    modules = {"student": student, "teacher": teacher, "loss": Center(prototypes=12)}
    groups = parameter_groups(student.backbone, student.head)
    return modules, build_optimizer(optimizer, groups)


def train(modules, optimizer, steps):
    student, teacher, center = modules.values()
    for step in range(steps):
        images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        set_rates(optimizer, lr=0.1, weight_decay=0.04)
        needs = Need("cls", "head"), Need("prototypes", "head")
        logits_of(*student([images], needs).values()).pow(2).sum().backward()
        step_if_finite(optimizer, torch.tensor(True))
        optimizer.zero_grad()
        center(LazyLogits(*teacher([images], needs).values()), 0.04)
        center.update()


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_is_restored_goes_on_bit_for_bit(tmp_path, optimizer, batch_norm):
    first, first_optimizer = build(optimizer, batch_norm)
    train(first, first_optimizer, 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, collect(first, first_optimizer), {})
    torch.manual_seed(1)
    second, second_optimizer = build(optimizer, batch_norm)
    train(second, second_optimizer, 1)
    restore(checkpoints.newest(), second, second_optimizer)
    for modules, its_optimizer in ((first, first_optimizer), (second, second_optimizer)):
        train(modules, its_optimizer, 2)
    expected, found = (
        collect(modules, its) for modules, its in ((first, first_optimizer), (second, second_optimizer))
    )
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert any("running_mean" in name for name in found) == batch_norm
    assert {name.split(".")[1] for name in found if name.startswith("optimizer.")} == {
        "adamw": {"step", "exp_avg", "exp_avg_sq"}
    }.get(optimizer, {"momentum_buffer"})


def test_every_tensor_must_find_its_place_and_every_place_its_tensor(tmp_path):
    modules, optimizer = build("adamw", False)
    whole = {name: tensor.clone() for name, tensor in collect(modules, optimizer).items()}
    one = "optimizer.exp_avg.head.mlp.0.weight"
    cases = {
        f"{one} is missing in the file and \\(8, 16\\) here": {k: v for k, v in whole.items() if k != one},
        "student.extra is \\(1,\\) in the file and missing here": {**whole, "student.extra": torch.ones(1)},
        f"{one} is \\(3,\\) in the file and \\(8, 16\\) here": {**whole, one: torch.ones(3)},
    }
    for message, tensors in cases.items():
        checkpoints = Checkpoints(tmp_path / message[:20])
        checkpoints.save(1, {name: torch.ones_like(tensor) for name, tensor in tensors.items()}, {})
        with pytest.raises(StorageError, match=f"belongs to a different network or optimiser: {message}"):
            restore(checkpoints.newest(), modules, optimizer)
        now = collect(modules, optimizer)
        assert all(torch.equal(now[name], whole[name]) for name in whole), "nothing of it was taken"

"""Processes that share the weights (FSDP) are one run: the images, losses and weights of one process."""

import math
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.storage import StorageError
from dino_vit.data.image_set import random_indices
from dino_vit.data.stores.files import open_folder
from dino_vit.eval.online import OnlineEvaluation
from dino_vit.training import networks
from tests.support.images import write_synthetic
from tests.support.processes import finish, pair, run_in_two, torchrun_environs
from tests.support.runs import (
    RESNET,
    assert_same_end,
    assert_same_readings,
    history,
    run,
    signal_within_step,
    steps,
    tensors,
)
from tests.support.training import configured

ONE = {"budget.steps": 4, "model.drop_path": 0, "data.batch_size": 16, "compute.eval_every": 1}
ONE |= {"optim.warmup_epochs": 0.5}  # of 4 steps
TWO = {**ONE, "data.batch_size": 8, "compute.sharded": "true"}
PATCHES = {
    "loss.patch_weight": 1,
    "loss.koleo_weight": 0.1,
    "loss.edge_weight": 2,
    "loss.centering": "sinkhorn",
    "head.shared": "false",
}
SHARED = "each process holds a part of the weights"
SAVING = {"model.grad_checkpointing": "true", "head.batch_norm": "true", "optim.clip_mode": "global"}


@pytest.mark.parametrize(
    "terms", [PATCHES, pytest.param(SAVING, marks=pytest.mark.slow)], ids=["dinov2", "recomputed"]
)
def test_two_processes_with_halves_follow_one(tmp_path, terms):
    run(tmp_path / "alone", {**ONE, **terms})
    (said, _) = run_in_two(tmp_path / "run", {**TWO, **terms})
    assert SHARED in said
    keys = "loss", "gradient_norm", "output_entropy"
    assert_same_readings(tmp_path / "run", tmp_path / "alone", *keys, atol=2e-4, rtol=1e-4)
    ours, theirs = ([line.get("knn") for line in history(tmp_path / name)] for name in ("run", "alone"))
    assert ours == theirs
    assert any(ours)
    found, expected = (tensors(tmp_path / name, 4) for name in ("run", "alone"))
    assert found.keys() == expected.keys()
    if terms is not SAVING:  # a bias before BatchNorm has no gradient but rounding: AdamW makes steps of it
        assert_close(found, expected, atol=1e-3, rtol=1e-2)


def test_parts_that_are_gathered_in_bfloat16_follow_one_process(tmp_path):
    half = {"compute.precision": "bf16", "optim.warmup_epochs": 0}
    run(tmp_path / "alone", {**ONE, **half})
    run_in_two(tmp_path / "run", {**TWO, **half})
    for key in ("loss", "gradient_norm"):
        ours, theirs = ([line[key] for line in history(tmp_path / name)] for name in ("run", "alone"))
        assert ours == pytest.approx(theirs, rel=0.02), key
        assert ours != theirs, "LayerNorm's weights are rounded too"
    assert {tensor.dtype for tensor in tensors(tmp_path / "run", 4).values()} >= {torch.float32}
    assert torch.bfloat16 not in {tensor.dtype for tensor in tensors(tmp_path / "run", 4).values()}


def test_halves_of_an_average_with_batch_norm_follow_one_process(tmp_path):
    """It sees no images where a frozen teacher teaches, so it averages the statistics too: no shards."""
    run(tmp_path / "teacher", ONE)
    terms = {"teacher.weights": tmp_path / "teacher", "head.batch_norm": "true"}
    run(tmp_path / "alone", {**ONE, **terms})
    run_in_two(tmp_path / "run", {**TWO, **terms})
    assert_same_readings(tmp_path / "run", tmp_path / "alone", "loss", rtol=1e-4)
    found, expected = (tensors(tmp_path / name, 4) for name in ("run", "alone"))
    statistics = [name for name in found if name.startswith("teacher.") and "running_mean" in name]
    for name in statistics:
        assert_close(found[name], expected[name], atol=1e-3, rtol=1e-2)
    assert statistics


def compile_without_a_break():
    """Trace what is compiled, whole, without the minutes of a real backend."""
    torch.compile = partial(torch.compile, backend="aot_eager", fullgraph=True)


@pytest.mark.slow
def test_parts_are_compiled_block_by_block(tmp_path):
    settings = {**PATCHES, "optim.warmup_epochs": 0}
    run(tmp_path / "alone", {**ONE, **settings})
    compiled = {**TWO, **settings, "compute.compile": "true"}
    finish(pair(tmp_path / "run", compiled, torchrun_environs(), before=(compile_without_a_break,) * 2))
    assert_same_readings(tmp_path / "run", tmp_path / "alone", "loss", rtol=1e-4)


@pytest.mark.parametrize("unreadable", [False, True], ids=["one image more", "unreadable images"])
def test_processes_evaluate_in_as_many_passes(tmp_path, unreadable):
    """The weights are gathered for each, by all processes."""
    length = 16 if unreadable else 2 * 256 + 1  # of the two processes, the second has one more
    for number in range(length):
        write_synthetic(tmp_path / "images" / "ab"[number % 2] / f"{number}.png", number)
    source = open_folder(tmp_path / "images")
    for index in random_indices(source, 0)[8:] if unreadable else ():  # the images of the second
        (tmp_path / "images" / source.name(index)).write_bytes(b"")
    settings = {**ONE, "data.source": tmp_path / "images", "budget.steps": 1}
    settings["optim.warmup_epochs"] = 0
    settings["optim.freeze_last_layer_epochs"] = 0
    run(tmp_path / "alone", settings)
    run_in_two(tmp_path / "run", {**settings, "data.batch_size": 8, "compute.sharded": "true"})
    for key in ("knn", "rankme"):
        ours, theirs = (history(tmp_path / name)[-1][key] for name in ("run", "alone"))
        assert ours == pytest.approx(theirs, rel=1e-3), key


def figures_of_its_own():
    """Have the evaluations of this process give other figures, as rounding may on another GPU."""
    evaluate = OnlineEvaluation.__call__
    OnlineEvaluation.__call__ = lambda self, model: replace(evaluate(self, model), knn=math.nan)


def a_full_disk_for_a_moment():
    """Have the first checkpoint of this process fail."""
    save = Checkpoints.save

    def fail(*_):
        Checkpoints.save = save
        raise StorageError("no space left")

    Checkpoints.save = fail


def test_all_give_their_parts_again_of_a_checkpoint_that_rank_0_could_not_write(tmp_path):
    """Of weights that the launcher of Accelerate asks to share."""
    settings = {**TWO, "budget.steps": 2, "compute.checkpoint_every": 2, "compute.peer_timeout": 0.2}
    settings |= {"optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0, "compute.eval_every": "null"}
    environs = [{**one, "ACCELERATE_USE_FSDP": "true"} for one in torchrun_environs()]
    before = a_full_disk_for_a_moment, None
    said, _ = finish(pair(tmp_path / "run", {**settings, "compute.sharded": "false"}, environs, before))
    assert SHARED in said
    assert "no checkpoint was written. no space left" in said
    assert steps(tmp_path / "run") == [2]


def test_rank_0_decides_what_is_the_best_as_all_must_give_their_parts_of_it(tmp_path):
    settings = {**TWO, "compute.checkpoint_every": 1000, "compute.peer_timeout": 0.2, "budget.steps": 8}
    finish(pair(tmp_path / "run", settings, torchrun_environs(), before=(None, figures_of_its_own)))


def test_interrupted_and_resumed_is_bit_for_bit_the_same_and_goes_on_unsharded(tmp_path):
    """Its checkpoints are those of any other run."""
    settings = {**TWO, "optim.accumulate": 2, "data.batch_size": 4}
    run_in_two(tmp_path / "whole", settings)
    killed = partial(signal_within_step, 1, signal.SIGTERM)
    finish(pair(tmp_path / "run", settings, torchrun_environs(), before=(None, killed)), 75)
    assert steps(tmp_path / "run") == [3], "the vote is read one step later"
    run_in_two(tmp_path / "run", settings)
    assert_same_end(tmp_path / "run", tmp_path / "whole", 4)
    changes = {**ONE, "budget.steps": 6, "compute.resume": "changed"}
    assert "resuming after step 4" in run(tmp_path / "run", changes)


@pytest.mark.parametrize("change", [{"optim.name": "sgd"}, RESNET])
def test_what_does_not_work_with_parts_of_the_weights_is_refused(tmp_path, change):
    config = configured(tmp_path, {**TWO, **change})
    with pytest.raises(ValueError, match=r"do not work with sharded weights \(compute.sharded=true"):
        networks.make_sharded(*networks.build_untrained(config), config, torch.device("cpu"), torch.float32)

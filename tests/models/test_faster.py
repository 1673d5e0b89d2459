"""Recorded passes: what is recorded when, and that nothing is lost on the way in and out.

A CPU has no CUDA graphs: here a replay runs the function again. `tests/gpu` compares the real ones with plain
passes bit by bit.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree

from dino_vit.core import fused
from dino_vit.models import faster
from dino_vit.training.setup import _make_faster
from tests.support.runs import RESNET, assert_same_end
from tests.support.training import assert_resumes_exactly, opened, trained

DROPS = {"model.drop_path": 0.3, "optim.warmup_epochs": 0}
SETTINGS = {
    "DINO": {},
    "masks": {"loss.patch_weight": 1, "loss.koleo_weight": 0.1, "run.precision": "bf16"},
    "micro-batches": {"optim.accumulate": 2, "data.batch_size": 4},
    "patches left out": {"model.patch_drop": 0.5, "model.patch_drop_until": 0.5},
    "convolutions": {"model.stem": "conv", "model.layer_scale": 0.1, "model.registers": 2},
    "frozen prototypes": {"optim.freeze_last_layer_epochs": 1},
}


class Again(faster._Recording):
    """Runs the function again instead of replaying it."""

    def __init__(self, module, function, leaves, structure):
        super().__init__(module, function, leaves, structure)
        Again.made.append(self)

        def forward():
            inputs = iter(self.inputs)
            again = [next(inputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            with torch.set_grad_enabled(bool(self.parameters)):
                outputs = pytree.tree_leaves(function(*pytree.tree_unflatten(again, structure)))
            self.live = [output for output in outputs if isinstance(output, torch.Tensor)]
            torch._foreach_copy_(self.outputs, [output.detach() for output in self.live])

        def backward():
            outputs = [output for output in self.live if output.requires_grad]
            gradients = torch.autograd.grad(outputs, self.parameters, self.output_gradients)
            torch._foreach_copy_(self.gradients, gradients)

        self.forward_graph.replay, self.backward_graph.replay = forward, backward

    made: ClassVar = []


class Graph:
    def pool(self):
        return None


@pytest.fixture
def recorded(monkeypatch):
    """Record in place of a GPU; return the recordings."""

    @contextmanager
    def nothing(*_, **__):
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", nothing)
    monkeypatch.setattr(faster, "DEVICE", "cpu")
    monkeypatch.setattr(faster, "_Recording", Again)
    monkeypatch.setattr(faster, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(Again, "made", [])
    make = "dino_vit.training.setup._make_faster"
    monkeypatch.setattr(
        make, lambda state: faster.record_networks((state.student, state.teacher)) or iter(())
    )
    return Again.made


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_with_recorded_passes_ends_as_one_without(tmp_path, request, name):
    settings = {"budget.steps": 14, **DROPS, **SETTINGS[name]}
    trained(tmp_path / "plain", settings)
    made = request.getfixturevalue("recorded")
    trained(tmp_path / "recorded", settings)
    # Of the student and of the teacher; where patches are left out, of both lengths of what the student sees.
    assert len(made) == (3 if name == "patches left out" else 2)
    assert_same_end(tmp_path / "recorded", tmp_path / "plain", 14)


def test_a_run_with_recorded_passes_resumes_exactly(tmp_path, recorded):
    assert_resumes_exactly(tmp_path, DROPS, step=5)
    assert len(recorded) == 6


def test_what_a_replay_returned_stays_when_the_next_one_overwrites_it(recorded):
    layer = torch.nn.Linear(2, 2)
    layer.matrices = {}
    call = faster.RecordedPass(layer, lambda x, _: (layer(x), None))
    x = torch.ones(3, 2)
    *_, first, second = [call(x * scale, "mode")[0] for scale in (1, 1, 1, 1, 2)]
    assert len(recorded) == 1
    assert torch.equal(first, layer(x))
    assert torch.equal(second, layer(2 * x))
    second.sum().backward()
    gradient = layer.weight.grad.clone()
    call(5 * x, "mode")[0].sum().backward()  # adds to the gradient of before, which no replay overwrites
    assert torch.allclose(layer.weight.grad, gradient + 15)
    for mode in ("mode", "another"):
        with torch.no_grad():
            assert not call(x, mode)[0].requires_grad
    assert len(recorded) == 1


class Spy(torch.autograd.Function):
    """Notes whether autocast is on, ahead and back."""

    seen: ClassVar = []

    @staticmethod
    def forward(_, x):
        Spy.seen.append(("forward", torch.is_autocast_enabled("cpu")))
        return x.clone()

    @staticmethod
    def backward(_, grad):
        Spy.seen.append(("backward", torch.is_autocast_enabled("cpu")))
        return grad


def test_what_is_recorded_is_what_the_calls_before_did(recorded, monkeypatch):
    """Autocast would cast in the backward pass, and any change of its state compiles functions again."""
    monkeypatch.setattr(Spy, "seen", [])
    layer, counter = torch.nn.Linear(2, 2), CompileCounter()
    layer.matrices = {}
    compiled = torch.compile(torch.sin, backend=counter)

    def function(x):
        out = Spy.apply(layer(x))
        compiled(out.detach())
        return out

    call = faster.RecordedPass(layer, function)
    for _ in range(faster.WARM_UP + 2):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(torch.ones(3, 2))
        out.float().sum().backward()
    assert len(recorded) == 1
    assert set(Spy.seen) == {("forward", True), ("backward", False)}
    assert counter.frame_count == 1


def test_a_recording_that_fails_ends_the_run(recorded, monkeypatch):
    def fail(*_):
        raise RuntimeError("operation not permitted\nand more")

    monkeypatch.setattr(faster, "_Recording", fail)
    layer = torch.nn.Linear(2, 2)
    call = faster.RecordedPass(layer, layer)
    for _ in range(faster.WARM_UP):
        call(torch.ones(1, 2))
    with pytest.raises(
        ValueError, match=r"operation not permitted\. Run .* again with run\.cuda_graphs=false"
    ):
        call(torch.ones(1, 2))


def test_small_functions_are_fused_where_they_are_recorded_alone(recorded, monkeypatch):
    small = []
    layer = torch.nn.Linear(2, 2)
    call = faster.RecordedPass(layer, lambda x: small.append(fused._State.small) or layer(x))
    call(torch.ones(1, 2))
    monkeypatch.setattr(faster, "is_on_gpu", lambda _: False)
    call(torch.ones(1, 2))
    assert small == [True, False]


def test_graphs_are_of_vision_transformers_on_one_gpu(tmp_path):
    """Also with BatchNorm in the heads, which are not recorded."""

    def notes(device="cuda", processes=1, **settings):
        settings = {"run.cuda_graphs": "true", "head.batch_norm": "true", **settings}
        state = opened(tmp_path / str(len(list(tmp_path.iterdir()))), settings).state
        state.accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
        said = [note for note in _make_faster(state) if "cuda_graphs" in note]
        assert isinstance(state.student.run_backbone, faster.RecordedPass) == (not said)
        return said

    assert notes() == []
    assert notes(device="cpu") == ["run.cuda_graphs=true has no effect on cpu"]
    assert notes(processes=2) == ["run.cuda_graphs=true has no effect in several processes"]
    (said,) = notes(**{"model.grad_checkpointing": "true"})
    assert said.endswith("no effect with model.grad_checkpointing=true")
    assert notes(**RESNET) == ["run.cuda_graphs=true has no effect with a model of timm"]

"""A rehearsal of CUDA finds what real tensors do: gradients, operators. It notices every wait."""

from collections import Counter
from itertools import repeat

import pytest
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import _disable_current_modes

from dino_vit.models import student_teacher
from dino_vit.training.loop import take_step
from dino_vit.training.pretrain import set_up
from tests.support.kernels import Kernels
from tests.support.rehearsal import CUDA, HostWaits, MixedDevices, NotOnGpu, OnGpu, Rehearsal
from tests.support.training import configured

SETTINGS = {"compute.log_every": 1000, "optim.clip_mode": "global"}
PATCHES = {"loss.patch_weight": 1, "loss.koleo_weight": 0.1, "head.shared": "false"}
AGAIN = {"model.patch_drop": 0.5, "model.grad_checkpointing": "true", "optim.accumulate": 2}
CASES = [
    pytest.param({**AGAIN, "model.drop_path": 0.2}, marks=pytest.mark.slow),
    {**PATCHES, "loss.centering": "sinkhorn", "model.registers": 2, "model.layer_scale": 0.1},
]


def second_step(mode, accelerator, folder, settings):
    """Return the operators of a step but for copies between devices."""
    with mode:
        state = set_up(configured(folder, {**SETTINGS, **settings}), accelerator)
        batch = next(state.loader.batches())
        views = {size: views.to(state.device) / 255 for size, views in batch.views.items()}
        state.augment = lambda views, _: views  # its blur is another one on a GPU
        batches = repeat(batch._replace(views=views))
        take_step(state, batches)
        mode.restart()
        take_step(state, batches)
    found = Counter()
    for (_, name), times in mode.kernels.items():
        if name not in ("aten._to_copy.default", "aten.copy_.default"):
            direction = "backward" if "backward" in name else "forward"
            found[f"attention {direction}" if "dot_product" in name else name] += times
    return found


@pytest.mark.parametrize("settings", CASES, ids=" ".join)
def test_operators_are_those_of_real_tensors(tmp_path, monkeypatch, settings):
    rehearsal = Rehearsal(answers=True)
    ours = second_step(rehearsal, OnGpu(), tmp_path / "rehearsed", settings)

    def on_host(draw):  # where a GPU's are drawn, too
        def drawn(*arguments):
            with _disable_current_modes():
                return draw(*arguments)

        return drawn

    monkeypatch.setattr(student_teacher, "sample_drops", on_host(student_teacher.sample_drops))
    real = second_step(Kernels(), Accelerator(), tmp_path / "real", settings)
    assert ours == real
    assert ours.total() > 300


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", non_blocking=True),
    "nonzero": lambda x: (x > 0).nonzero(),
    "a mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x + 1),
    "a copy": lambda x: torch.ones(4).to(CUDA),
    "a copy of memory that is not pinned": lambda x: torch.ones(4).to(CUDA, non_blocking=True),
    "a copy that casts": lambda x: torch.ones(4).pin_memory().to(CUDA, torch.bfloat16, non_blocking=True),
    "a copy with gaps": lambda x: torch.ones(4, 4)[:, :2].pin_memory().to(CUDA, non_blocking=True),
    "a copy that transposes": lambda x: x.view(2, 2).copy_(
        torch.ones(2, 2).pin_memory().t(), non_blocking=True
    ),
    "a value that is set": lambda x: x.__setitem__(0, torch.tensor(1.0)),  # torch 2.15 fills in a number
    "a solver": lambda x: torch.linalg.solve(x.view(2, 2), x.view(2, 2)),
}
RUNS_ON = {
    "arithmetic": lambda x: (x * 2 + torch.tensor(3.0)).sum(),
    "a copy that nothing waits for": lambda x: (
        x + torch.ones(4).pin_memory()[1:].to(CUDA, non_blocking=True).sum()
    ),
    "a copy of memory made for it": lambda x: x + torch.empty(4, pin_memory=True).to(CUDA, non_blocking=True),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "of the host": lambda x: torch.arange(4).nonzero().tolist(),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_makes_the_host_wait_is_noticed(name):
    with Rehearsal():
        x = torch.zeros(4, device=CUDA)
        with pytest.raises(HostWaits):
            WAITS[name](x)


@pytest.mark.parametrize("name", RUNS_ON)
def test_what_waits_for_nothing_runs(name):
    with Rehearsal():
        RUNS_ON[name](torch.zeros(4, device=CUDA))


@pytest.mark.parametrize(
    "mix",
    [
        torch.add,
        lambda x, y: x[y > 0],
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.stack([x[0], y[0]]),  # numbers of the host are taken by some operators only
        lambda x, y: torch.randn(4, generator=torch.Generator(), device=x.device),
    ],
)
def test_tensors_of_both_devices_are_noticed(mix):
    with Rehearsal(), pytest.raises(MixedDevices):
        mix(torch.zeros(4, device=CUDA), torch.zeros(4))


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch knows nothing of CUDA's operators")
@pytest.mark.parametrize("lacks", [lambda x: torch.histogram(x, 3), lambda x: x.long() @ x.long().T])
def test_what_cuda_lacks_is_noticed(lacks):
    with Rehearsal(), pytest.raises(NotOnGpu):
        lacks(torch.zeros(2, 2, device=CUDA))


def test_an_operator_on_unequal_tensors_counts_for_each():
    with Rehearsal() as rehearsal:
        tensors = [torch.zeros(size, device=CUDA) for size in (2, 3, 4)]
        rehearsal.restart()
        torch._foreach_mul_(tensors, 2.0)
        torch._foreach_add_(tensors, [tensor + 1 for tensor in tensors])
        assert rehearsal.kernels.total() == 3 + 2
        rehearsal.restart()
        torch._foreach_mul_(tensors, torch.zeros(3, device=CUDA).unbind())
        assert rehearsal.kernels.total() == 1 + 3
        rehearsal.restart()
        torch._foreach_copy_([tensor.bfloat16() for tensor in tensors], tensors)  # casts them
        assert rehearsal.kernels.total() == 3 + 1
        torch._foreach_copy_([tensors[0].bfloat16(), *tensors[1:]], tensors)
        assert rehearsal.kernels.total() == 4 + 1 + 3

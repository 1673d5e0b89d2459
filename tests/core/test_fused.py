"""What a GPU computes in compiled functions is what the operators of other devices compute."""

from functools import partial

import numpy as np
import pytest
import torch
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from dino_vit.core import fused as mechanism
from dino_vit.core.fused import fused, fused_if_small, fused_step, fuses
from dino_vit.method import loss
from dino_vit.models import layers
from dino_vit.models.block import Sequences, _heads, _SplitHeads
from dino_vit.views import augment, fused_augment
from dino_vit.views.augment import Augment, ViewAugment, draw_augment
from tests.support.close import assert_close_to_scale
from tests.support.runs import assert_same_readings
from tests.support.training import trained

RUNS = {
    "dino": {"model.drop_path": 0.2},
    "dinov2": {
        "loss.patch_weight": 1,
        "model.layer_scale": 0.5,
        "model.drop_path": 0.2,
        "loss.koleo_weight": 0.1,
    },
    "recomputed": {"model.drop_path": 0.2, "model.grad_checkpointing": "true", "views.local_count": 0},
}


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Take the functions on this device too, without compiling them; list those that are called."""
    called = []

    def run(plain, _, arguments):
        called.append(plain.__name__)
        return plain(*arguments)

    monkeypatch.setattr(mechanism, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(mechanism, "_run", run)
    monkeypatch.setattr(mechanism._State, "small", True)
    return called


@pytest.mark.parametrize(
    ("name", "precision", "rtol"),
    [
        ("dino", "bf16", 5e-3),
        ("dinov2", "no", 1e-5),
        pytest.param("dinov2", "bf16", 5e-3, marks=pytest.mark.slow),
        ("recomputed", "no", 1e-5),
    ],
)
def test_a_run_with_fused_functions_has_the_losses_and_gradients_of_one_without(
    tmp_path, request, name, precision, rtol
):
    """In bf16 what is added in float32 is rounded once less."""
    settings = {**RUNS[name], "data.augment_on": "device", "run.precision": precision, "run.log_every": 2}
    settings |= {"budget.steps": 10, "run.eval_every": "null"}
    trained(tmp_path / "plain", settings)
    called = request.getfixturevalue("like_a_gpu")
    trained(tmp_path / "fused", settings)
    for reading, factor in (("loss", 1), ("gradient_norm", 10)):
        assert_same_readings(tmp_path / "fused", tmp_path / "plain", reading, rtol=factor * rtol)
    expected = {"_norm", "_norm_backward", "_add", "_add_and_norm", "_add_backward", "colours", "blur_rows"}
    expected |= {"fused_rows_loss", "_gamma_backward"} if name == "dinov2" else {"_add_and_norm_backward"}
    assert expected | {"fused_targets", "fused_pairs_loss"} <= set(called)


@pytest.mark.parametrize("branch", ["nothing", "plain", "scaled", "dropped", "both"])
def test_gradients_of_residuals_and_norms_are_those_of_the_formula(branch):
    double = partial(torch.randn, dtype=torch.float64, requires_grad=True)
    x, added, gamma, weight, bias = double(5, 6), double(5, 6), double(6), double(6), double(6)
    drop = torch.tensor([[0.0], [2.0], [1.5], [0.0], [1.0]], dtype=torch.float64)
    gamma = gamma if branch in ("scaled", "both") else None
    drop = drop if branch in ("dropped", "both") else None
    added = None if branch == "nothing" else added
    arguments = [x, added, gamma, drop, weight, bias, 1e-6, torch.float64]
    assert torch.autograd.gradcheck(layers._AddNorm.apply, arguments)
    out, normed = layers._AddNorm.apply(*arguments)
    expected = (
        x if added is None else x + added * (1 if gamma is None else gamma) * (1 if drop is None else drop)
    )
    assert_close_to_scale(
        [out, normed], [expected, torch.nn.functional.layer_norm(out, (6,), weight, bias, 1e-6)]
    )
    if added is not None:
        assert torch.autograd.gradcheck(layers._Add.apply, [x, added, gamma, drop])
        assert_close_to_scale(layers._Add.apply(x, added, gamma, drop), expected)


def test_heads_that_are_split_together_have_the_gradients_of_those_split_apart():
    sequences = Sequences([(2, 3), (4, 2)])
    projected = torch.randn(14, 3 * 8, requires_grad=True)
    apart = [part for qkv in sequences.split(projected, 3, 2, -1) for part in _heads(qkv)]
    together = _SplitHeads.apply(projected, sequences, 2)
    factors = [torch.randn_like(part) for part in apart]
    grads = [torch.autograd.grad(parts, projected, factors)[0] for parts in (apart, together)]
    assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))
    assert torch.equal(*grads)


@pytest.mark.parametrize("size", [(40, 48), (5, 4)])
@pytest.mark.parametrize("hue", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_augmentation_in_four_kernels_is_that_of_many(like_a_gpu, size, hue, dtype):
    probable = dict.fromkeys(("flip", "jitter", "grey", "blur", "solarise"), 0.5)
    view = ViewAugment(**probable, brightness=0.4, contrast=0.4, saturation=0.2, hue=hue)
    rows = draw_augment([view] * 2, seed=0, epoch=0, samples=np.arange(48)).reshape(96, -1)
    levels = torch.randint(0, 256, (96, 3, *size))
    images = levels.to(torch.uint8) if dtype == torch.uint8 else levels / 255
    module = Augment(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), hue_max=hue)
    expected = module(images, torch.from_numpy(rows))
    assert not like_a_gpu
    with fused_step():
        assert_close_to_scale(module(images, torch.from_numpy(rows)), expected)
    assert len(like_a_gpu) == 4


def test_only_steps_on_a_gpu_are_fused(monkeypatch):
    x = torch.zeros(2)
    with fused_step():
        assert not fuses(x)
        with FakeTensorMode():
            assert not fuses(torch.empty(2, device="cuda"))
        monkeypatch.setattr(mechanism, "is_on_gpu", lambda _: True)
        assert fuses(x)
        assert fuses(x, x.numel())
        assert not fuses(x, x.numel() + 1)
        with fused_if_small():
            assert fuses(x, x.numel() + 1)
        assert not fuses(x.double())
        assert torch.compile(fuses, backend="eager", fullgraph=True)(x) is False
    assert not fuses(x)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_a_run_goes_on_where_nothing_can_be_compiled(monkeypatch, caplog):
    monkeypatch.setattr(mechanism, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(mechanism._State, "works", True)

    @fused
    def double(x):
        return 2 * x

    broken = torch._inductor.config.patch({"cpp.cxx": ("/no/compiler",)})
    with broken, fresh_inductor_cache(), fused_step():
        assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
        assert not fuses(torch.ones(3))
        assert torch.equal(double(torch.ones(4)), torch.full((4,), 2.0))
    assert caplog.text.count("training goes on without compiled functions") == 1


def functions():
    """Return arguments of each function."""
    rows, width, few = 96, 32, 256
    x, grad, column = torch.randn(rows, width), torch.randn(rows, width), torch.rand(rows, 1)
    branch, gamma, weight, bias = grad.bfloat16(), *torch.rand(3, width)
    mean, scale, half = x.mean(1, keepdim=True), column + 0.5, torch.bfloat16
    logits, teacher, center, sharp = (
        torch.randn(10, 4, few),
        torch.rand(2, 4, few),
        torch.rand(1, few),
        torch.full((), 9.0),
    )
    images = torch.randint(0, 256, (6, 3, 24, 24), dtype=torch.uint8)
    jitters, taps, switch, levels = torch.rand(14, 6), torch.rand(5, 6), torch.ones(6), images.float()
    hue = augment.JITTERS, 1, augment._LUMA
    return {
        layers._add: (x, branch, gamma, column),
        layers._add_backward: (grad, gamma, column, half),
        layers._gamma_backward: (grad, branch, column, gamma),
        layers._norm: (x, weight, bias, 1e-6, half),
        layers._norm_backward: (branch, grad, x, weight, mean, scale),
        layers._add_and_norm: (x, branch, gamma, column, weight, bias, 1e-6, half),
        layers._add_and_norm_backward: (branch, grad, x, weight, mean, scale, column, half),
        loss.fused_targets: (teacher, center, sharp),
        loss.fused_pairs_loss: (logits, teacher.softmax(-1), 1.0, half),
        loss.fused_rows_loss: (logits[0], teacher[0], center, torch.rand(4, 1), sharp, 1.0, half),
        fused_augment.contrast_means: (images, jitters, *hue),
        fused_augment.colours: (images, jitters, torch.rand(6, 1, 1), switch, switch, *hue),
        fused_augment.blur_columns: (levels, taps),
        fused_augment.blur_rows: (levels, taps, switch, weight[:3].view(3, 1, 1), bias[:3].view(3, 1, 1) + 1),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_compiled_functions_are_one_kernel_each(monkeypatch):
    """By Inductor's code for CPUs; the numbers are those of the plain code."""
    for function, arguments in functions().items():
        expected = function(*arguments)
        with monkeypatch.context() as patched, fused_step():
            patched.setattr(mechanism, "is_on_gpu", lambda _: True)
            with fresh_inductor_cache():
                out, code = run_and_get_code(function, *arguments)
        assert_close_to_scale(
            [one.float() for one in (out if isinstance(out, tuple) else [out])],
            [one.float() for one in (expected if isinstance(expected, tuple) else [expected])],
            relative=1e-2,  # of bfloat16
        )
        assert sum(text.count("async_compile.cpp") for text in code) == 1, function.__name__

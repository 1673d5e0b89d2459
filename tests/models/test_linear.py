from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.models.linear import Cast, Linear, OneDnnLinear, cast_together
from tests.support.backbones import backbone
from tests.support.close import assert_close_to_scale

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of PyTorch has no oneDNN"
)


def leaf(*shape: int, step: int = 1) -> Tensor:
    """Return random numbers, every `step`-th of a larger tensor so that they are not contiguous."""
    return torch.randn(*shape[:-1], shape[-1] * step)[..., ::step].detach().requires_grad_()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 16)])
@pytest.mark.parametrize("step", [1, 2])
def test_detour_gives_torchs_output_and_gradients(shape: tuple[int, ...], bias: bool, step: int) -> None:
    inputs = [leaf(*shape, step=step), leaf(24, 16, step=step), *([leaf(24)] if bias else [])]
    ours = OneDnnLinear.apply(*inputs, *([] if bias else [None]))
    theirs = F.linear(*inputs)
    assert_close_to_scale(ours, theirs)
    grad = torch.randn_like(theirs)
    grads = (torch.autograd.grad(out, inputs, grad) for out in (ours, theirs))
    assert_close_to_scale(*grads)


@pytest.mark.parametrize("slow", [True, False])
def test_layer_is_torchs_in_any_dtype_and_shape(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    monkeypatch.setattr("dino_vit.models.linear.mkl_is_slow", lambda: slow)
    layer, peer = Linear(16, 24), torch.nn.Linear(16, 24)
    peer.load_state_dict(layer.state_dict())
    for x in (torch.randn(3, 16), torch.randn(16), torch.randn(0, 16), torch.randn(2, 3, 16)):
        assert_close_to_scale(layer(x), peer(x))
        layer(x).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), peer(x))
    assert torch.equal(layer.double()(x.double()), peer.double()(x.double()))


def test_detour_stays_out_of_traced_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dino_vit.models.linear.mkl_is_slow", lambda: True)
    program = torch.export.export(Linear(16, 24), (torch.randn(3, 16),))
    assert "mkldnn" not in str(program.graph)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_cast_together_are_those_of_autocast(frozen: bool) -> None:
    layers = [Linear(16, 24), Linear(24, 16, bias=False), Linear(16, 24)]
    used = [parameter for layer in layers[:2] for parameter in layer.parameters()]
    for layer in layers:
        layer.requires_grad_(not frozen)
    x = torch.randn(5, 16)

    def outcome(cast: Sequence[Cast]) -> list[Tensor]:
        y = layers[1](layers[0](x, *cast[0]), *cast[1])
        return [y, *([] if frozen else torch.autograd.grad(y.square().sum(), used))]

    with torch.autocast("cpu", torch.bfloat16):
        cast = cast_together(*layers)  # of the last no gradient is asked for
        tensors = [tensor for ((weight, bias),) in cast for tensor in (weight, bias) if tensor is not None]
        assert [tensor.dtype for tensor in tensors] == [torch.bfloat16] * 5
        for found, expected in zip(outcome(cast), outcome([()] * 3), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        assert cast_together(layers[0], torch.nn.Linear(24, 16)) == [()] * 2
        assert cast_together(*(layer.half() for layer in layers)) == [()] * 3


def test_a_layer_of_another_kind_may_take_the_place_of_one_in_a_block() -> None:
    block = backbone().blocks[0]
    x = torch.randn(2, 5, block.norm1.normalized_shape[0])
    with torch.autocast("cpu", torch.bfloat16):
        expected = block(x)
        block.mlp.fc2 = torch.nn.Sequential(block.mlp.fc2)
        assert torch.equal(block(x), expected)

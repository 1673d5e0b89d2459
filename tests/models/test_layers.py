from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.models.layers import Linear, OneDnnLinear
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
    monkeypatch.setattr("dino_vit.models.layers.mkl_is_slow", lambda: slow)
    layer, peer = Linear(16, 24), torch.nn.Linear(16, 24)
    peer.load_state_dict(layer.state_dict())
    for x in (torch.randn(3, 16), torch.randn(16), torch.randn(0, 16), torch.randn(2, 3, 16)):
        assert_close_to_scale(layer(x), peer(x))
        layer(x).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), peer(x))
    assert torch.equal(layer.double()(x.double()), peer.double()(x.double()))


def test_detour_stays_out_of_traced_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dino_vit.models.layers.mkl_is_slow", lambda: True)
    program = torch.export.export(Linear(16, 24), (torch.randn(3, 16),))
    assert "mkldnn" not in str(program.graph)

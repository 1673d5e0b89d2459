from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dino_vit.models.block import attend
from dino_vit.models.sequences import Sequences
from dino_vit.models.vit import VisionTransformer
from tests.support.close import assert_close_to_scale


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend with one loop over images, heads and queries."""
    out = torch.zeros_like(q)
    for b, h, n in (
        (b, h, n) for b in range(q.shape[0]) for h in range(q.shape[1]) for n in range(q.shape[2])
    ):
        scores = [scale * torch.dot(q[b, h, n], key) for key in k[b, h]]
        shares = [math.exp(score) for score in scores]
        out[b, h, n] = sum(share * value for share, value in zip(shares, v[b, h], strict=True)) / sum(shares)
    return out


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_attend_is_the_formula(dtype: torch.dtype, tolerance: float, queries: int) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 8)
    q = q[:, :, :queries]
    expected = naive_attention(q, k, v, scale=0.3)
    out = attend(q.to(dtype), k.to(dtype), v.to(dtype), scale=0.3).float()
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)


def test_explicit_attention_has_the_gradients_of_the_fused_kernel() -> None:
    inputs = torch.randn(3, 2, 2, 9, 8)
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = inputs.to(dtype).requires_grad_()
        q, k, v = leaf.unbind(0)
        attend(q, k, v, scale=0.3).square().sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.float())
    torch.testing.assert_close(*grads, atol=5e-2, rtol=0)


def test_a_block_may_compute_the_cls_tokens_of_some_sizes_alone() -> None:
    block = VisionTransformer(width=16, depth=1, heads=2, layer_scale=0.5, image_size=32).blocks[0]
    large, small = torch.randn(2, 9, 16), torch.randn(3, 5, 16)
    for only_cls in ([False, False], [False, True], [True, False], [True, True]):
        sequences = Sequences([(2, 9), (3, 5)], only_cls=only_cls)
        together = sequences.output().split(block(sequences.join([large, small]), sequences), -1)
        alone = [
            block(x)[:, :1] if only else block(x) for x, only in zip((large, small), only_cls, strict=True)
        ]
        assert_close_to_scale(together, alone)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_forward_is_the_cls_row_of_all_features(depth: int, drop_path: float) -> None:
    model = VisionTransformer(
        width=16, depth=depth, heads=2, image_size=32, patch_size=8, registers=2, drop_path=drop_path
    )
    images = torch.randn(4, 3, 24, 40)
    direction = torch.randn(16)  # not squares, whose sum is fixed by LayerNorm: it has hardly a gradient
    outputs, grads = [], []
    for features in (model, lambda images: model.forward_features(images)[:, 0]):
        torch.manual_seed(1)  # the same branches are dropped
        model.zero_grad()
        out = features(images)
        (out @ direction).sum().backward()
        outputs.append(out)
        grads.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
    assert_close_to_scale(*outputs)
    assert_close_to_scale(*grads)

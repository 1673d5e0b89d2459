import copy

import pytest
import torch
import torch.nn.functional as F

from dino_vit.models.positions import KEPT_MATRICES, _resample, interpolate_pos_embs
from dino_vit.models.vit import VisionTransformer


def embeddings(grid: tuple[int, int], width: int = 8) -> torch.Tensor:
    return torch.randn(1, 1 + grid[0] * grid[1], width)


@pytest.mark.parametrize("trained", [(14, 14), (5, 9)])
def test_scale_factors_give_every_grid_up_to_40_exactly(trained):
    pos = embeddings(trained, width=2)
    for h in range(1, 41):
        for w in range(1, 41):
            out = interpolate_pos_embs(pos, (h, w), trained_grid=trained, mode="dino")
            assert out.shape == (1, 1 + h * w, 2), (h, w)
            assert out.isfinite().all(), (h, w)


@pytest.mark.parametrize("mode", ["hf", "dino", "dinov2", "timm"])
def test_the_trained_grid_is_the_identity_and_the_class_token_stays(mode):
    pos = embeddings((6, 4))
    assert interpolate_pos_embs(pos, (6, 4), trained_grid=(6, 4), mode=mode) is pos
    other = interpolate_pos_embs(pos, (4, 6), trained_grid=(6, 4), mode=mode)
    assert torch.equal(other[:, 0], pos[:, 0])
    assert not torch.allclose(other, pos), "as many patches in another shape are another grid"


@pytest.mark.parametrize("grid", [(6, 6), (20, 9), (37, 37)])
def test_modes_are_the_published_calls(grid):
    pos = embeddings((14, 14))
    field = pos[:, 1:].reshape(1, 14, 14, 8).permute(0, 3, 1, 2)
    published = {
        "dino": F.interpolate(
            field, scale_factor=((grid[0] + 0.1) / 14, (grid[1] + 0.1) / 14), mode="bicubic"
        ),
        "hf": F.interpolate(field, size=grid, mode="bicubic", align_corners=False),
        "timm": F.interpolate(field, size=grid, mode="bicubic", antialias=True),
    }
    for mode, expected in published.items():
        expected = expected.permute(0, 2, 3, 1).reshape(1, -1, 8)
        for matrices in (None, {}):  # without a matrix, and with one
            out = interpolate_pos_embs(pos, grid, trained_grid=(14, 14), mode=mode, matrices=matrices)
            assert torch.allclose(out[:, 1:], expected, atol=1e-6), mode
            assert torch.equal(out[:, 0], pos[:, 0])


@pytest.mark.parametrize("mode", ["hf", "dino", "timm"])
def test_the_gradient_is_that_of_the_published_call(mode):
    pos, matrices = embeddings((6, 4)).requires_grad_(), {}
    direction = torch.randn(1, 1 + 7 * 9, 8)
    field = pos[:, 1:].reshape(1, 6, 4, 8).permute(0, 3, 1, 2)
    expected = _resample(field, (7, 9), mode).permute(0, 2, 3, 1).reshape(1, -1, 8)
    (gradient,) = torch.autograd.grad((expected * direction[:, 1:]).sum(), pos)
    for _ in range(2):  # made, and kept
        out = interpolate_pos_embs(pos, (7, 9), trained_grid=(6, 4), mode=mode, matrices=matrices)
        (found,) = torch.autograd.grad((out * direction).sum(), pos)
        torch.testing.assert_close(found[:, 1:], gradient[:, 1:], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[:, 0], direction[:, 0])
    assert len(matrices) == 1


def test_a_matrix_that_inference_mode_made_serves_training_and_few_are_kept():
    model = VisionTransformer(image_size=32, patch_size=8, width=16, depth=1, heads=2)
    with torch.inference_mode():
        model(torch.randn(1, 3, 48, 32))
    model(torch.randn(1, 3, 48, 32)).sum().backward()
    for cells in range(1, 2 * KEPT_MATRICES):
        model.interpolate_pos_embs((cells, 3))
    assert 1 < len(model.matrices) <= KEPT_MATRICES
    assert not copy.deepcopy(model).matrices, "files and copies hold none"

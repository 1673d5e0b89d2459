import pytest
import torch
import torch.nn.functional as F

from dino_vit.models.positions import interpolate_pos_embs


def embeddings(grid: tuple[int, int], width: int = 8) -> torch.Tensor:
    return torch.randn(1, 1 + grid[0] * grid[1], width)


@pytest.mark.parametrize("trained", [(14, 14), (37, 37), (5, 9)])
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
        out = interpolate_pos_embs(pos, grid, trained_grid=(14, 14), mode=mode)[:, 1:]
        assert torch.allclose(out, expected.permute(0, 2, 3, 1).reshape(1, -1, 8), atol=1e-6), mode

import numpy as np
import pytest
import torch

from dino_vit.views.masks import Masking, PatchDrop

GRID = 14, 14
PATCHES = 14 * 14


def masking(**changes):
    settings = {"seed": 0, "grid": GRID, "views": 2, "batch": 32, "probability": 0.5, "ratio": (0.1, 0.5)}
    return Masking(**{**settings, **changes})


def drawn(masking, step=0):
    return masking.draw_grids(0, step, np.arange(masking.batch))


@pytest.mark.parametrize("probability", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("views", [1, 2, 3])
def test_exactly_the_share_of_views_is_masked(views, probability):
    for step in range(5):
        hidden = drawn(masking(views=views, probability=probability), step)
        assert hidden.shape == (views, 32, *GRID)
        assert hidden.any((2, 3)).sum() == round(probability * views * 32)


def test_which_views_and_patches_are_masked_is_random_and_balanced():
    steps = [drawn(masking(), step) for step in range(100)]
    view_shares = np.mean([hidden.any((2, 3)) for hidden in steps], axis=0)  # 64 views of 100 steps
    assert abs(view_shares - 0.5).max() < 5 * 0.5 / np.sqrt(100)
    patch_shares = np.mean([hidden.mean((0, 1)) for hidden in steps], axis=0)
    middle = patch_shares[4:-4, 4:-4]
    assert abs(middle / middle.mean() - 1).max() < 0.15  # a border patch is in fewer rectangles
    assert not np.array_equal(steps[0], steps[1])
    assert not np.array_equal(steps[0], drawn(masking(seed=1)))
    assert not np.array_equal(steps[0], masking().draw_grids(1, 0, np.arange(32)))


def test_ratios_are_one_from_each_part_of_their_range():
    counts = np.sort(drawn(masking()).sum((2, 3)).ravel())[32:]
    bounds = PATCHES * (0.1 + 0.4 * np.arange(33) / 32)
    assert (counts <= bounds[1:]).all()
    # Rectangles rarely fit exactly, so that a view may stay a few patches below.
    assert (counts >= bounds[:-1] - 6).all()
    assert counts.mean() / PATCHES == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("share", [1, 4, 16])
def test_masks_do_not_depend_on_processes_and_passes(share):
    whole, pieces = masking(), masking()
    parts = [pieces.draw_grids(3, 7, np.arange(first, first + share)) for first in range(0, 32, share)]
    assert np.array_equal(np.concatenate(parts, axis=1), whole.draw_grids(3, 7, np.arange(32)))


@pytest.mark.parametrize("grid", [(2, 2), (2, 9), (3, 2), (4, 4)])
def test_half_of_the_views_are_masked_on_the_tiniest_grids(grid):
    for step in range(10):
        hidden = drawn(masking(grid=grid, ratio=(0.3, 0.9)), step)
        assert hidden.any((2, 3)).sum() == 32
        assert not hidden.all((2, 3)).any()


def test_kept_patches_are_random_and_depend_on_the_position_in_the_global_batch_alone():
    drop = PatchDrop(seed=0, patches=PATCHES, kept=49, views=2, batch=32)
    whole = drop.draw(1, 3, 0, 32).unflatten(0, (2, 32))
    assert whole.shape == (2, 32, 49)
    assert (whole.diff(dim=2) > 0).all(), "in order, none twice"
    parts = [drop.draw(1, 3, first, 8).unflatten(0, (2, 8)) for first in range(0, 32, 8)]
    assert torch.cat(parts, dim=1).equal(whole)
    assert len(whole.flatten(0, 1).unique(dim=0)) == 64, "each view has its own"
    assert not drop.draw(1, 4, 0, 32).equal(whole.flatten(0, 1))
    steps = torch.cat([drop.draw(0, step, 0, 32) for step in range(100)])
    shares = steps.flatten().bincount(minlength=PATCHES) / len(steps)
    assert (shares - 0.25).abs().max() < 5 * (0.25 * 0.75 / len(steps)) ** 0.5
    everything = PatchDrop(seed=0, patches=4, kept=4, views=1, batch=1).draw(0, 0, 0, 1)
    assert everything.tolist() == [[0, 1, 2, 3]]

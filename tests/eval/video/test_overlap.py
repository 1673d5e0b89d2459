import math

import numpy as np
import pytest
import torch

from dino_vit.eval.video.overlap import (
    boundaries,
    boundary_accuracy,
    dilate,
    region_similarity,
    statistics,
)


def blobs(number, height, width, seed):
    """Masks of free shape: smooth noise above a level."""
    noise = torch.randn(number, 1, height, width, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.avg_pool2d(noise, 9, 1, 4)[:, 0] > 0.1


def naive_boundary(mask):
    """Return the pixels that differ from the one to the right, below or across, as DAVIS' code has it."""
    height, width = mask.shape
    found = []
    for y in range(height):
        for x in range(width):
            others = [(y, x + 1), (y + 1, x), (y + 1, x + 1)]
            if y == height - 1:
                others = [(y, x + 1)]
            if x == width - 1:
                others = [(y + 1, x)]
            if any(v < height and u < width and mask[v, u] != mask[y, x] for v, u in others):
                found.append((y, x))
    return found


def naive_boundary_accuracy(predicted, true):
    radius = math.ceil(0.008 * math.hypot(*true.shape))
    found, wanted = naive_boundary(predicted), naive_boundary(true)

    def share(points, others):
        near = [any(math.dist(one, other) <= radius for other in others) for one in points]
        return sum(near) / len(near) if near else 1.0

    precision, recall = share(found, wanted), share(wanted, found)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@pytest.mark.parametrize("size", [(40, 61), (30, 200)])
def test_the_measures_are_those_of_naive_loops(size):
    predicted, true = blobs(5, *size, seed=0), blobs(5, *size, seed=1)
    true[3] = predicted[3].roll(1, dims=1)
    predicted[4] = true[4]
    j, f = region_similarity(predicted, true), boundary_accuracy(predicted, true)
    for row, (one, other) in enumerate(zip(predicted.numpy(), true.numpy(), strict=True)):
        assert j[row].item() == pytest.approx((one & other).sum() / (one | other).sum())
        assert f[row].item() == pytest.approx(naive_boundary_accuracy(one, other))
        assert set(zip(*np.nonzero(boundaries(predicted)[row].numpy()), strict=True)) == set(
            naive_boundary(one)
        )
    assert j[4] == f[4] == 1
    assert 0.3 < f[3] <= 1
    assert f[:3].max() < 0.95


def test_empty_masks_count_as_davis_counts_them():
    none, some = torch.zeros(1, 20, 20, dtype=torch.bool), blobs(1, 20, 20, seed=0)
    for measure in (region_similarity, boundary_accuracy):
        assert measure(none, none) == 1
        assert measure(none, some) == measure(some, none) == 0


@pytest.mark.parametrize("radius", [1, 4, 50])
def test_a_dilation_is_all_within_the_radius(radius):
    masks = torch.zeros(2, 23, 17, dtype=torch.bool)
    points = [[(0, 0), (12, 9)], [(22, 16)]]
    for mask, marked in zip(masks, points, strict=True):
        for point in marked:
            mask[point] = True
    found = dilate(masks, radius)
    for mask, marked in zip(found, points, strict=True):
        for y in range(23):
            for x in range(17):
                assert mask[y, x] == any(math.dist((y, x), point) <= radius for point in marked)


@pytest.mark.parametrize("frames", [1, 2, 3, 10, 39, 80])
def test_statistics_are_those_of_davis(frames):
    values = torch.rand(frames, generator=torch.Generator().manual_seed(frames)).double()
    ends = [math.floor(end + 0.5) - 1 for end in np.linspace(1, frames, 5)]
    quarters = [values[ends[i] : ends[i + 1] + 1] for i in range(4)]
    found = statistics(values)
    assert found.mean == pytest.approx(100 * values.mean().item())
    assert found.recall == pytest.approx(100 * sum(value > 0.5 for value in values.tolist()) / frames)
    assert found.decay == pytest.approx(100 * (quarters[0].mean() - quarters[3].mean()).item())

import math

import pytest
import torch

from dino_vit.method.koleo import koleo_loss


def by_points(rows):
    units = [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in rows]
    nearest = [min(math.dist(a, b) for j, b in enumerate(units) if j != i) for i, a in enumerate(units)]
    return -sum(math.log(distance) for distance in nearest) / len(nearest)


def test_it_is_the_mean_over_points_of_the_logarithm_of_the_least_distance():
    features = torch.randn(9, 4)
    assert koleo_loss(features).item() == pytest.approx(by_points(features.tolist()), rel=1e-5)


def test_its_gradient_moves_neighbours_apart():
    features = torch.tensor([[1.0, 0.1, 0.0], [1.0, 0.0, 0.1], [0.0, 1.0, 0.0]], requires_grad=True)
    before = koleo_loss(features)
    before.backward()
    assert koleo_loss(features.detach() - 0.01 * features.grad) < before


def test_its_gradient_is_that_of_differences():
    features = torch.randn(6, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(koleo_loss(features), features)
    step = 1e-3
    for row, column in ((0, 0), (3, 2), (5, 1)):
        moved = [features.detach().clone() for _ in range(2)]
        moved[0][row, column] -= step
        moved[1][row, column] += step
        low, high = (by_points(one.tolist()) for one in moved)
        assert gradient[row, column].item() == pytest.approx((high - low) / (2 * step), rel=1e-2, abs=1e-3)


def test_equal_features_give_finite_gradients():
    features = torch.ones(4, 3, requires_grad=True)
    koleo_loss(features).backward()
    assert features.grad.isfinite().all()

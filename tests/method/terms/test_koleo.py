import math

import pytest
import torch

from dino_vit.method.terms.koleo import koleo_loss


def by_points(rows):
    units = [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in rows]
    nearest = [min(math.dist(a, b) for j, b in enumerate(units) if j != i) for i, a in enumerate(units)]
    return -sum(math.log(distance) for distance in nearest) / len(nearest)


def test_koleo_is_the_mean_over_points_of_the_logarithm_of_the_least_distance():
    features = torch.randn(9, 4)
    assert koleo_loss(features).item() == pytest.approx(by_points(features.tolist()), rel=1e-5)


def test_equal_features_give_finite_gradients():
    features = torch.ones(4, 3, requires_grad=True)
    koleo_loss(features).backward()
    assert features.grad.isfinite().all()

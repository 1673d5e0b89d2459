import math

import pytest
import torch

from dino_vit.eval.rankme import rankme


@pytest.mark.parametrize("shape", [(50, 8), (5, 12), (9, 9)])
def test_rankme_is_the_exponential_of_the_entropy_of_the_singular_values(shape):
    features = torch.randn(*shape) @ torch.diag(torch.logspace(-2, 1, shape[1]))
    product = features.double().T @ features.double()
    singular = [math.sqrt(value) for value in torch.linalg.eigvalsh(product).tolist() if value > 1e-12]
    shares = [value / sum(singular) for value in singular]
    expected = math.exp(-sum(share * math.log(share) for share in shares))
    assert rankme(features) == pytest.approx(expected, rel=1e-6)


def test_rankme_counts_directions():
    basis = torch.linalg.qr(torch.randn(20, 20)).Q
    assert rankme(basis[:, :6]) == pytest.approx(6)
    assert rankme(torch.ones(20, 6)) == pytest.approx(1)
    assert rankme(torch.zeros(20, 6)) == 1

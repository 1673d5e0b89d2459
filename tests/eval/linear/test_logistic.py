import math

import pytest
import torch
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional as F

from dino_vit.eval.linear import logistic
from dino_vit.eval.linear.logistic import sweep

CS = (1e-6, 1e-2, 1.0, 30.0)


def labelled(count, classes=4, width=6):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(classes, (count,), generator=generator)
    centers = torch.randn(classes, width, generator=generator)
    noise = torch.randn(count, width, generator=generator) * torch.tensor([1, 1, 5, 0.2, 1, 1])
    shift = torch.tensor([0, 30, 0, -7, 0, 1])  # far from the middle, as features are
    return (centers[targets] + noise + shift).double(), targets


def objective(features, targets, weight, bias, c):
    """Scikit-learn's, image by image."""
    losses = [
        torch.logsumexp(weight @ x + bias, 0) - (weight[target] @ x + bias[target])
        for x, target in zip(features, targets, strict=True)
    ]
    return weight.square().sum() / 2 + c * sum(losses)


@pytest.mark.parametrize("scores", [1 << 24, 4 * 17])
def test_every_fit_is_where_the_plain_objective_is_flat(monkeypatch, scores):
    """The objective is convex: where its slope is none is its optimum, and there is one alone for W."""
    monkeypatch.setattr(logistic, "_MAX_SCORES", scores)
    features, targets = labelled(60)
    fits = list(sweep(features, targets, cs=CS[::-1], classes=4, tolerance=1e-10))
    assert [fit.c for fit in fits] == list(CS)
    for fit in fits:
        weight, bias = (part[0].clone().requires_grad_() for part in (fit.head.weight, fit.head.bias))
        value = objective(features, targets, weight, bias, fit.c)
        slopes = torch.autograd.grad(value, (weight, bias))
        scale = fit.c * float(features.abs().sum(dim=0).max())  # of a slope in which nothing cancels
        for slope in slopes:
            assert float(slope.abs().max()) < 1e-6 * scale, fit.c
        for _ in range(5):
            other = weight + 0.01 * weight.norm() * torch.randn_like(weight)
            assert objective(features, targets, other, bias, fit.c) > value
        assert fit.gradient < 1e-6


def test_newton_finds_the_same():
    features, targets = labelled(80)
    (fit,) = sweep(features, targets, cs=[0.5], classes=4, tolerance=1e-10)
    width = features.shape[1]

    def plain(flat):
        weight, bias = flat[: 4 * width].view(4, width), flat[4 * width :]
        loss = F.cross_entropy(features @ weight.T + bias, targets, reduction="sum")
        return weight.square().sum() / 2 + 0.5 * loss + 1e-12 * bias.square().sum()

    flat = torch.zeros(4 * width + 4, dtype=torch.float64)
    for _ in range(100):
        slope, curvature = jacobian(plain, flat), hessian(plain, flat)
        direction, size = torch.linalg.lstsq(curvature, slope).solution, 1.0
        while plain(flat - size * direction) > plain(flat) and size > 1e-9:
            size /= 2
        flat = flat - size * direction
    torch.testing.assert_close(fit.head.weight[0].flatten(), flat[: 4 * width], atol=1e-5, rtol=1e-5)
    assert torch.equal(
        fit.head.scores(features)[:, 0].argmax(1),
        (features @ flat[: 4 * width].view(4, width).T + flat[4 * width :]).argmax(1),
    )


def test_a_strong_penalty_leaves_the_shares_of_the_classes():
    features, targets = labelled(200)
    features = features.float()
    (fit,) = sweep(features, targets, cs=[1e-9], classes=4)
    shares = torch.bincount(targets) / 200
    found = fit.head.scores(features)[:, 0].softmax(-1).mean(0)
    torch.testing.assert_close(found, shares, atol=1e-3, rtol=1e-3)
    assert math.isfinite(fit.gradient)


def test_what_can_be_separated_ends_too():
    features = torch.tensor([[-1.0], [1.0]])
    (fit,) = sweep(features, torch.tensor([0, 1]), cs=[1e5], classes=2, max_iterations=50)
    assert fit.iterations <= 50
    assert fit.head.scores(features)[:, 0].argmax(1).tolist() == [0, 1]

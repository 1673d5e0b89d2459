import math

import pytest
import torch

from dino_vit.eval.linear import logistic
from dino_vit.eval.linear.logistic import sweep

CS = (1e-6, 1e-2, 1.0, 30.0)


def labelled(count, classes=4, width=6):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(classes, (count,), generator=generator)
    centers = torch.randn(classes, width, generator=generator)
    noise = torch.randn(count, width, generator=generator) * torch.tensor([1, 1, 5, 0.2, 1, 1])
    shift = torch.tensor([0, 30, 0, -7, 0, 1])  # far from 0, as features are
    return (centers[targets] + noise + shift).double(), targets


def objective(features, targets, weight, bias, c):
    """Return scikit-learn's objective, image by image."""
    losses = [
        torch.logsumexp(weight @ x + bias, 0) - (weight[target] @ x + bias[target])
        for x, target in zip(features, targets, strict=True)
    ]
    return weight.square().sum() / 2 + c * sum(losses)


@pytest.mark.parametrize("scores", [1 << 24, 4 * 17])
def test_every_fit_is_at_the_minimum_of_the_plain_objective(monkeypatch, scores):
    """The objective is convex, so a zero gradient is the optimum, and strictly convex in W."""
    monkeypatch.setattr(logistic, "_MAX_SCORES", scores)
    features, targets = labelled(60)
    fits = list(sweep(features, targets, cs=CS[::-1], classes=4, tolerance=1e-10))
    assert [fit.c for fit in fits] == list(CS)
    for fit in fits:
        weight, bias = (part[0].clone().requires_grad_() for part in (fit.head.weight, fit.head.bias))
        value = objective(features, targets, weight, bias, fit.c)
        slopes = torch.autograd.grad(value, (weight, bias))
        scale = fit.c * float(features.abs().sum(dim=0).max())  # of a gradient in which nothing cancels
        for slope in slopes:
            assert float(slope.abs().max()) < 1e-6 * scale, fit.c
        for _ in range(5):
            other = weight + 0.01 * weight.norm() * torch.randn_like(weight)
            assert objective(features, targets, other, bias, fit.c) > value
        assert fit.gradient < 1e-6


def test_a_strong_penalty_predicts_the_class_frequencies():
    features, targets = labelled(200)
    features = features.float()
    (fit,) = sweep(features, targets, cs=[1e-9], classes=4)
    shares = torch.bincount(targets) / 200
    found = fit.head.scores(features)[:, 0].softmax(-1).mean(0)
    torch.testing.assert_close(found, shares, atol=1e-3, rtol=1e-3)
    assert math.isfinite(fit.gradient)


def test_separable_classes_end_at_the_iteration_limit():
    features = torch.tensor([[-1.0], [1.0]])
    (fit,) = sweep(features, torch.tensor([0, 1]), cs=[1e5], classes=2, max_iterations=50)
    assert fit.iterations <= 50
    assert fit.head.scores(features)[:, 0].argmax(1).tolist() == [0, 1]

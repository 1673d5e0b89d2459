"""Logistic regressions at the optimum, beside scikit-learn's."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dino_vit.eval import logistic
from dino_vit.eval.linear import head_scores
from dino_vit.eval.logistic import train_logistic
from dino_vit.models.classifiers import on_standardised

CS = (1e-6, 1e-2, 1.0, 30.0)


def shifted(count, classes=4, width=6):
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


@pytest.mark.parametrize(("scores", "width"), [(1 << 22, 6), (17, 6), (1 << 22, 90)])
def test_every_fit_is_at_the_minimum_of_the_plain_objective(monkeypatch, scores, width):
    """The objective is convex, so a zero gradient is the optimum, and strictly convex in W."""
    monkeypatch.setattr(logistic, "_MAX_SCORES", scores)
    features, targets = shifted(60)
    more = torch.randn(60, width - 6, generator=torch.Generator().manual_seed(1))
    features = torch.cat([features, more], dim=1)
    heads = train_logistic(features, targets, cs=CS[::-1], classes=4, tolerance=1e-10)
    for c, *head in zip(CS, heads.weight, heads.bias, strict=True):
        weight, bias = (part.clone().requires_grad_() for part in head)
        value = objective(features, targets, weight, bias, c)
        slopes = torch.autograd.grad(value, (weight, bias))
        scale = c * float(features.abs().sum(dim=0).max())  # of a gradient in which nothing cancels
        for slope in slopes:
            assert float(slope.abs().max()) < 1e-6 * scale, c
        for _ in range(5):
            other = weight + 0.01 * weight.norm() * torch.randn_like(weight)
            assert objective(features, targets, other, bias, c) > value


def test_several_labels_are_logistic_regressions_of_their_own():
    features = torch.randn(150, 6, dtype=torch.double)
    targets = (features[:, :3] + torch.randn(150, 3) > 0.5).double()
    heads = train_logistic(features, targets, cs=[0.1], classes=3)
    for label in range(3):
        peer = LogisticRegression(C=0.1, tol=1e-10, max_iter=10_000).fit(features, targets[:, label])
        assert heads.weight[0, label].numpy() == pytest.approx(peer.coef_[0], abs=1e-4)
        assert float(heads.bias[0, label]) == pytest.approx(peer.intercept_[0], abs=1e-4)


@pytest.mark.parametrize("count", [1, 4, 30])
def test_one_class_has_nothing_that_tells_it_from_others(count):
    def train(features):
        return [train_logistic(features, torch.zeros(count, dtype=torch.long), cs=[0.1, 1], classes=1)]

    (heads,) = on_standardised(train, shifted(count)[0], by_column=False)
    assert not heads.weight.any()
    assert not heads.bias.any()


def test_heads_on_standardised_features_read_them_as_they_are():
    """As scikit-learn's pipeline of a scaler and a regression does; a constant column counts for nothing."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([100.0, 1.0, 0.01, 0.0])
    x = sizes * torch.randn(300, 4, generator=generator) + torch.tensor([5.0, -3.0, 0.0, 7.0])
    score = x[:, 0] / 100 + x[:, 2] / 0.01 + torch.randn(300, generator=generator)
    y = torch.bucketize(score, torch.tensor([-1.0, 1.0]))
    columns = [slice(None), slice(1, 4)]

    def train(features):
        fits = [
            train_logistic(features[:, part], y, cs=[0.3], classes=3, tolerance=1e-10) for part in columns
        ]
        return [fit._replace(columns=part) for fit, part in zip(fits, columns, strict=True)]

    for heads, unscaled, part in zip(on_standardised(train, x), train(x), columns, strict=True):
        pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=0.3, tol=1e-8, max_iter=1000))
        expected = pipeline.fit(x[:, part].double(), y).predict_proba(x[:, part].double())
        found = head_scores(heads, x)[:, 0].softmax(dim=-1)
        assert torch.allclose(found.double(), torch.from_numpy(expected), atol=1e-3)  # of 1
        assert not torch.allclose(found, head_scores(unscaled, x)[:, 0].softmax(dim=-1), atol=1e-2)

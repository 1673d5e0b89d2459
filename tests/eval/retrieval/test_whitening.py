import numpy as np
import pytest
import torch

from dino_vit.eval.retrieval import whitening
from dino_vit.eval.retrieval.whitening import Whitening

CPU = torch.device("cpu")


def skewed(rows, seed=0):
    """Return features with a mean, and with directions of very different spread that depend on each other."""
    generator = np.random.default_rng(seed)
    spread = generator.standard_normal((6, 6)) * [3, 2, 1, 0.5, 0.1, 0.05]
    return (generator.standard_normal((rows, 6)) @ spread.T + 4).astype(np.float32)


def naive(features, other, dimensions):
    """Whiten by the eigenvectors of NumPy's covariance, one feature after the other."""
    lengths = np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    variances, directions = np.linalg.eigh(np.cov((features / lengths).T, bias=True))
    strongest = np.argsort(-variances)[:dimensions]
    found = []
    for feature in other.astype(np.float64):
        centred = feature / np.linalg.norm(feature) - (features / lengths).mean(0)
        turned = np.array([centred @ directions[:, i] / variances[i] ** 0.5 for i in strongest])
        found.append(turned / np.linalg.norm(turned))
    return np.array(found)


@pytest.mark.parametrize("dimensions", [None, 2])
def test_whitening_is_that_of_a_loop(monkeypatch, dimensions):
    monkeypatch.setattr(whitening, "_ROWS", 37)
    features, other = skewed(200), skewed(9, seed=1)
    found = Whitening.learn(features, CPU, dimensions)(torch.from_numpy(other))
    expected = naive(features, other, dimensions)
    assert found.shape == (9, dimensions or 6)
    # Each principal direction may point either way, which no cosine shows.
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=2e-4)


def test_a_set_that_was_learned_from_is_white():
    features = torch.from_numpy(skewed(400))
    learned = Whitening.learn(features, CPU)
    white = (torch.nn.functional.normalize(features) - learned.mean) @ learned.matrix.T
    torch.testing.assert_close(white.T.cov(correction=0), torch.eye(6), atol=5e-3, rtol=0)


def test_directions_without_variance_are_not_blown_up(tmp_path):
    features = torch.zeros(50, 8)
    features[:, :3] = torch.from_numpy(skewed(50)[:, :3])
    learned = Whitening.learn(features, CPU)
    assert float(learned.matrix.norm(dim=1).amax() / learned.matrix.norm(dim=1).amin()) < 320  # √(10⁵)
    np.save(tmp_path / "features.npy", features.numpy())
    mapped = Whitening.learn(np.load(tmp_path / "features.npy", mmap_mode="c"), CPU)
    assert torch.equal(mapped(features), learned(features))


@pytest.mark.parametrize(
    ("features", "dimensions", "said"),
    [
        (torch.eye(3), 4, "to 4 dimensions, but the features have 3"),
        (torch.eye(3)[:1], None, "2 images or more"),
        (torch.ones(5, 4), None, "all features are the same"),
    ],
)
def test_what_cannot_be_learned_is_said(features, dimensions, said):
    with pytest.raises(ValueError, match=said):
        Whitening.learn(features, CPU, dimensions)

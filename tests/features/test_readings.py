"""Readings: cells, levelling, backbones side by side; against naive formulas."""

import numpy as np
import pytest
import torch

from dino_vit import VisionTransformer
from dino_vit.data.image_set import evenly_spaced
from dino_vit.data.synthetic import make_textures
from dino_vit.features import readings
from dino_vit.features.cache import cached_features
from dino_vit.features.frozen import FrozenBackbone, build_baseline
from dino_vit.features.readings import fit_levelling, fit_reading, joined_features, levelled_spec
from dino_vit.models.backbone import CLS, FeatureSpec, mean_by_cell
from dino_vit.views.eval_transform import EvalTransform
from tests.support.close import assert_close_to_scale

TRANSFORM = EvalTransform(size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize("grid", [(6, 6), (4, 7), (2, 1), (3, 5)])
def test_a_cell_is_the_mean_of_its_patches(grid):
    rows, columns = grid
    patches = torch.randn(2, rows * columns, 5)
    expected = []
    for y in range(3):
        for x in range(3):
            inside = [
                patches[:, row * columns + column]
                for row in range(y * rows // 3, -(-(y + 1) * rows // 3))
                for column in range(x * columns // 3, -(-(x + 1) * columns // 3))
            ]
            expected.append(sum(inside) / len(inside))
    assert_close_to_scale(mean_by_cell(patches, grid), torch.cat(expected, dim=1))


def naive(features, others, widths, whiten):
    """Level part by part, by the eigenvectors of a covariance, one direction after the other."""
    start, parts = 0, []
    for width in widths:
        own, x = features[:, start : start + width].double(), others[:, start : start + width].double()
        covariance = torch.from_numpy(np.cov(own.numpy().T, bias=True)).view(width, width)
        covariance += 0.01 * covariance.trace() / width * torch.eye(width)
        levelled = torch.zeros_like(x)
        variances, axes = np.linalg.eigh(covariance.numpy())
        for variance, axis in zip(variances, axes.T, strict=True):
            along = (x - own.mean(dim=0)) @ torch.from_numpy(axis)
            levelled += variance ** (-whiten / 2) * along[:, None] * torch.from_numpy(axis)
        parts.append(levelled / levelled.norm(dim=1, keepdim=True))
        start += width
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("whiten", [0.5, 1.0])
@pytest.mark.parametrize("images", [300, 12], ids=["many images", "fewer images than dimensions"])
def test_levelling_is_a_power_of_the_covariance(images, whiten):
    features, others = (torch.randn(count, 30) @ torch.randn(30, 30) + 2 for count in (images, 7))
    level = fit_levelling(features, [8, 22], whiten)
    assert_close_to_scale(level(others), naive(features, others, [8, 22], whiten).float())


def test_white_features_have_no_directions_of_more_variance(monkeypatch):
    monkeypatch.setattr(readings, "RIDGE", 0.0)
    features = torch.randn(500, 6) * torch.tensor([9.0, 5.0, 3.0, 1.0, 0.5, 0.1])
    level = fit_levelling(features, [6], 1.0)
    white = (features - level.mean) @ level.matrices[0]
    assert_close_to_scale(torch.cov(white.T, correction=0), torch.eye(6))


def test_levelling_is_fitted_on_some_of_many_images():
    features = torch.randn(100, 4)
    half = fit_levelling(features[evenly_spaced(100, 50)], [4])
    assert torch.equal(fit_levelling(features, [4], images=50)(features), half(features))


def test_features_that_are_all_alike_stay_finite():
    alike = torch.ones(10, 4)
    assert (fit_levelling(alike, [4])(alike) == 0).all()


def backbone(seed=0, width=32):
    torch.manual_seed(seed)
    return VisionTransformer(image_size=16, patch_size=4, width=width, depth=2, heads=2)


def test_backbones_side_by_side_each_read_images_their_own_way(tmp_path):
    source = make_textures(length=20)
    first, pixels = (
        FrozenBackbone(model=backbone(), transform=TRANSFORM, cache=tmp_path),
        build_baseline("pixels", source),
    )
    others = (
        FrozenBackbone(
            model=backbone(1, 16),
            transform=EvalTransform(size=(16, 16), mean=(0.1,) * 3, std=(0.3,) * 3),
            cache=tmp_path,
        ),
        FrozenBackbone(model=pixels, transform=pixels.transform, cache=tmp_path),
    )
    joined = FrozenBackbone(model=first.model, transform=TRANSFORM, cache=tmp_path, beside=others)
    spec = FeatureSpec(tokens="cls+cells")
    values, indices = joined_features(joined, source, spec=spec)
    expected = [
        torch.from_numpy(cached_features(each, source, spec=own)[0])
        for each, own in zip((first, *others), (spec, spec, CLS), strict=True)
    ]
    assert np.array_equal(values, torch.cat(expected, dim=1).numpy())
    unit = torch.cat([part / part.norm(dim=1, keepdim=True) for part in expected], dim=1)
    features = torch.from_numpy(values)
    assert_close_to_scale(fit_reading(joined, features, spec, 0.0)(features), unit)
    levelled = fit_levelling(features, [32, 9 * 32, 16, 9 * 16, 3 * 32 * 32])
    assert torch.equal(fit_reading(joined, features, spec, 0.5)(features), levelled(features))
    for tokens in (spec, FeatureSpec(tokens="patches")):
        assert torch.equal(fit_reading(first, features, tokens, 0.0)(features), features)
    assert indices.tolist() == list(range(20))
    assert levelled_spec(first.model).widths(first.model) == [32, 9 * 32]
    assert len(joined.describe_weights()["beside"]) == 2
    with pytest.raises(ValueError, match="of one backbone"):
        joined_features(joined, source, spec=FeatureSpec(tokens="patches"))

"""KoLeo, cosines and Gram matrices of features, as plain loops."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from dino_vit.method.feature_losses import (
    cosine_loss,
    gradient_loss,
    gradients_around,
    gram_loss,
    imitation_loss,
    koleo_loss,
    resize_patches,
)
from dino_vit.models.baselines import orientation_histograms


@pytest.mark.parametrize("kept", [None, [[0, 5], [3, 1]]])
def test_patches_predict_the_gradients_around_them(kept):
    """Of a grid of 2 × 3 patches of 4 × 8 pixels, as loops over patches and neighbours."""
    views = torch.rand(2, 3, 8, 24)
    cells = orientation_histograms(views, (4, 8))
    around = torch.zeros(2, 6, 81)
    for image, y, x in product(range(2), range(2), range(3)):
        values = []
        for orientation, dy, dx in product(range(9), (-1, 0, 1), (-1, 0, 1)):
            within = 0 <= y + dy < 2 and 0 <= x + dx < 3
            values.append(cells[image, orientation, y + dy, x + dx].item() if within else 0.0)
        clipped = [min(value / math.hypot(*values), 0.3) for value in values]
        around[image, 3 * y + x] = torch.tensor([value / math.hypot(*clipped) for value in clipped])
    assert_close(gradients_around(views, (2, 3)), around)

    patches = kept or [list(range(6))] * 2
    predicted = torch.randn(2, len(patches[0]), 81)
    cosines = []
    for image, row in enumerate(patches):
        for predicting, patch in zip(predicted[image], row, strict=True):
            expected = around[image, patch] - around.mean((0, 1))
            cosines.append(F.cosine_similarity(predicting, expected, dim=0))
    loss = gradient_loss(predicted, views, (2, 3), kept and torch.tensor(kept))
    assert_close(loss, 1 - torch.stack(cosines).mean())


@pytest.mark.parametrize(("views", "global_views"), [(2, 2), (5, 2), (3, 1)])
def test_each_global_view_is_compared_with_itself_and_each_local_one_with_all(views, global_views):
    images = 4
    student, teacher = torch.randn(views * images, 6), torch.randn(global_views * images, 6)
    expected = []
    for view in range(views):
        for image in range(images):
            ours = student[view * images + image]
            compared = [view] if view < global_views else range(global_views)
            theirs = [teacher[view * images + image] for view in compared]
            cosines = [F.cosine_similarity(ours, each, dim=0) for each in theirs]
            expected.append(torch.stack(cosines).mean())
    assert_close(
        imitation_loss(student, teacher, global_views=global_views), 1 - torch.stack(expected).mean()
    )
    assert_close(imitation_loss(teacher, 3 * teacher, global_views=global_views), torch.tensor(0.0))


def test_patches_are_compared_one_by_one():
    student, teacher = torch.randn(3, 5, 6), torch.randn(3, 5, 6)
    pairs = zip(student.flatten(0, 1), teacher.flatten(0, 1), strict=True)
    assert_close(
        cosine_loss(student, teacher),
        1 - torch.stack([F.cosine_similarity(a, b, dim=0) for a, b in pairs]).mean(),
    )


def test_the_gram_loss_is_that_of_a_loop_over_pairs_of_patches():
    student, teacher = torch.randn(3, 5, 4, dtype=torch.double), torch.randn(3, 5, 4, dtype=torch.double)
    student.requires_grad_()
    total = 0.0
    for image in range(3):
        for first in range(5):
            for second in range(5):
                ours = F.cosine_similarity(student[image, first], student[image, second], dim=0)
                theirs = F.cosine_similarity(teacher[image, first], teacher[image, second], dim=0)
                total = total + (ours - theirs) ** 2
    expected = total / (3 * 5 * 5)
    loss = gram_loss(student, teacher)
    assert_close(loss.double(), expected, atol=1e-6, rtol=1e-5)
    ours, exact = (torch.autograd.grad(value, student, retain_graph=True)[0] for value in (loss, expected))
    assert_close(ours, exact, atol=1e-6, rtol=1e-4)


def test_patches_are_resized_as_maps():
    patches = torch.randn(2, 4 * 6, 3)
    assert resize_patches(patches, (4, 6), (4, 6)) is patches
    smaller = resize_patches(patches, (4, 6), (2, 3))
    maps = F.interpolate(
        patches.reshape(2, 4, 6, 3).permute(0, 3, 1, 2), size=(2, 3), mode="bicubic", antialias=True
    )
    for y in range(2):
        for x in range(3):
            assert_close(smaller[:, 3 * y + x], maps[:, :, y, x])


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

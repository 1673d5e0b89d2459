"""The cosines of a student that imitates features, as plain loops."""

import pytest
import torch
from torch.testing import assert_close

from dino_vit.method.distillation import cosine_loss, imitation_loss


def cosine(a, b):
    return (a @ b) / (a.norm() * b.norm())


@pytest.mark.parametrize(("views", "global_views"), [(2, 2), (5, 2), (3, 1)])
def test_each_global_view_is_compared_with_itself_and_each_local_one_with_all(views, global_views):
    images = 4
    student, teacher = torch.randn(views * images, 6), torch.randn(global_views * images, 6)
    found = []
    for view in range(views):
        for image in range(images):
            ours = student[view * images + image]
            compared = [view] if view < global_views else range(global_views)
            cosines = [cosine(ours, teacher[one * images + image]) for one in compared]
            found.append(torch.stack(cosines).mean())
    assert_close(imitation_loss(student, teacher, global_views=global_views), 1 - torch.stack(found).mean())
    assert_close(imitation_loss(teacher, 3 * teacher, global_views=global_views), torch.tensor(0.0))


def test_patches_are_compared_one_by_one():
    student, teacher = torch.randn(3, 5, 6), torch.randn(3, 5, 6)
    pairs = zip(student.flatten(0, 1), teacher.flatten(0, 1), strict=True)
    assert_close(cosine_loss(student, teacher), 1 - torch.stack([cosine(a, b) for a, b in pairs]).mean())


def test_half_precision_is_lifted():
    student, teacher = torch.randn(4, 6), torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = imitation_loss(student.bfloat16(), teacher.bfloat16(), global_views=2)
    assert loss.dtype == torch.float32
    assert_close(loss, imitation_loss(student, teacher, global_views=2), atol=1e-2, rtol=1e-2)

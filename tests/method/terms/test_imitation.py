import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from dino_vit.method.terms.imitation import cosine_loss, imitation_loss, resize_patches


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

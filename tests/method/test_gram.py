import torch
import torch.nn.functional as F

from dino_vit.method.gram import gram_loss, resize_patches


def test_the_loss_is_that_of_a_loop_over_pairs_of_patches():
    student, teacher = torch.randn(3, 5, 4, dtype=torch.double), torch.randn(3, 5, 4, dtype=torch.double)
    student.requires_grad_()
    total = 0.0
    for image in range(3):
        for one in range(5):
            for other in range(5):
                ours = F.cosine_similarity(student[image, one], student[image, other], dim=0)
                theirs = F.cosine_similarity(teacher[image, one], teacher[image, other], dim=0)
                total = total + (ours - theirs) ** 2
    expected = total / (3 * 5 * 5)
    loss = gram_loss(student, teacher)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-5)
    found, exact = (torch.autograd.grad(one, student, retain_graph=True)[0] for one in (loss, expected))
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-4)


def test_the_length_of_a_patch_does_not_matter():
    student, teacher = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    scaled = student * torch.rand(2, 6, 1) * 9
    torch.testing.assert_close(gram_loss(scaled, teacher), gram_loss(student, teacher))
    assert gram_loss(student, 3 * student) < 1e-12


def test_patches_are_resized_as_maps():
    patches = torch.randn(2, 4 * 6, 3)
    assert resize_patches(patches, (4, 6), (4, 6)) is patches
    smaller = resize_patches(patches, (4, 6), (2, 3))
    maps = F.interpolate(
        patches.reshape(2, 4, 6, 3).permute(0, 3, 1, 2), size=(2, 3), mode="bicubic", antialias=True
    )
    for y in range(2):
        for x in range(3):
            torch.testing.assert_close(smaller[:, 3 * y + x], maps[:, :, y, x])

import torch
import torch.nn.functional as F
from torch.testing import assert_close

from dino_vit.method.terms.gram import gram_loss


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

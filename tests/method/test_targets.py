import math

import pytest
import torch
import torch.nn.functional as F

from dino_vit.method.cross_entropy import teacher_targets
from dino_vit.method.targets import CENTERS, Center, SinkhornCenter, sinkhorn_center
from tests.support.naive import as_logits


def test_the_center_is_the_same_in_one_or_many_pieces():
    whole, pieces = Center(prototypes=7), Center(prototypes=7)
    expected = torch.zeros(1, 7)
    for _ in range(3):
        logits = torch.randn(64, 7)
        whole(as_logits(logits), 0.04)
        whole.update()
        for piece in logits.split([16, 16, 30, 2]):
            torch.testing.assert_close(pieces.center, expected)  # the one from before the step
            pieces(as_logits(piece), 0.04)
        pieces.update()
        expected = expected * 0.9 + logits.mean(0) * 0.1
        torch.testing.assert_close(whole.center, expected)
        torch.testing.assert_close(pieces.center, expected)


def test_the_center_is_kept_from_what_is_not_finite():
    center = Center(prototypes=3)
    center(as_logits(torch.ones(4, 3)), 0.04)
    center.update()
    before = center.center.clone()
    center(as_logits(torch.tensor([[1.0, float("nan"), 1.0]])), 0.04)
    center.update()
    assert torch.equal(center.center, before)
    center(as_logits(torch.ones(4, 3)), 0.04)
    center.update()
    torch.testing.assert_close(center.center, before * 0.9 + 0.1)


def sinkhorn_knopp(logits, temperature, iterations):
    """The assignment as in DINOv2: rows and columns of a matrix (prototypes, rows) scaled in turn."""
    q = (logits.double() / temperature).exp().T
    q /= q.sum()
    for _ in range(iterations):
        for prototype in range(len(q)):
            q[prototype] /= q[prototype].sum() * len(q)
        for row in range(q.shape[1]):
            q[:, row] /= q[:, row].sum() * q.shape[1]
    return (q * q.shape[1]).T


@pytest.mark.parametrize("iterations", [1, 3, 30])
def test_targets_with_the_sinkhorn_center_are_the_assignment(iterations):
    logits = F.normalize(torch.randn(24, 8), dim=1) @ F.normalize(torch.randn(8, 11), dim=0)
    center = sinkhorn_center([logits], 0.04, iterations)
    expected = sinkhorn_knopp(logits, 0.04, iterations).float()
    torch.testing.assert_close(teacher_targets(logits, center, 0.04), expected, atol=1e-5, rtol=1e-4)
    targets = teacher_targets(100 * logits, sinkhorn_center([100 * logits], 0.01, iterations), 0.01)
    torch.testing.assert_close(targets.sum(1), torch.ones(24))  # the exponential of these overflows


def test_the_sinkhorn_center_is_of_the_pass_alone_and_the_last_finite_one_is_saved():
    center = SinkhornCenter(prototypes=5)
    first, second = torch.randn(4, 5), torch.randn(4, 5)
    center(as_logits(first), 0.04)
    center.update()
    now = center(as_logits(second), 0.04)
    assert torch.equal(now, sinkhorn_center([second], 0.04))
    assert torch.equal(center.state_dict()["center"], now)
    assert center(as_logits(second * math.nan), 0.04).isnan().all()
    assert torch.equal(center.center, now)


def test_the_sums_of_sinkhorn_ema_are_a_mean_over_batches_that_begins_with_the_first():
    center, batches = CENTERS["sinkhorn_ema"](prototypes=5), torch.randn(3, 4, 5)
    found = center(as_logits(batches[0]), 0.5)
    torch.testing.assert_close(found, sinkhorn_center([batches[0]], 0.5))
    for logits in batches[1:]:
        center.update()
        sums = 0.8 * (found / 0.5).exp() + 0.2 * (sinkhorn_center([logits], 0.5) / 0.5).exp()
        expected = 0.5 * (sums.log() - sums.log().mean())
        found = center(as_logits(logits), 0.5)
        torch.testing.assert_close(found, expected)
    assert center(as_logits(batches[0] * math.nan), 0.5).isnan().all()
    assert torch.equal(center.state_dict()["center"], found)


def test_with_sinkhorn_ema_a_target_depends_less_on_the_other_images_of_a_small_batch():
    image, others = torch.randn(1, 16), torch.randn(200, 3, 16)
    spread = {}
    for name in ("sinkhorn", "sinkhorn_ema"):
        center, targets = CENTERS[name](prototypes=16), []
        for logits in (torch.cat([image, rest]) for rest in others):
            targets.append(teacher_targets(logits, center(as_logits(logits), 1.0), 1.0)[0])
        spread[name] = float(torch.stack(targets[20:]).std(0).mean())
    # A mean with a momentum of 0.8 has a ninth of the variance.
    assert spread["sinkhorn_ema"] < spread["sinkhorn"] / 2

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from dino_vit.method import cross_entropy
from dino_vit.method.targets import target_statistics, target_sums
from dino_vit.method.terms.cls import dino_loss

TEMPERATURES = {"student_temperature": 0.1, "teacher_temperature": 0.04}
VIEWS = [(g, g + local) for g, local in product([1, 2, 3], [0, 1, 6]) if g + local > 1]


def make_batch(global_views, views, images=3, prototypes=40, dim=8, dtype=torch.float32):
    """Return student features, prototype weight, teacher logits and centre."""
    generator = torch.Generator().manual_seed(0)
    weight = F.normalize(torch.randn(prototypes, dim, generator=generator, dtype=dtype), dim=1)
    features = F.normalize(torch.randn(views * images, dim, generator=generator, dtype=dtype), dim=1)
    teacher = F.normalize(torch.randn(global_views * images, dim, generator=generator, dtype=dtype), dim=1)
    center = 0.1 * torch.randn(1, prototypes, generator=generator, dtype=dtype)
    return features.requires_grad_(), weight.requires_grad_(), teacher @ weight.detach().T, center


def double_loop(features, weight, teacher_logits, center, *, views, global_views):
    """The loss as it is written in the paper."""
    students = (features @ weight.T / TEMPERATURES["student_temperature"]).chunk(views)
    teachers = ((teacher_logits - center) / TEMPERATURES["teacher_temperature"]).chunk(global_views)
    total, pairs = 0.0, 0
    for g, teacher in enumerate(teachers):
        for v, student in enumerate(students):
            if v != g:
                total += -(F.softmax(teacher, dim=-1) * F.log_softmax(student, dim=-1)).sum(dim=-1).mean()
                pairs += 1
    return total / pairs


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("global_views", "views"), VIEWS)
@pytest.mark.parametrize("images_at_once", [1, 2, 3])
def test_value_and_gradients_are_those_of_the_double_loop(
    monkeypatch, global_views, views, images_at_once, compiled
):
    monkeypatch.setattr(
        cross_entropy, "compile_kernel", lambda function, **_: function
    )  # which takes seconds
    sizes = {"views": views, "global_views": global_views}
    chunks = {"chunk_bytes": 4 * views * 40 * images_at_once, "compiled": compiled}
    batch = make_batch(global_views, views)
    loss = dino_loss(*batch, **sizes, **TEMPERATURES, **chunks)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, double_loop(*batch, **sizes), rtol=1e-6, atol=1e-6)
    batch = make_batch(global_views, views, dtype=torch.float64)
    expected = torch.autograd.grad(3 * double_loop(*batch, **sizes), batch[:2])
    loss = dino_loss(*batch, **sizes, **TEMPERATURES, **chunks)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, batch[:2]), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("features_grad", "weight_grad"), [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed(features_grad, weight_grad):
    features, weight, teacher_logits, center = make_batch(2, 4)
    expected = torch.autograd.grad(
        double_loop(features, weight, teacher_logits, center, views=4, global_views=2), (features, weight)
    )
    features, weight = (
        tensor.detach().requires_grad_(needed)
        for tensor, needed in ((features, features_grad), (weight, weight_grad))
    )
    loss = dino_loss(features, weight, teacher_logits, center, views=4, global_views=2, **TEMPERATURES)
    assert loss.requires_grad == (features_grad or weight_grad)
    if loss.requires_grad:
        loss.backward()
    for tensor, gradient in zip((features, weight), expected, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, gradient)
        else:
            assert tensor.grad is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_autocast_is_as_close_as_its_dtype(dtype, tolerance):
    """With many prototypes almost every probability is below what float16 can hold unscaled."""
    sizes = {"views": 8, "global_views": 2}
    batch = make_batch(2, 8, images=4, prototypes=20000, dim=32)
    expected = double_loop(*batch, **sizes)
    gradients = torch.autograd.grad(expected, batch[:2])
    with torch.autocast("cpu", dtype):
        loss = dino_loss(*batch, **sizes, **TEMPERATURES)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for mine, exact in zip(torch.autograd.grad(1024 * loss, batch[:2]), gradients, strict=True):
        assert mine.dtype == torch.float32
        assert (mine / 1024 - exact).norm() < tolerance * exact.norm()


def test_float16_holds_a_collapsed_batch():
    """All rows agree on one prototype and the teacher on another: the largest gradient there can be."""
    features = torch.zeros(8 * 64, 16).index_fill_(1, torch.tensor(0), 1.0).requires_grad_()
    weight = torch.eye(16).requires_grad_()
    teacher_logits = torch.zeros(2 * 64, 16).index_fill_(1, torch.tensor(1), 1.0)
    with torch.autocast("cpu", torch.float16):
        loss = dino_loss(
            features, weight, teacher_logits, torch.zeros(1, 16), views=8, global_views=2, **TEMPERATURES
        )
    loss.backward()
    assert weight.grad[0, 0].item() == pytest.approx(10, rel=1e-2)
    assert weight.grad[1, 0].item() == pytest.approx(-10, rel=1e-2)


def test_statistics_take_the_loss_apart():
    batch = make_batch(2, 5, images=4)
    _, _, teacher_logits, center = batch
    loss = double_loop(*batch, views=5, global_views=2)
    statistics = target_statistics(target_sums(loss, [teacher_logits], center, teacher_temperature=0.04))
    targets = F.softmax((teacher_logits - center) / 0.04, dim=-1)
    mean = targets.mean(0)
    entropies = [-sum(p * math.log(p) for p in row if p > 0) for row in targets.tolist()]
    mean_entropy = -sum(p * math.log(p) for p in mean.tolist() if p > 0)
    assert all(value.ndim == 0 for value in statistics.values())
    assert statistics["output_entropy"].item() == pytest.approx(sum(entropies) / 8, rel=1e-5)
    assert statistics["mean_output_entropy"].item() == pytest.approx(mean_entropy, rel=1e-5)
    assert statistics["entropy_gap"].item() == pytest.approx(mean_entropy - sum(entropies) / 8, rel=1e-5)
    assert statistics["prototypes_in_use"].item() == len({row.index(max(row)) for row in targets.tolist()})
    assert statistics["student_divergence"].item() == pytest.approx(naive_divergence(batch, 5, 2), rel=1e-5)


def naive_divergence(batch, views, global_views):
    """KL(teacher || student), averaged over all pairs of different views and the images."""
    features, weight, teacher_logits, center = batch
    students = F.log_softmax(features @ weight.T / 0.1, dim=-1).chunk(views)
    teachers = F.softmax((teacher_logits - center) / 0.04, dim=-1).chunk(global_views)
    divergences = [
        F.kl_div(students[v], teachers[g], reduction="batchmean").item()
        for g, v in product(range(global_views), range(views))
        if g != v
    ]
    return sum(divergences) / len(divergences)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradients_of_many_chunks_are_summed_in_float32(dtype):
    """Equal numbers summed in bfloat16 stay at 256 of them: the mean of 600 would be less than half."""
    features, weight, teacher_logits, center = make_batch(2, 4, images=1)
    gradients = []
    for images in (1, 600):
        repeated = [rows.repeat_interleave(images, dim=0) for rows in (features, teacher_logits)]
        with torch.autocast("cpu", dtype):
            loss = dino_loss(
                repeated[0],
                weight,
                repeated[1],
                center,
                views=4,
                global_views=2,
                chunk_bytes=1,
                **TEMPERATURES,
            )
        gradients += torch.autograd.grad(loss, weight)
    # Each chunk gives the same product; 600 roundings in float32 are below 600 · 2⁻²⁴.
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=0.0)

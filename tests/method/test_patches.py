import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code

from dino_vit.method import cross_entropy
from dino_vit.method import loss as loss_module
from dino_vit.method.centering import Center, sinkhorn_center
from dino_vit.method.cross_entropy import LazyLogits, logits_of
from dino_vit.method.loss import loss_statistics, patch_loss, target_sums

TEMPERATURES = {"student_temperature": 0.1, "teacher_temperature": 0.04}
VIEW_INDICES = torch.tensor([0, 0, 0, 1, 2, 2])  # the view of each masked patch; a fourth view has none
VIEWS = 4


def units(generator, rows, dim=8, dtype=torch.float64):
    return F.normalize(torch.randn(rows, dim, generator=generator, dtype=dtype), dim=1)


def make_batch(prototypes=40, dtype=torch.float64):
    """Return student features, its prototypes, the teacher's logits, the centre and the weights."""
    generator = torch.Generator().manual_seed(0)
    features, weight = units(generator, 6, dtype=dtype), units(generator, prototypes, dtype=dtype)
    teacher = LazyLogits(units(generator, 6, dtype=dtype), units(generator, prototypes, dtype=dtype))
    center = 0.1 * torch.randn(1, prototypes, generator=generator, dtype=dtype)
    weights = (1 / VIEW_INDICES.bincount().to(dtype))[VIEW_INDICES]
    return features.requires_grad_(), weight.requires_grad_(), teacher, center, weights


def patch_by_patch(features, weight, teacher, center):
    """The loss as DINOv2's paper has it: a mean for each view, their sum divided by the number of views."""
    total = 0.0
    for view in range(VIEWS):
        own = [
            -(
                F.softmax((teacher.features[i] @ teacher.prototypes.T - center[0]) / 0.04, dim=0)
                * F.log_softmax(features[i] @ weight.T / 0.1, dim=0)
            ).sum()
            for i in range(len(features))
            if VIEW_INDICES[i] == view
        ]
        total += sum(own) / len(own) if own else 0.0
    return total / VIEWS


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows_at_once", [1, 2, 4, 6])
def test_value_and_gradients_are_those_of_the_loop(monkeypatch, rows_at_once, compiled):
    monkeypatch.setattr(loss_module, "_compiled", lambda function, **_: function)  # which takes seconds
    features, weight, teacher, center, weights = make_batch()
    expected = patch_by_patch(features, weight, teacher, center)
    gradients = torch.autograd.grad(3 * expected, (features, weight))
    loss = patch_loss(
        features,
        weight,
        teacher,
        center,
        weights,
        views=VIEWS,
        chunk_bytes=4 * 40 * rows_at_once,
        compiled=compiled,
        **TEMPERATURES,
    )
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    found = torch.autograd.grad(3 * loss, (features, weight))
    torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_autocast_is_as_close_as_its_dtype(dtype, tolerance):
    features, weight, teacher, center, weights = make_batch(prototypes=20000, dtype=torch.float32)
    expected = patch_by_patch(features, weight, teacher, center)
    gradients = torch.autograd.grad(expected, (features, weight))
    with torch.autocast("cpu", dtype):
        loss = patch_loss(features, weight, teacher, center, weights, views=VIEWS, **TEMPERATURES)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for mine, exact in zip(torch.autograd.grad(1024 * loss, (features, weight)), gradients, strict=True):
        assert (mine / 1024 - exact).norm() < tolerance * exact.norm()


def test_a_process_without_masked_patches_has_no_loss_and_zero_gradients():
    features, weight, teacher, center, weights = make_batch()
    teacher = LazyLogits(teacher.features[:0], teacher.prototypes)
    loss = patch_loss(features[:0], weight, teacher, center, weights[:0], views=VIEWS, **TEMPERATURES)
    assert loss == 0
    features_gradient, weight_gradient = torch.autograd.grad(loss, (features, weight))
    assert not features_gradient.any()
    assert not weight_gradient.any()


def test_lazy_logits_are_the_logits():
    generator = torch.Generator().manual_seed(0)
    features, prototypes = units(generator, 7), units(generator, 5)
    lazy, whole = LazyLogits(features, prototypes), logits_of(features, prototypes)
    assert [rows.stop - rows.start for rows in lazy.chunks(chunk_bytes=4 * 5 * 3)] == [3, 3, 3]
    torch.testing.assert_close(torch.cat([lazy[rows] for rows in lazy.chunks(60)]), whole)
    torch.testing.assert_close(lazy.sum(), whole.sum(0, keepdim=True))
    center, whole_center = Center(prototypes=5), Center(prototypes=5)
    lazy = LazyLogits(features.float(), prototypes.float())
    center(lazy, 0.04)
    computed = lazy.computed()
    whole_center(computed, 0.04)
    assert computed.prototypes.numel() == 0, "65,536 prototypes take 67 MB"
    torch.testing.assert_close(torch.cat(list(computed)), torch.cat(list(lazy)))
    rows, temperature = slice(2, 5), 0.1
    scores = (other.scores(rows, torch.ones(1, 5), temperature) for other in (computed, lazy))
    torch.testing.assert_close(*scores)
    center.update()
    whole_center.update()
    torch.testing.assert_close(center.center, whole_center.center)


def test_products_of_unit_vectors_in_half_precision_are_those_of_float32(monkeypatch):
    """On CUDA, whose product of halves gives float32; a CPU computes it from the same halves."""
    generator = torch.Generator().manual_seed(0)
    features, prototypes = units(generator, 64, dim=256), units(generator, 100, dim=256)
    monkeypatch.setattr(cross_entropy, "_matmul", lambda a, b, dtype: a.to(dtype) @ b.to(dtype))
    lazy = LazyLogits(features.half(), prototypes.half())
    whole, center = logits_of(features, prototypes).float(), torch.rand(1, 100)
    assert (lazy[:] - whole).abs().max() < 1e-4
    scores = lazy.scores(slice(3, 9), center, 0.04)
    torch.testing.assert_close(scores, (whole[3:9] - center) / 0.04, atol=2e-3, rtol=0)
    torch.testing.assert_close(lazy.sum(), whole.sum(0, keepdim=True), atol=1e-3, rtol=0)


def test_chunks_of_logits_are_balanced_and_measured_as_one():
    logits = torch.randn(9, 5)
    torch.testing.assert_close(sinkhorn_center(logits.split(4), 0.1), sinkhorn_center([logits], 0.1))
    center, loss = torch.randn(1, 5), torch.tensor(2.0)
    whole, parts, *halves = (
        target_sums(loss, chunks, center, teacher_temperature=0.1)
        for chunks in ([logits], logits.split(4), [logits[:4]], [logits[4:]])
    )
    torch.testing.assert_close(loss_statistics(parts), loss_statistics(whole))
    added = {name: halves[0][name] + halves[1][name] for name in whole}
    torch.testing.assert_close(loss_statistics(added, micro_batches=2), loss_statistics(whole))


def test_compiled_losses_have_one_graph_for_all_numbers_of_masked_patches(monkeypatch):
    """The first one is compiled as it is, the second for any number."""
    compile, counter = torch.compile, CompileCounter()
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, *, dynamic, **_: compile(function, dynamic=dynamic, backend=counter),
    )
    loss_module._compiled.cache_clear()
    torch._dynamo.reset()
    graphs = []
    for count in (6, 5, 4, 3, 2):
        features, weight, teacher, center, weights = make_batch(dtype=torch.float32)
        teacher = LazyLogits(teacher.features[:count], teacher.prototypes)
        given = features[:count], weight, teacher, center, weights[:count]
        patch_loss(*given, views=VIEWS, compiled=True, **TEMPERATURES)
        graphs.append(counter.frame_count)
    loss_module._compiled.cache_clear()
    assert graphs == [1, 2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_compiled_losses_are_those_of_the_plain_functions_in_one_kernel():
    """By Inductor's code for CPUs."""
    logits, teacher, center = torch.randn(10, 8, 256), torch.rand(2, 8, 256), torch.rand(1, 256)
    common = center, torch.full((), 25.0), 1.0, torch.bfloat16
    rows = logits[0], teacher[0], center, torch.rand(8, 1), *common[1:]
    for function, arguments in (
        (loss_module.pairs_loss_and_gradient, (logits, teacher, *common)),
        (loss_module.rows_loss_and_gradient, rows),
    ):
        out, code = run_and_get_code(loss_module._compiled(function), *arguments)
        for found, expected in zip(out, function(*arguments), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)  # of bfloat16
        assert sum(text.count("async_compile.cpp") for text in code) == 1

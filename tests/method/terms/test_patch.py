import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from dino_vit.method import cross_entropy
from dino_vit.method.cross_entropy import LazyLogits, compile_kernel
from dino_vit.method.objective import Seen
from dino_vit.method.targets import Center, Targets
from dino_vit.method.terms.patch import Patch
from tests.support.terms import sizes_of

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


def patch_loss(features, prototypes, teacher, center, weights, *, compiled=False):
    term = Patch(1.0, sizes_of(VIEWS, VIEWS), Center(prototypes=1), 0.1, "head")
    term.compiled = compiled
    views = torch.empty(VIEWS, 3, 32, 32)
    seen = Seen(images=1, views=views, original=views, weights=weights, teacher_temperature=0.04)
    outputs = {term.features: features, term.prototypes: prototypes}
    return term.loss(outputs, Targets(teacher, center, 0.04), seen)


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
    monkeypatch.setattr(
        cross_entropy, "compile_kernel", lambda function, **_: function
    )  # which takes seconds
    # A CPU takes twice as many bytes of patches.
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 2 * 40 * rows_at_once)
    features, weight, teacher, center, weights = make_batch()
    expected = patch_by_patch(features, weight, teacher, center)
    gradients = torch.autograd.grad(3 * expected, (features, weight))
    loss = patch_loss(features, weight, teacher, center, weights, compiled=compiled)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    found = torch.autograd.grad(3 * loss, (features, weight))
    torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_autocast_is_as_close_as_its_dtype(dtype, tolerance):
    features, weight, teacher, center, weights = make_batch(prototypes=20000, dtype=torch.float32)
    expected = patch_by_patch(features, weight, teacher, center)
    gradients = torch.autograd.grad(expected, (features, weight))
    with torch.autocast("cpu", dtype):
        loss = patch_loss(features, weight, teacher, center, weights)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for mine, exact in zip(torch.autograd.grad(1024 * loss, (features, weight)), gradients, strict=True):
        assert (mine / 1024 - exact).norm() < tolerance * exact.norm()


def test_a_process_without_masked_patches_has_no_loss_and_zero_gradients():
    features, weight, teacher, center, weights = make_batch()
    teacher = LazyLogits(teacher.features[:0], teacher.prototypes)
    loss = patch_loss(features[:0], weight, teacher, center, weights[:0])
    assert loss == 0
    features_gradient, weight_gradient = torch.autograd.grad(loss, (features, weight))
    assert not features_gradient.any()
    assert not weight_gradient.any()


def test_compiled_losses_have_one_graph_for_all_numbers_of_masked_patches(monkeypatch):
    """The first one is compiled as it is, the second for any number."""
    compile, counter = torch.compile, CompileCounter()
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, *, dynamic, **_: compile(function, dynamic=dynamic, backend=counter),
    )
    compile_kernel.cache_clear()
    torch._dynamo.reset()
    graphs = []
    for count in (6, 5, 4, 3, 2):
        features, weight, teacher, center, weights = make_batch(dtype=torch.float32)
        teacher = LazyLogits(teacher.features[:count], teacher.prototypes)
        given = features[:count], weight, teacher, center, weights[:count]
        patch_loss(*given, compiled=True)
        graphs.append(counter.frame_count)
    compile_kernel.cache_clear()
    assert graphs == [1, 2, 2, 2, 2]

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from dino_vit.method import cross_entropy
from dino_vit.method.cross_entropy import LazyLogits, compile_kernel, logits_of, teacher_targets
from dino_vit.method.targets import Center, Targets, sinkhorn_center
from dino_vit.method.terms.cls import pairs_loss_and_gradient
from dino_vit.method.terms.edges import edges_around
from dino_vit.method.terms.patch import rows_loss_and_gradient
from tests.support.terms import cls_term


def units(generator, rows, dim=8, dtype=torch.float64):
    return F.normalize(torch.randn(rows, dim, generator=generator, dtype=dtype), dim=1)


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
    term = cls_term()
    whole, parts, *halves = (
        term.sums(loss, Targets(chunks, center, 0.1))
        for chunks in ([logits], logits.split(4), [logits[:4]], [logits[4:]])
    )
    torch.testing.assert_close(term.figures(parts, 1), term.figures(whole, 1))
    added = {name: halves[0][name] + halves[1][name] for name in whole}
    torch.testing.assert_close(term.figures(added, 2), term.figures(whole, 1))


def test_teacher_targets_are_centred_and_sharpened_in_float32():
    logits, center = torch.randn(6, 40), 0.1 * torch.randn(1, 40)
    targets = teacher_targets(logits.bfloat16(), center, 0.04)
    assert targets.dtype == torch.float32
    exponentials = ((logits.bfloat16().float() - center) / 0.04).exp()
    torch.testing.assert_close(targets, exponentials / exponentials.sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_under_autocast(dtype):
    """Divided by a teacher temperature of 0.04, a logit near 1 that bfloat16 rounds is off by up to 0.05."""
    features, prototypes = (F.normalize(torch.randn(rows, 64, dtype=torch.float64)) for rows in (5, 300))
    prototypes[0] = features[0]  # a logit of 1
    with torch.autocast("cpu", dtype):
        logits = logits_of(features.float(), prototypes.float())
    torch.testing.assert_close(logits.double() / 0.04, features @ prototypes.T / 0.04, rtol=0, atol=1e-4)
    assert logits.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_compiled_functions_are_the_plain_ones_in_one_kernel():
    """By Inductor's code for CPUs."""
    logits, teacher, center = torch.randn(10, 8, 256), torch.rand(2, 8, 256), torch.rand(1, 256)
    temperature, common = torch.full((), 0.04), (1.0, torch.bfloat16)
    rows = logits[0], teacher[0], torch.rand(8, 1), common[0], (center, temperature), common[1]
    for function, arguments in (
        (pairs_loss_and_gradient, (logits, teacher, center, temperature, *common)),
        (rows_loss_and_gradient, rows),
    ):
        out, code = run_and_get_code(compile_kernel(function), *arguments)
        for found, expected in zip(out, function(*arguments), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)  # of bfloat16
        assert sum(text.count("async_compile.cpp") for text in code) == 1
    views = torch.rand(2, 3, 32, 32)
    around = compile_kernel(edges_around)(views, (4, 4))
    torch.testing.assert_close(around, edges_around(views, (4, 4)), rtol=1e-4, atol=1e-5)

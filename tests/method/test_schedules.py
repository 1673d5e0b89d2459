import numpy as np
import pytest

from dino_vit.method.optim import warmup_constant, warmup_cosine


@pytest.mark.parametrize(
    ("base", "final", "total", "warmup"),
    [(5e-4, 1e-6, 50, 10), (0.04, 0.4, 37, 0), (0.996, 1.0, 20, 1), (1.0, 0.0, 8, 8)],
)
def test_warmup_cosine_is_the_array_of_the_reference(base, final, total, warmup):
    steps = np.arange(total - warmup)
    cosine = final + 0.5 * (base - final) * (1 + np.cos(np.pi * steps / max(len(steps), 1)))
    expected = np.concatenate([np.linspace(0.0, base, warmup), cosine, [final] * 3])  # which it keeps
    schedule = {"base": base, "final": final, "total": total, "warmup": warmup}
    values = [warmup_cosine(step, **schedule) for step in range(total + 3)]
    np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_warmup_constant_is_the_array_of_the_reference(warmup):
    expected = np.concatenate([np.linspace(0.04, 0.07, warmup), np.full(12 - warmup, 0.07)])
    values = [warmup_constant(epoch, start=0.04, final=0.07, warmup=warmup) for epoch in range(12)]
    np.testing.assert_allclose(values, expected, rtol=1e-12)

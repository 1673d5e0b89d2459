import pytest
import torch
import torch.nn.functional as F

from dino_vit.method.cross_entropy import logits_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_under_autocast(dtype):
    """Divided by a teacher temperature of 0.04, a logit near 1 that bfloat16 rounds is off by up to 0.05."""
    features, prototypes = (F.normalize(torch.randn(rows, 64, dtype=torch.float64)) for rows in (5, 300))
    prototypes[0] = features[0]  # a logit of 1
    with torch.autocast("cpu", dtype):
        logits = logits_of(features.float(), prototypes.float())
    torch.testing.assert_close(logits.double() / 0.04, features @ prototypes.T / 0.04, rtol=0, atol=1e-4)
    assert logits.dtype == torch.float32

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dino_vit.eval.finetuning import FinetuneConfig, build_model, mix


@pytest.mark.parametrize(
    ("arch", "given", "size"), [("vit_huge", None, 14), ("vit_base", None, 16), ("vit_base", 8, 8)]
)
def test_patch_size_is_that_of_the_arch_unless_given(arch, given, size):
    config = FinetuneConfig(source="photos", arch=arch, patch_size=given)
    with torch.device("meta"):
        assert build_model(config, classes=2).patch_size == (size, size)


def test_mixup_blends_pairs_by_one_share():
    images, targets = torch.randn(6, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    mixed, shares = mix(images, targets, classes=3, alpha=0.4, seed=5)
    kept = np.random.Generator(np.random.PCG64(5)).beta(0.4, 0.4)
    for index in range(6):
        other = 5 - index
        torch.testing.assert_close(mixed[index], kept * images[index] + (1 - kept) * images[other])
        expected = torch.zeros(3)
        expected[targets[index]] += kept
        expected[targets[other]] += 1 - kept
        torch.testing.assert_close(shares[index], expected)
    plain, shares = mix(images, targets, classes=3, alpha=0, seed=5)
    assert plain is images
    assert torch.equal(shares, F.one_hot(targets, 3).float())

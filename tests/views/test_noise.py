"""Noise from words that are the same on every device, against bytes that are added up one by one."""

import math

import numpy as np
import pytest
import torch

from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.views.noise import noise_like, random_words

KEYS = (0, 1, 2**24 - 1, 2**24, 0x9E3779B97F4A, 2**48 - 1)


def test_words_are_those_of_random_bits():
    words = random_words(torch.tensor(KEYS), 1001).numpy().view(np.uint64)
    for key, of_key in zip(KEYS, words, strict=True):
        assert (of_key == random_bits(key, RngPurpose.NOISE, np.arange(1001))).all()


@pytest.mark.parametrize("shape", [(1, 4, 6), (3, 5, 7)])
def test_noise_equals_the_sum_of_four_bytes_for_each_value(shape):
    size = math.prod(shape)
    found = noise_like(torch.empty(len(KEYS), *shape), torch.tensor(KEYS))
    for key, of_key in zip(KEYS, found.flatten(1).tolist(), strict=True):
        words = random_bits(key, RngPurpose.NOISE, np.arange((size + 1) // 2)).tolist()
        halves = [word & 0xFFFFFFFF for word in words] + [word >> 32 for word in words]
        for half, value in zip(halves, of_key, strict=False):
            total = sum(half >> 8 * byte & 0xFF for byte in range(4))
            assert value == pytest.approx((total - 510) / math.sqrt((256**2 - 1) / 3), rel=1e-6)


def test_noise_has_the_moments_of_a_sum_of_four():
    noise = noise_like(torch.empty(8, 3, 128, 128), torch.arange(8)).double()
    count = noise.numel()
    assert abs(noise.mean()) < 3.3 / math.sqrt(count)
    assert abs(noise.var() - 1) < 3.3 * math.sqrt(1.7 / count)  # kurtosis less 1
    assert abs((noise**3).mean()) < 3.3 * math.sqrt(15 / count)
    assert (noise**4).mean() == pytest.approx(3 - 6 / 5 / 4, abs=0.02)
    assert 3.2 < noise.abs().max() < 3.5
    neighbours = torch.stack([noise[..., 1:].flatten(), noise[..., :-1].flatten()])
    assert abs(torch.corrcoef(neighbours)[0, 1]) < 3.3 / math.sqrt(count)

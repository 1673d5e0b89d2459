import numpy as np

from dino_vit.core.randomness import RngPurpose, derive_seed, random_bits, random_uniform

MASK = 2**64 - 1


def naive_bits(seed, *keys):
    """SplitMix64 in Python integers: the state after each key seeds the next."""

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    state = mix(seed & MASK)
    for key in keys:
        state = mix((state + (key + 1) * 0x9E3779B97F4A7C15) & MASK)
    return state


def test_bits_equal_the_formula_in_python_integers():
    keys = np.arange(5)[:, None], np.arange(1_000_000_000_000, 1_000_000_000_003)
    bits = random_bits(2**63 + 11, RngPurpose.BOXES, 3, *keys)
    for i in range(5):
        for j in range(3):
            assert int(bits[i, j]) == naive_bits(2**63 + 11, RngPurpose.BOXES, 3, i, 1_000_000_000_000 + j)
    assert derive_seed(-5, RngPurpose.NETWORK, 7, 1) == naive_bits(-5, RngPurpose.NETWORK, 7, 1)


def test_numbers_are_those_of_yesterday():
    """A run must go on with the same images after an upgrade: these constants may never change."""
    assert derive_seed(0, RngPurpose.NETWORK, 1, 2) == 2923413797618592599
    assert random_uniform(0, RngPurpose.ORDER, 0).tolist() == [0.27623358227789463]

"""Noise for images on any device: each value is a function of the image's key and the pixel.

The random words are those of `core.randomness.random_bits`, computed in signed 64-bit integers, because torch
has no arithmetic on unsigned ones. n images, c channels, h height, w width
"""

import math

import torch
from einops import rearrange
from torch import Tensor

from dino_vit.core.randomness import RngPurpose


def _signed(word: int) -> int:
    """Return the signed integer with the 64 bits of a word; products and sums wrap around alike."""
    return (word + 2**63) % 2**64 - 2**63


# The constants of SplitMix64.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_STREAM = _signed((RngPurpose.NOISE + 1) * 0x9E3779B97F4A7C15)
# Mean and standard deviation of the sum of four uniform bytes.
_MEAN = 4 * 255 / 2
_STD = math.sqrt(4 * (256**2 - 1) / 12)


def noise_like(x: Tensor, keys: Tensor) -> Tensor:
    """Return noise of mean 0 and variance 1 for images (n, c, h, w), by their keys (n,).

    A value is the sum of four random bytes: close to normal, never beyond 3.5, the same bits everywhere.
    """
    size = x[0].numel()
    sums = _sums_of_bytes(random_words(keys, (size + 1) // 2))
    # Each word of 64 bits gives two values, from its low and its high half.
    total = torch.cat([(sums & 0xFFFFFFFF).float(), (sums >> 32).float()], dim=1)[:, :size]
    return total.sub_(_MEAN).mul_(1 / _STD).reshape(x.shape)


def random_words(keys: Tensor, count: int) -> Tensor:
    """Return `random_bits(key, RngPurpose.NOISE, np.arange(count))` for each key, as int64 (n, count)."""
    state = _mix_(_mix_(keys.clone()) + _STREAM)
    steps = torch.arange(1, count + 1, device=keys.device) * _GAMMA
    return _mix_(rearrange(state, "n -> n 1") + steps)


def _mix_(state: Tensor) -> Tensor:
    state.bitwise_xor_(_shifted(state, 30)).mul_(_FIRST)
    state.bitwise_xor_(_shifted(state, 27)).mul_(_SECOND)
    return state.bitwise_xor_(_shifted(state, 31))


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; >> alone would fill with the sign."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _sums_of_bytes(words: Tensor) -> Tensor:
    """Add the four bytes of each half of a word, all halves at once: two sums per word."""
    # First neighbouring bytes, then neighbouring pairs; the masks leave room for the carry.
    pairs = (words & 0x00FF00FF00FF00FF).add_((words >> 8).bitwise_and_(0x00FF00FF00FF00FF))
    return (pairs & 0x0000FFFF0000FFFF).add_((pairs >> 16).bitwise_and_(0x0000FFFF0000FFFF))

import numpy as np
import pytest

from dino_vit.data.sources.source import spread


@pytest.mark.parametrize(("length", "count"), [(1, 5), (7, 7), (1000, 6), (20_000, 12)])
def test_spread_indices_are_different_and_from_all_over(length, count):
    indices = spread(length, count)
    assert len(set(indices)) == len(indices) <= min(length, count)
    assert len(indices) == length or count < length
    assert all(0 <= index < length for index in indices)
    if length >= 1000:
        assert max(np.diff([0, *indices, length])) < 2.7 * length / count
        assert len({index % 10 for index in indices}) > count // 2

"""Compare what two ways of computing the same tensors give."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.testing import assert_close


def assert_close_to_scale(found: Any, expected: Any, relative: float = 2e-5) -> None:
    """Compare tensors, or those of sequences and mappings, relative to the largest value of each.

    Rounding is relative to the terms of a sum, not to the sum: what nearly cancels is off by as much as its
    neighbours, and by how much depends on the order in which a CPU adds. So neither a tolerance relative to
    each element nor an absolute one holds on every machine.
    """
    if isinstance(expected, Tensor):
        scale = expected.detach().abs().max().item() if expected.numel() else 0.0
        assert_close(found, expected, rtol=0, atol=relative * scale)
        return
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        found, expected = [found[key] for key in expected], expected.values()
    for one, other in zip(found, expected, strict=True):
        assert_close_to_scale(one, other, relative)

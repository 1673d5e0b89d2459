"""Work for a fresh process, in a module of its own, so that this process imports nothing but torch."""

from collections.abc import Callable

import torch


def build_allocation(mebibytes: int) -> Callable[[], object]:
    torch.ones(4 * mebibytes * 2**18)  # a larger peak before the work, which must not count
    return lambda: torch.ones(mebibytes * 2**18).sum()

"""The one place of the library that knows about a process group; without one it does nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if _in_group() else 1


def rank() -> int:
    """Return the number of this process among all of them, 0 without a process group."""
    return dist.get_rank() if _in_group() else 0


def is_main_process() -> bool:
    """Tell whether this is rank 0, the process that prints and writes."""
    return rank() == 0


def share(items: Sequence[T]) -> Sequence[T]:
    """Return this process's contiguous part of some items; `all_gather` restores their order."""
    first, last = (len(items) * part // world_size() for part in (rank(), rank() + 1))
    return items[first:last]


def all_reduce_mean(tensor: Tensor) -> Tensor:
    """Return the mean of a floating-point tensor over all processes; the tensor itself is never written to.

    A single process gets the very tensor back. Carries no gradient.
    """
    if world_size() == 1:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)  # a sum: gloo has no mean
    return total / world_size()


def all_gather(tensor: Tensor) -> Tensor:
    """Return the rows of all processes in the order of their ranks; each may have another number of rows.

    A single process gets the very tensor back. Carries no gradient.
    """
    if world_size() == 1:
        return tensor
    mine = torch.tensor([len(tensor)], device=tensor.device)
    lengths = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(lengths, mine)
    counts = [int(length) for length in lengths]
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor.detach()
    rows = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(rows, padded)
    return torch.cat([part[:count] for part, count in zip(rows, counts, strict=True)])


def any_process(flag: bool) -> bool:
    """Tell whether the flag is set in any process, without waiting for an accelerator."""
    if world_size() == 1:
        return flag
    flags = torch.tensor([int(flag)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=_host_group())
    return bool(flags.item())


def all_equal(number: int) -> bool:
    """Tell whether all processes pass the same number, without waiting for an accelerator."""
    if world_size() == 1:
        return True
    extremes = torch.tensor([number, -number])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=_host_group())
    return bool(extremes.sum() == 0)


@contextmanager
def all_or_none() -> Iterator[None]:
    """Let what fails in one process fail in all at the end of the block, rather than leave them waiting."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if any_process(failure is not None):
        raise failure or ValueError("another process failed; see what it said")


@cache
def _host_group() -> dist.ProcessGroup:
    """Return a group for tensors on the host; all processes make it at the same call."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group

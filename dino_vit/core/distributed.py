"""Tensors on devices and processes: collectives do nothing without a process group.

No other module uses torch.distributed.
"""

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dino_vit.core.process import portable
from dino_vit.core.text import brief

Items = TypeVar("Items", bound=Sequence[Any])
T = TypeVar("T")
_shares_work = ContextVar("_shares_work", default=False)
CONNECT = timedelta(minutes=2)  # for gloo, beside NCCL
_RAISED = "in_all_processes"  # marks an error that all processes raise
# For collectives until `limit_waits`: each host sets up at its own pace.
SETUP_TIMEOUT = timedelta(minutes=30)


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def end_processes() -> None:
    """Destroy the process group, if there is one, and the one for tensors on the CPU with it."""
    if world_size() > 1:
        _hosts.cache_clear()
        dist.destroy_process_group()


def limit_waits(limit: timedelta) -> None:
    """Have collectives fail from now on when another process has not answered for so long."""
    if world_size() == 1:
        return
    if (group := _hosts()) is not None:
        # NCCL kills its process. The group of hosts, for which all steps wait, raises an error: it is first.
        _set_timeout(limit, group)
        limit += timedelta(minutes=1)
    _set_timeout(limit, dist.group.WORLD)


def _set_timeout(limit: timedelta, group: dist.ProcessGroup | None) -> None:
    # torch.distributed.set_timeout came after torch 2.10.
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(limit, group)


def is_main_process() -> bool:
    """Return whether this is rank 0, the process that prints and writes."""
    return rank() == 0


@contextmanager
def in_all_processes() -> Iterator[None]:
    """Let `from_rank_0` and `share_work` divide work in this block, which all processes must enter."""
    token = _shares_work.set(world_size() > 1)
    try:
        yield
    finally:
        _shares_work.reset(token)


def from_rank_0(work: Callable[[], T]) -> T:
    """Return what `work` returns on rank 0, or raise its error, in all processes of `in_all_processes`."""
    return share_work(lambda mine: [work() for number in mine if number == 0], range(world_size()))[0]


def share_work(work: Callable[[Sequence[Any]], Sequence[T]], items: Sequence[Any]) -> list[T]:
    """Return `work(items)`, to which each process of `in_all_processes` contributes its part."""
    if not _shares_work.get():
        return list(work(items))
    parts = _gathered("files", lambda: list(work(rank_slice(items))))
    return [result for part in parts for result in part]


def agree(what: str, work: Callable[[], T], describe: Callable[[T], str]) -> T:
    """Return what `work` returns; if it fails in one process, or they see different things, all raise that.

    `describe` says what a process sees, in a text that differs where the work of all would.
    """
    if world_size() == 1:
        return work()
    results = list[T]()

    def view() -> tuple[str, str]:
        results.append(work())
        return socket.gethostname(), describe(results[0])

    views = _gathered(what, view)
    ranks: dict[str, list[str]] = {}
    for number, (host, seen) in enumerate(views):
        ranks.setdefault(seen, []).append(f"rank {number} on {host}")
    if len(ranks) > 1:
        texts = (f"{brief(', '.join(names), 200)}: {seen}" for seen, names in ranks.items())
        raise ValueError(f"the processes see different {what}. {'; '.join(texts)}")
    return results[0]


def _gathered(what: str, work: Callable[[], T]) -> list[T]:
    """Return what `work` returns in each process, or raise the first error of any in all of them."""
    outcome: tuple[str, T | None, Exception | None]
    try:
        outcome = what, work(), None
    except Exception as error:
        if hasattr(error, _RAISED):
            raise
        outcome = what, None, portable(error)
    outcomes: list[Any] = [None] * world_size()
    dist.all_gather_object(outcomes, outcome, group=_hosts())
    first = next((failure for *_, failure in outcomes if failure is not None), None)
    # One sees a folder where another sees an archive.
    if first is None and any(other != what for other, *_ in outcomes):
        first = ValueError(f"the processes see different {what}: let all of them see the same files")
    if first is not None:
        vars(first)[_RAISED] = True
        raise first
    return [result for _, result, _ in outcomes]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; the host does not wait."""
    # CUDA copies in the background only from pinned memory.
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def wait_for_device(device: torch.device) -> None:
    """Wait until an accelerator has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def rank_slice(items: Items) -> Items:
    """Return this rank's contiguous part of some items; `all_gather` restores their order."""
    first, last = (len(items) * part // world_size() for part in (rank(), rank() + 1))
    return items[first:last]  # type: ignore[return-value]  # a slice is of the same type


def all_reduce_mean(tensor: Tensor) -> Tensor:
    """Return the mean over all processes, without gradient; a single process gets the same tensor back."""
    if world_size() == 1:
        return tensor
    return all_reduce_sum(tensor) / world_size()  # gloo has no mean


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Return the sum over all processes, without gradient."""
    if world_size() == 1:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def all_reduce_logsumexp(tensor: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials over all processes, without gradient."""
    if world_size() == 1:
        return tensor
    largest = tensor.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    total = (tensor.detach() - largest).exp()
    dist.all_reduce(total)
    return total.log() + largest


def all_gather_equal(tensor: Tensor) -> Tensor:
    """Concatenate the rows of all processes by rank, without gradient; each has as many. Nothing waits."""
    if world_size() == 1:
        return tensor
    mine = tensor.detach().contiguous()
    rows = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(rows, mine, group=_hosts() if tensor.is_cpu else None)  # NCCL takes no tensors of the CPU
    return torch.cat(rows)


def all_gather(tensor: Tensor) -> Tensor:
    """Concatenate the rows of all processes by rank, without gradient; their numbers of rows may differ."""
    if world_size() == 1:
        return tensor
    counts = all_gather_equal(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    # NCCL and gloo gather tensors of one shape only.
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor.detach()
    parts = all_gather_equal(padded).view(len(counts), *padded.shape)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def any_process(flag: bool) -> bool:
    """Return whether the flag is set in any process, without a device synchronisation."""
    flags = torch.tensor([int(flag)])
    if world_size() > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=_hosts())
    return bool(flags.item())


class DelayedVote:
    """All-reduce a flag, with the time of rank 0; each call returns the result of the call before.

    So no host waits for others. In a single process it returns what it is given.
    """

    def __init__(self) -> None:
        self._votes = torch.zeros(2, dtype=torch.int64)
        self._counting: dist.Work | None = None

    def __call__(self, flag: bool, seconds: float = 0.0) -> tuple[bool, float]:
        """Start to reduce the flag; return whether any process had it set in the last call, and the time."""
        if world_size() == 1:
            return flag, seconds
        decided = self.result()
        microseconds = round(1e6 * seconds) if rank() == 0 else 0  # the largest is that of rank 0
        self._votes = torch.tensor([int(flag), microseconds])
        self._counting = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=_hosts(), async_op=True)
        return decided

    def result(self) -> tuple[bool, float]:
        """Wait for the last call's flags; return whether any was set, and the time of rank 0."""
        if self._counting is None:
            return False, 0.0
        self._counting.wait()
        self._counting = None
        flag, microseconds = self._votes.tolist()
        return bool(flag), microseconds / 1e6


def broadcast_int(number: int) -> int:
    """Return what rank 0 passes, in all processes, without waiting for an accelerator."""
    if world_size() == 1:
        return number
    shared = torch.tensor([number])
    dist.broadcast(shared, src=0, group=_hosts())
    return int(shared.item())


def apply_fsdp(
    network: nn.Module,
    parts: Iterable[nn.Module],
    methods: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give each process a part of a network's parameters (FSDP2).

    They are gathered for a call of the network's `forward` or of one of its `methods`: those of a part, cast
    to a dtype, while it is in use, the others from beginning to end. Gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = init_device_mesh(device.type, (world_size(),))
    # Those of a student are needed again in the backward pass, right after the forward pass.
    learns = any(parameter.requires_grad for parameter in network.parameters())
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    sharded: list[FSDPModule] = [fully_shard(part, mesh=mesh, mp_policy=policy) for part in parts]
    for part, following in pairwise(sharded):  # gathered while the part before computes
        part.set_modules_to_forward_prefetch([following])
    fully_shard(network, mesh=mesh, reshard_after_forward=not learns)
    for name in methods:
        register_fsdp_forward_method(network, name)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of one that FSDP may have sharded; all processes must make the call."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that FSDP may have sharded; it shares the memory."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


@torch.no_grad()
def copy_from_rank_0(target: Tensor, source: Tensor) -> None:
    """Copy a full tensor of rank 0 into one of each process, which FSDP may have sharded."""
    if world_size() > 1:
        is_sharded = hasattr(target, "full_tensor")
        on_hosts = target.is_cpu and not is_sharded  # NCCL takes no tensors of the CPU
        device = target.device
        full = source.contiguous().to(device) if rank() == 0 else torch.empty_like(source, device=device)
        if is_sharded:
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(target, DTensor)
            source = distribute_tensor(full, target.device_mesh, target.placements)
        else:
            dist.broadcast(full, src=0, group=_hosts() if on_hosts else None)
            source = full
    target.copy_(source)


def lost_process(error: BaseException) -> bool:
    """Return whether a collective failed because another process has ended or does not answer."""
    from_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    together = max(world_size(), int(os.environ.get("WORLD_SIZE", "1"))) > 1  # not joined yet, or joined
    return together and (from_gloo or isinstance(error, dist.DistError))


def unanswered(error: BaseException) -> bool:
    """Return whether a collective failed because another process does not answer within the limit."""
    return lost_process(error) and re.search("timed? ?out", str(error).lower()) is not None


@cache
def _hosts() -> dist.ProcessGroup | None:
    """Return the group by which hosts agree without the GPUs; all processes make the first call.

    It is one of gloo beside NCCL's, whose collectives would wait for the GPUs.
    """
    if dist.get_backend() == "gloo":
        return None
    # Wait for all hosts, which then have the same time to connect.
    dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())))
    try:
        group = dist.new_group(backend="gloo", timeout=CONNECT)
    except RuntimeError as error:
        advice = "set GLOO_SOCKET_IFNAME to the network interface between them"
        raise ValueError(f"the hosts cannot connect by gloo: {advice}") from error
    assert isinstance(group, dist.ProcessGroup)
    _set_timeout(SETUP_TIMEOUT, group)
    return group

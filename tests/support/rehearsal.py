"""Run code as on a GPU where there is none: everything but the arithmetic.

PyTorch's fake tensors have a device, a shape and a dtype, and no values. Under a `Rehearsal` those of "cuda"
go through the code that a GPU would run; tensors on the host stay real. It

- raises `HostWaits` where a GPU would make the host wait: a value is read, a shape depends on values, or a
  copy from the host is not `non_blocking`, not from pinned memory (which is marked, not pinned, here), or
  converts what it copies;
- raises `MixedDevices` where an operator would get tensors of both, or a generator of the host;
- raises `NotOnGpu` for an operator that CUDA lacks, or lacks for integers;
- counts kernels, as `Kernels` does.

PyTorch's engine for gradients needs a real device, so `backward` stands in for it. Several processes are
rehearsed as one of them, whose collectives do nothing. What is compiled, what one stream has to wait for in
another, and the memory that a kernel takes for itself are not rehearsed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed._tools import fake_collectives  # noqa: F401  # of torch 2.10
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.distributed import end_processes, world_size
from dino_vit.training.pretrain import set_up
from dino_vit.training.state import TrainingState
from tests.support.gradients import engine
from tests.support.kernels import Kernels

CUDA = torch.device("cuda:0")
_aten = torch.ops.aten
# What waits for the GPU to say whether it succeeded; fake tensors do not.
_CHECKED = {
    _aten._linalg_check_errors.default,
    _aten._linalg_eigh.default,
    _aten._linalg_svd.default,
    _aten.multinomial.default,
}
_FLOATS_ONLY = {_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default}


class HostWaits(RuntimeError):
    """A GPU would make the host wait."""


class MixedDevices(RuntimeError):
    """An operator got tensors of the host and of the GPU."""


class NotOnGpu(RuntimeError):
    """CUDA lacks the operator."""


class Stream:
    """Stand in for a stream or an event of CUDA: whatever is asked of it is done."""

    device = CUDA
    stream_id, device_index, device_type = 0, 0, 1

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def __getattr__(self, _: str) -> Callable[..., Stream]:
        return lambda *_, **__: self


OF_CUDA: dict[str, Any] = {
    "Stream": Stream,
    "Event": Stream,
    "current_stream": Stream,
    "stream": lambda _: nullcontext(),
    "current_device": lambda: 0,
    "set_device": lambda _: None,
    "get_device_capability": lambda *_: (9, 0),
}


class Rehearsal(Kernels):  # type: ignore[no-untyped-call]
    """Run what computes on "cuda" with fake tensors, count it, and raise where the host would wait.

    With `answers` the host may read: it is told ones, and that every condition is met; `waits` counts that.
    """

    def __init__(self, *, answers: bool = False) -> None:
        super().__init__()
        self.answers, self.waits = answers, Counter[str]()
        self._stack = ExitStack()

    def __enter__(self) -> Rehearsal:
        with ExitStack() as stack:
            # What is asked of a device before it is used.
            stack.enter_context(patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
            stack.enter_context(patch("torch.cuda.is_bf16_supported", lambda **_: True))
            stack.enter_context(patch("torch.accelerator.is_available", lambda: True))  # the DataLoader pins
            stack.enter_context(patch("torch.Tensor.pin_memory", _pinned))
            stack.enter_context(patch("torch.Tensor.is_pinned", _is_pinned))
            stack.enter_context(patch("torch.nn.functional.scaled_dot_product_attention", _attention))
            for name, stand_in in OF_CUDA.items():
                stack.enter_context(patch(f"torch.cuda.{name}", stand_in))
            stack.enter_context(patch("torch.accelerator.current_stream", Stream))
            stack.enter_context(engine())
            stack.enter_context(FakeTensorMode())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if DTensor in types:  # it comes again, as the operators on the tensors of this process
            return NotImplemented
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        of_host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        into_host = torch.device(kwargs.get("device") or "cuda").type != "cuda"
        if len(of_host) == len(tensors) and (into_host or "device" not in kwargs):
            pins = kwargs.pop("pin_memory", False)
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
            return _mark_pinned(out) if pins else out
        if into_host or (func is _aten.copy_.default and not isinstance(args[0], FakeTensor)):
            return self._of_host(func, args, kwargs)
        self._check(func, args, kwargs, of_host)
        args, kwargs = tree_map_only(Tensor, _faked, (args, kwargs))
        try:
            out = None if func is _aten._fused_sgd_.default else func(*args, **kwargs)  # fake tensors lack it
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._answer(func, args)
        self.record(func, args)
        return out

    def _of_host(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator makes on the host of a tensor on the GPU."""
        source: Tensor = args[0]
        if func is _aten.empty_like.default:
            with unset_fake_temporarily():
                out = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
                return _mark_pinned(out) if kwargs.get("pin_memory") else out
        if func is not _aten.copy_.default:
            return self._answer(func, args)
        target, source = args[:2]
        if not _in_background(args, kwargs, target=target, source=source):
            self._wait(func)
        with unset_fake_temporarily():
            return target.fill_(1)

    def _check(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], of_host: Sequence[Tensor]
    ) -> None:
        """Check that the GPU is given none of the host's tensors, but by copies that nothing waits for."""
        if func in (_aten._to_copy.default, _aten.copy_.default):
            source = args[func is _aten.copy_.default]
            if of_host and not _in_background(args, kwargs, target=args[0], source=source):
                self._wait(func)
        elif any(tensor.ndim or not _reads_numbers(func) for tensor in of_host):
            raise MixedDevices(f"{func} got tensors of the host: {[tuple(one.shape) for one in of_host]}")
        if getattr(kwargs.get("generator"), "device", CUDA).type != "cuda":
            raise MixedDevices(f"{func} got a generator of the host")
        indexed = func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
        if func in _CHECKED or (
            indexed and any(one is not None and one.dtype == torch.bool for one in args[1])
        ):
            self._wait(func)
        integers = func in _FLOATS_ONLY and not args[0].is_floating_point()
        if integers or not _has_kernel(func):
            raise NotOnGpu(f"CUDA has no {func}{' of integers' if integers else ''}")

    def _wait(self, func: OpOverload) -> None:
        if not self.answers:
            raise HostWaits(f"{func} makes the host wait for the GPU")
        self.waits[str(func)] += 1

    def _answer(self, func: OpOverload, args: Sequence[Any]) -> Any:
        """Tell the host what it asks for: ones."""
        self._wait(func)
        read: Tensor = args[0]
        if func in (_aten._local_scalar_dense.default, _aten._to_copy.default):
            with unset_fake_temporarily():
                ones = torch.ones(read.shape, dtype=read.dtype)
                return ones if func is _aten._to_copy.default else ones.item()
        if func is _aten.nonzero.default:
            return torch.zeros(read.numel(), read.ndim, dtype=torch.long, device=CUDA)
        if func is _aten.bincount.default:
            return torch.zeros(max(1, *args[2:]), dtype=torch.long, device=CUDA)
        if func is _aten._unique2.default:  # all are different
            return read.flatten(), torch.zeros_like(read, dtype=torch.long), read.new_empty(0)
        raise HostWaits(f"{func} makes the host wait for the GPU, and no answer to it is rehearsed")


class OnGpu(Accelerator):  # type: ignore[misc]
    """A process with a GPU, the first if there are several."""

    device = CUDA
    process_index = 0
    num_processes = property(lambda _: world_size())

    def prepare_model(self, model: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
        """Leave out DistributedDataParallel, which exchanges gradients inside PyTorch's engine."""
        return model


@contextmanager
def rehearsed_run(config: PretrainConfig) -> Iterator[tuple[Rehearsal, TrainingState]]:
    """Set up a run on a GPU that is not here, whose steps may not wait."""
    with Rehearsal(answers=True) as rehearsal:
        state = set_up(config, OnGpu())
        rehearsal.answers = False
        yield rehearsal, state


@contextmanager
def one_of_two() -> Iterator[None]:
    """Be the first of two processes with GPUs, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with ExitStack() as stack:
        # `patch.dict` would clear the whole environment at its end, while other threads may read it.
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("LOCAL_RANK", "0")
        stack.enter_context(patch("torch.distributed.new_group", lambda **_: dist.group.WORLD))
        # Of NCCL and gloo alone; torch 2.10 and 2.11 warn.
        stack.enter_context(patch("dino_vit.core.distributed._set_timeout", lambda *_: None))
        # Which would bring together what the others found on their hosts.
        stack.enter_context(patch("dino_vit.core.distributed._gathered", lambda _, work: [work()]))
        try:
            yield
        finally:
            end_processes()


def _pinned(tensor: Tensor, _device: object = None) -> Tensor:
    """Stand in for `Tensor.pin_memory`, to which PyTorch 2.10 gives a device."""
    if _is_pinned(tensor):
        return tensor
    return _mark_pinned(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor))


def _mark_pinned(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


def _in_background(args: Sequence[Any], kwargs: Mapping[str, Any], *, target: Tensor, source: Tensor) -> bool:
    """Tell whether a copy is one transfer from or to pinned memory, which the host does not wait for."""
    if target is source:  # the new tensor is laid out as it, if it has no gaps
        direct = kwargs.get("dtype") in (None, source.dtype) and _has_no_gaps(source)
    else:
        direct = _layout(target) == _layout(source)
    of_host = source if isinstance(target, FakeTensor) else target
    return direct and (kwargs.get("non_blocking") or True in args[2:]) and _is_pinned(of_host)


def _has_no_gaps(tensor: Tensor) -> bool:
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= max(length, 1)
    return True


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _reads_numbers(func: OpOverload) -> bool:
    """Tell whether an operator takes a number on the host as an argument of its kernel."""
    return torch.Tag.pointwise in func.tags or str(func).startswith(("aten._foreach_", "aten.fill"))


@cache
def _has_kernel(func: OpOverload) -> bool:
    """Tell whether an operator runs on CUDA, of which a build of PyTorch for CPUs knows nothing."""
    has: Callable[[str, str], bool] = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    name = func.name()  # type: ignore[no-untyped-call]
    return func.namespace != "aten" or has(name, "CUDA") or not has("aten::mm", "CUDA")


def _faked(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode.from_tensor(tensor)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Compute attention with the kernel that a GPU would choose."""
    assert (attn_mask, is_causal) == (None, False)
    if q.dtype == torch.float32:
        keeps = torch.is_grad_enabled()
        return _aten._scaled_dot_product_efficient_attention(q, k, v, None, keeps, dropout_p, scale=scale)[0]
    return _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, scale=scale)[0]

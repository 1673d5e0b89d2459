"""Count the kernels of code and follow the memory of its tensors, on any device.

A kernel is counted for every operator that computes or copies, also for one on lists of tensors, if PyTorch
joins these. Operators that only view or allocate count none. On a GPU some operators take more than one.
Memory is followed from the first use of tensors to their last, in the blocks of CUDA's allocator.

The traffic of a kernel is what it reads and writes at least: each number of its arguments and results once,
also one that a stride of 0 repeats. What a cache saves, or what a kernel reads twice, is left out. Its least
time is that of its traffic or of its multiplications, whichever is longer, at the speeds below.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

BANDWIDTH, PEAK = (
    3e12,
    990e12,
)  # an H100's bytes a second, rounded, and its operations in bf16, by the data sheet
BLOCK = 512  # bytes, of which the allocator hands out multiples
ELSEWHERE = "elsewhere"
# Functions whose operators are counted together: the outermost of them in the stack decides.
PARTS = {
    "views_of": "augmentation",
    "masks_of": "masks",
    "_targets": "teacher",
    "_cross_entropies": "loss",
    "koleo_loss": "loss",
    "gram_loss": "loss",
    "imitation_loss": "loss",
    "cosine_loss": "loss",
    "run_backbone": "student",
    "sample_drops": "student",
    "project": "student",
    "backward": "backward",
    "unscale_": "clipping",
    "clip_gradients": "clipping",
    "step_if_finite": "optimiser",
    "ema_update": "average",
    "update": "centre",
}
# Kinds of operators by parts of their names, the first that fits; all others work element by element.
KINDS = {
    "attention": ("dot_product",),
    "products": ("mm", "convolution"),
    "norms": ("layer_norm", "weight_norm", "linalg_vector_norm", "foreach_norm"),
    "softmax": ("softmax", "logsumexp"),
    "optimiser": ("_fused_", "_foreach_"),
    "casts and copies": ("_to_copy", "copy_", "clone", "cat", "stack"),
    "indexing": ("index", "gather", "scatter", "embedding", "masked"),
    "sums": ("sum", "mean", "amax", "argmax", "cumsum"),
}
# What writes no memory of the device, beside views.
_aten = torch.ops.aten
_FREE = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten._unsafe_view.default,
    _aten.lift_fresh.default,
    _aten.resize_.default,
    _aten.promote_types.default,
}
# Which write their first argument without reading it.
_OVERWRITE = {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
_OVERWRITE |= {_aten._foreach_copy_.default, _aten._foreach_zero_.default}
_PRODUCTS = {_aten.mm.default, _aten.mm.dtype, _aten.addmm.default, _aten.bmm.default, _aten.bmm.out}


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the kernels of what is run inside, by part of the step and operator, and follow its memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.operators: Counter[str] = Counter()  # all that are called, by part
        self.products: Counter[torch.dtype] = Counter()  # multiplications, by the dtype of the matrices
        self.traffic: Counter[tuple[str, str]] = Counter()  # bytes, by part of the step and kind of operator
        self.seconds: defaultdict[str, float] = defaultdict(float)  # at least, by part
        self.flops = 0.0
        self.memory = 0  # bytes
        self.peaks: dict[str, int] = {}  # of each part

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.record(func, args, out, kwargs)
        return out

    def record(
        self, func: OpOverload, args: Sequence[Any], out: Any, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Count an operator, and follow the tensors that it returned."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        if func.namespace != "aten":
            return
        part = _part()
        self.operators[part] += 1
        if func.is_view:
            return
        self.peaks[part] = max(self.memory, self.peaks.get(part, 0))
        if func in _PRODUCTS:
            left, right = [one for one in args if isinstance(one, Tensor)][-2:]
            self.products[right.dtype] += left.numel() * right.shape[-1]
        if func not in _FREE:
            self.kernels[part, str(func)] += _launches(func, args)
            self._weigh(part, func, args, out, dict(kwargs or {}))

    def _weigh(
        self, part: str, func: OpOverload, args: Sequence[Any], out: Any, kwargs: dict[str, Any]
    ) -> None:
        """Add the traffic and the operations of a kernel, and the time that they take at least."""
        read = args[1:] if func in _OVERWRITE else args
        given = (
            read,
            {name: value for name, value in kwargs.items() if name != "out"},
        )  # which is only written
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        # An operator in place returns its first argument; one on lists returns nothing.
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not written and func._schema.is_mutable:
            written = tensors
        traffic = sum(map(_bytes, tensors)) + sum(map(_bytes, written))
        count = flop_registry.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        self.traffic[part, kind_of(func)] += traffic
        self.flops += flops
        self.seconds[part] += max(traffic / BANDWIDTH, flops / PEAK)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if hasattr(storage, "followed"):
            return
        storage.followed = True  # type: ignore[attr-defined]
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self.memory += size
        weakref.finalize(storage, self._forget, size).atexit = False

    def _forget(self, size: int) -> None:
        self.memory -= size

    def restart(self) -> None:
        """Count from zero."""
        self.kernels.clear()
        self.operators.clear()
        self.products.clear()
        self.traffic.clear()
        self.seconds.clear()
        self.flops = 0.0
        self.peaks.clear()

    @property
    def peak(self) -> int:
        """The most bytes that were in use at a time."""
        return max(self.peaks.values())

    @property
    def by_part(self) -> Counter[str]:
        """The kernels of each part of the step."""
        found: Counter[str] = Counter()
        for (part, _), times in self.kernels.items():
            found[part] += times
        return found

    def traffic_by(self, place: int) -> Counter[str]:
        """The bytes of each part of the step (0), or of each kind of operator (1)."""
        found: Counter[str] = Counter()
        for key, size in self.traffic.items():
            found[key[place]] += size
        return found


def kind_of(func: OpOverload) -> str:
    """Return what kind of work an operator does, by its name."""
    name = func._overloadpacket.__name__
    return next((kind for kind, names in KINDS.items() if any(each in name for each in names)), "elementwise")


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers, each once where a stride of 0 repeats it."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride or not size) * tensor.itemsize


def _launches(func: OpOverload, args: Sequence[Any]) -> int:
    """Return the kernels of an operator: one, or one for each tensor of lists that it cannot join."""
    lists = [one for one in args if isinstance(one, (list, tuple)) and one and isinstance(one[0], Tensor)]
    if not str(func).startswith("aten._foreach_") or not lists:
        return 1
    shapes = [[(one.shape, one.stride()) for one in tensors] for tensors in lists]
    dtypes = [{one.dtype for one in tensors} for tensors in lists]
    if str(func).startswith("aten._foreach_copy_"):  # which casts, from one dtype to one
        joins = all(len(of_list) == 1 for of_list in dtypes)
    else:
        joins = all(of_list == dtypes[0] for of_list in dtypes)
    return 1 if joins and all(of_list == shapes[0] for of_list in shapes) else len(lists[0])


def _part() -> str:
    """Return the part of the step that is being computed."""
    frame: FrameType | None = sys._getframe(3)
    found = ELSEWHERE
    while frame is not None:
        found = PARTS.get(frame.f_code.co_name, found)
        frame = frame.f_back
    return found

"""Count the kernels of code, on any device.

A kernel is counted for every operator that computes or copies, also for one on lists of tensors, if PyTorch
joins these. Operators that only view or allocate count none. On a GPU some operators take more than one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

ELSEWHERE = "elsewhere"
# Functions whose operators are counted together: the outermost of them in the stack decides.
PARTS = {
    "views_of": "augmentation",
    "_targets": "teacher",
    "loss": "loss",
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
_PRODUCTS = {_aten.mm.default, _aten.mm.dtype, _aten.addmm.default, _aten.bmm.default, _aten.bmm.out}


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the kernels of what is run inside, by part of the step and operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.operators: Counter[str] = Counter()  # all that are called, by part
        self.products: Counter[torch.dtype] = Counter()  # multiplications, by the dtype of the matrices

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.record(func, args)
        return out

    def record(self, func: OpOverload, args: Sequence[Any]) -> None:
        """Count an operator."""
        if func.namespace != "aten":
            return
        part = _part()
        self.operators[part] += 1
        if func.is_view:
            return
        if func in _PRODUCTS:
            left, right = [one for one in args if isinstance(one, Tensor)][-2:]
            self.products[right.dtype] += left.numel() * right.shape[-1]
        if func not in _FREE:
            self.kernels[part, str(func)] += _launches(func, args)

    def restart(self) -> None:
        """Count from zero."""
        self.kernels.clear()
        self.operators.clear()
        self.products.clear()

    @property
    def by_part(self) -> Counter[str]:
        """The kernels of each part of the step."""
        found: Counter[str] = Counter()
        for (part, _), times in self.kernels.items():
            found[part] += times
        return found


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

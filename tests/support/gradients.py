"""Gradients as PyTorch's engine computes them, but without it: for a device that is not here."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Saved:
    """A tensor that a node keeps for its gradient, and gives up when that is computed."""

    current: ClassVar[list[_Saved]] = []  # taken by the node that computes now

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        assert self.tensor is not None, "the graph was freed by an earlier backward pass"
        self.current.append(self)
        return self.tensor


def backward(root: Tensor, gradient: Tensor | None = None) -> None:
    """Compute gradients as PyTorch's engine does, node by node, in this thread and with any tensors."""
    # By which the recomputation of blocks tells one backward pass from another.
    with patch("torch._C._current_graph_task_id", return_value=next(_tasks)):
        _walk(root, torch.ones_like(root) if gradient is None else gradient)
    _hooks.clear()
    while _callbacks:
        _callbacks.pop(0)()


@contextmanager
def engine() -> Iterator[None]:
    """Let `backward` stand in for PyTorch's engine, and free what is kept for it when it was used."""
    with (
        patch("torch.autograd.backward", backward),
        patch(
            "torch.Tensor.register_hook",
            lambda tensor, hook: _hooks[tensor.grad_fn].append((tensor.output_nr, hook)),
        ),
        patch("torch.autograd.Variable._execution_engine", SimpleNamespace(queue_callback=_callbacks.append)),
        saved_tensors_hooks(_Saved, _Saved.take),
    ):
        yield


_tasks = count(1)
_hooks = defaultdict[Any, list[tuple[int, Callable[[Tensor], Tensor | None]]]](
    list
)  # of the outputs of nodes
_callbacks: list[Callable[[], None]] = []  # for the end of a backward pass


def _walk(root: Tensor, gradient: Tensor) -> None:
    start: Any = root.grad_fn
    waiting: Counter[Any] = Counter()  # inputs that a node still waits for
    nodes, seen = [start], {start}
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None:
                waiting[following] += 1
                if following not in seen:
                    seen.add(following)
                    nodes.append(following)
    del nodes, seen
    inputs: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    inputs[start][root.output_nr] = gradient
    numbers = count()
    ready = [(0, next(numbers), start)]
    while ready:
        # The newest node first, and the leaves before it.
        _, _, node = heapq.heappop(ready)
        received = inputs.pop(node, {})
        for index, hook in _hooks.get(node, ()):
            if index in received and (changed := hook(received[index])) is not None:
                received[index] = changed
        gradients = _call(node, received)
        for (following, index), passed in zip(node.next_functions, gradients, strict=False):
            if following is None:
                continue
            if passed is not None:
                _add(inputs[following], index, _fitted(passed, following._input_metadata[index]))
            waiting[following] -= 1
            if not waiting[following]:
                heapq.heappush(ready, (-following._sequence_nr(), next(numbers), following))
        del gradients


@torch.no_grad()
def _call(node: Any, received: Mapping[int, Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients that a node passes on, and free what it kept for them."""
    if node.name().endswith("AccumulateGrad"):
        return _accumulate(node.variable, received[0]) if received else ()
    given = [received.get(index) for index in range(len(node._input_metadata))]
    if all(one is None for one in given):
        return [None] * len(node.next_functions)
    of_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    out = node.apply(*given) if of_python else node(*given)
    for saved in _Saved.current:
        saved.tensor = None
    _Saved.current.clear()
    return out if isinstance(out, tuple) else (out,)


def _accumulate(leaf: Tensor, gradient: Tensor) -> tuple[()]:
    """Add to the gradient of a leaf, which is laid out as it."""
    if leaf.grad is not None:
        leaf.grad.add_(gradient)
    elif gradient.stride() == leaf.stride():
        leaf.grad = gradient
    else:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)
    return ()


@torch.no_grad()
def _add(received: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    received[index] = received[index] + gradient if index in received else gradient


@torch.no_grad()
def _fitted(gradient: Tensor, wanted: Any) -> Tensor:
    """Return a gradient in the shape and dtype of the tensor that it is of."""
    if gradient.shape != torch.Size(wanted.shape):
        gradient = gradient.sum_to_size(wanted.shape)
    return gradient.to(wanted.dtype)

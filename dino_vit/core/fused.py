"""Small functions that a GPU runs as one kernel: compiled on CUDA during training, plain code elsewhere.

`fuses(x)` tells whether to take such functions for x; where it is false, PyTorch's operators do it. They
are not taken on other devices, under torch.compile (which fuses the operators itself) or an export, for fake
tensors and float64, or with TORCH_COMPILE_DISABLE=1. They change none of their arguments.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from dino_vit.core import log

P = ParamSpec("P")
R = TypeVar("R")
_DISABLED = any(os.environ.get(f"{name}_DISABLE", "0") == "1" for name in ("TORCH_COMPILE", "TORCHDYNAMO"))


class _State:
    """What all threads of the process see; backward passes run in a thread of their own."""

    steps, works, small = False, not _DISABLED, False


def fused_step() -> _GeneratorContextManager[None]:
    """Fuse during a training step; what runs once is not worth the seconds of compiling."""
    return _during("steps")


def fused_if_small() -> _GeneratorContextManager[None]:
    """Fuse functions of few numbers too, whose calls cost the host nothing once they are recorded."""
    return _during("small")


@contextmanager
def _during(name: str) -> Iterator[None]:
    before = getattr(_State, name)
    setattr(_State, name, True)
    try:
        yield
    finally:
        setattr(_State, name, before)


def fuses(x: Tensor, at_least: int = 0) -> bool:
    """Tell whether functions of x are to be fused, `at_least` so many numbers if each call has its cost."""
    if torch.compiler.is_compiling() or not (_State.steps and _State.works):
        return False
    return x.dtype != torch.float64 and is_on_gpu(x) and (x.numel() >= at_least or _State.small)


def is_on_gpu(x: Tensor) -> bool:
    """Tell whether x is a plain tensor of a GPU."""
    return x.is_cuda and type(x) in (Tensor, nn.Parameter)  # no fake tensor, no part of one


def fused(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Compile a function for tensors of which `fuses` is true; the first argument decides.

    `options` are those of Inductor, the compiler.
    """

    @cache
    def compiled() -> Callable[P, R]:
        return torch.compile(function, options=options)  # which imports the compiler

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        assert not keywords, "positional arguments only"
        first: Any = arguments[0]
        return _run(function, compiled, arguments) if fuses(first) else function(*arguments, **keywords)

    return call


def _run(plain: Callable[..., R], compiled: Callable[[], Callable[..., R]], arguments: tuple[Any, ...]) -> R:
    """Call the compiled function, or the plain one from the first failure to compile on."""
    try:
        # Autocast has no part in them, but torch.compile would compile again where it is on.
        with torch.autocast("cuda", enabled=False):
            return compiled()(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of many kinds: without Triton, a C compiler, or room for the cache
        _State.works = False
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning(f"training goes on without compiled functions, which are faster: {reason}")
        return plain(*arguments)

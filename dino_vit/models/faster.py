"""What makes steps on a GPU faster: networks that are compiled, and recorded as CUDA graphs.

A step of a small network on a fast GPU takes as long as the host needs to start its kernels, more than a
thousand. A CUDA graph starts all that were recorded with one call. They are the same kernels on the same
numbers, so the results are the same with and without.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from dino_vit.core import log
from dino_vit.core.fused import fused_if_small, is_on_gpu
from dino_vit.core.runtime import missing_for_compile
from dino_vit.models.student_teacher import Network
from dino_vit.models.vit import VisionTransformer

WARM_UP = 3  # calls before a recording: kernels are compiled and chosen in them


def compile_networks(networks: Sequence[Network], *, whole: bool, if_possible: bool) -> Iterator[str]:
    """Compile whole networks, or their blocks; yield a note on it, and if this machine cannot, why not.

    Blocks are alike, so they have few graphs, which a minute compiles.
    """
    parts: list[tuple[Any, str]] = [(network, "run_backbone") for network in networks]
    if not whole:
        parts = [(block, "forward") for n in networks for block in getattr(n.backbone, "blocks", ())]
    if if_possible and parts:
        if missing := missing_for_compile():
            yield f"blocks are not compiled (run.compile=auto), which would make steps faster: {missing}"
            return
        yield "the first step compiles the blocks, so that others are faster; run.compile=false turns it off"
    for module, method in parts:
        setattr(module, method, torch.compile(getattr(module, method), dynamic=False))


def record_networks(networks: Sequence[Network]) -> None:
    """Record the backbones' passes in the first steps, and replay them from then on."""
    for network in networks:
        if isinstance(network.backbone, VisionTransformer):  # others may draw in other ways
            recorded: Any = RecordedPass(network.backbone, network.run_backbone)
            network.run_backbone = recorded  # type: ignore[method-assign]


class RecordedPass:
    """A function of a backbone's weights that is recorded after a few calls and replayed from then on.

    It is recorded anew if shapes or modes change. It may draw from the GPU's generator, but must not wait
    for the GPU, nor depend on anything but its arguments and tensors that the backbone keeps.
    """

    def __init__(self, module: VisionTransformer, function: Callable[..., Any]) -> None:
        self.module, self.function = module, function
        self.mode: Any = None
        self.calls, self.works = 0, True  # calls in a row in the same mode
        self.recording: _Recording | None = None

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = pytree.tree_flatten(arguments)
        mode = (
            structure,
            *map(_kind, leaves),
            self.module.training,
            torch.is_grad_enabled(),
            _autocast_dtype(),
        )
        if mode != self.mode:
            self.mode, self.calls, self.recording = mode, 0, None
        self.calls += 1
        if self.calls == WARM_UP + 1 and self.works and all(map(is_on_gpu, filter(_is_tensor, leaves))):
            self._record(leaves, structure)
        if self.recording is not None:
            return self.recording(leaves)
        with fused_if_small():
            return self.function(*arguments)

    def _record(self, leaves: Sequence[Any], structure: Any) -> None:
        try:
            self.recording = _Recording(self.module, self.function, leaves, structure)
        except Exception as error:  # of many kinds, memory among them
            self.works = False
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning(f"training goes on without CUDA graphs, which are faster: {reason}")


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if _is_tensor(leaf) else leaf


class _Recording:
    """The graphs of a pass and, if it has gradients, of its backward pass, with the memory they work on."""

    def __init__(
        self, module: VisionTransformer, function: Callable[..., Any], leaves: Sequence[Any], structure: Any
    ) -> None:
        self.inputs = [leaf.clone() for leaf in filter(_is_tensor, leaves)]
        inputs = iter(self.inputs)
        arguments = [next(inputs) if _is_tensor(leaf) else leaf for leaf in leaves]
        self.ahead, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Threads that load images may use the GPU's driver in the meantime.
        with torch.cuda.graph(self.ahead, capture_error_mode="thread_local"), _capturing():
            outputs = function(*pytree.tree_unflatten(arguments, structure))
        self.kept = list(module.matrices.values())  # which the graph reads; the module may drop them
        found, self.structure = pytree.tree_flatten(outputs)
        self.has_output = list(map(_is_tensor, found))
        outputs = list(filter(_is_tensor, found))
        self.parameters: list[nn.Parameter] = []
        if any(output.requires_grad for output in outputs):
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self._record_backward([output for output in outputs if output.requires_grad], parameters)
        self.requires_grad = [output.requires_grad for output in outputs]
        self.outputs = [output.detach() for output in outputs]

    def _record_backward(self, outputs: list[Tensor], parameters: list[nn.Parameter]) -> None:
        self.upstream = [torch.zeros_like(output) for output in outputs]
        with torch.cuda.graph(self.back, pool=self.ahead.pool(), capture_error_mode="thread_local"):
            found = torch.autograd.grad(outputs, parameters, self.upstream, allow_unused=True)
        used = [(p, grad) for p, grad in zip(parameters, found, strict=True) if grad is not None]
        self.parameters, self.gradients = [p for p, _ in used], [grad for _, grad in used]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        outputs = iter(_Replay.apply(self, *filter(_is_tensor, leaves), *self.parameters))
        return pytree.tree_unflatten(
            [next(outputs) if has else None for has in self.has_output], self.structure
        )


class _Replay(torch.autograd.Function):
    """Copy what goes in, replay, and copy what comes out: the next replay overwrites it."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        if recording.inputs:
            torch._foreach_copy_(recording.inputs, tensors[: len(recording.inputs)])
        recording.ahead.replay()
        outputs = _copies(recording.outputs)
        ctx.mark_non_differentiable(
            *(o for o, grad in zip(outputs, recording.requires_grad, strict=True) if not grad)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        recording: _Recording = ctx.recording
        wanted = [grad for grad, needed in zip(grads, recording.requires_grad, strict=True) if needed]
        torch._foreach_copy_(recording.upstream, wanted)
        recording.back.replay()
        return None, *[None] * len(recording.inputs), *_copies(recording.gradients)


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


@contextmanager
def _capturing() -> Iterator[None]:
    dtype = _autocast_dtype()
    without_cache = torch.autocast("cuda", dtype, enabled=dtype is not None, cache_enabled=False)
    with without_cache, fused_if_small():
        yield


def _copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    copies = tuple(torch.empty_like(tensor) for tensor in tensors)
    if copies:
        torch._foreach_copy_(copies, tuple(tensors))
    return copies

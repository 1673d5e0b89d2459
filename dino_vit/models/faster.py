"""What makes steps on a GPU faster: networks that are compiled, and recorded as CUDA graphs.

A step of a small network on a fast GPU takes as long as the host needs to start its kernels, more than a
thousand. A CUDA graph starts all that were recorded with one call. A replay computes what the calls before
the recording did, bit for bit. A run without graphs rounds otherwise where it does not fuse small functions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from dino_vit.core.fused import fused_if_small, is_on_gpu
from dino_vit.core.runtime import missing_for_compile
from dino_vit.models.student_teacher import Network
from dino_vit.models.vit import VisionTransformer

WARM_UP = 3  # calls before a recording: kernels are compiled and chosen in them
DEVICE = "cuda"  # of the passes that are recorded


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
    """Record the passes of the backbones, vision transformers, in the first steps, and replay them later.

    Heads, losses and the optimiser are started kernel by kernel, as before.
    """
    for network in networks:
        assert isinstance(network.backbone, VisionTransformer)
        recorded: Any = RecordedPass(network.backbone, network.run_backbone)
        network.run_backbone = recorded  # type: ignore[method-assign]


class RecordedPass:
    """A function of a backbone's weights that is recorded after a few calls and replayed from then on.

    Other shapes or modes make a new recording. The function may draw random numbers on the GPU, but must not
    synchronise with it, nor depend on anything but its arguments and tensors that the backbone keeps.
    `torch.cuda.make_graphed_callables` does the same for one shape, but the gradients that it returns are
    overwritten by the next replay, which micro-batches would add to themselves.
    """

    def __init__(self, module: VisionTransformer, function: Callable[..., Any]) -> None:
        self.module, self.function = module, function
        self.mode: Any = None
        self.calls = 0  # in a row in the same mode
        self.recording: _Recording | None = None

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = pytree.tree_flatten(arguments)
        tensors = _tensors(leaves)
        if not all(map(is_on_gpu, tensors)):
            return self.function(*arguments)
        state = self.module.training, torch.is_grad_enabled(), _autocast_dtype()
        mode = structure, *map(_kind, leaves), *state
        if mode != self.mode:
            self.mode, self.calls, self.recording = mode, 0, None
        self.calls += 1
        if self.calls > WARM_UP and self.recording is None:
            self.recording = self._record(leaves, structure)
        if self.recording is not None:
            return self.recording(tensors)
        with fused_if_small():  # as in the recording, where nothing can be compiled
            return self.function(*arguments)

    def _record(self, leaves: Sequence[Any], structure: Any) -> "_Recording":
        try:
            return _Recording(self.module, self.function, leaves, structure)
        except Exception as error:  # of many kinds, memory among them
            # PyTorch may leave its stream, allocator and generator as in a recording, so no step may follow.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            advice = "Run the same command again with run.cuda_graphs=false"
            raise ValueError(f"a CUDA graph could not be recorded: {reason}. {advice}") from error


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype(DEVICE) if torch.is_autocast_enabled(DEVICE) else None


class _Recording:
    """The graphs of a pass and, if it has gradients, of its backward pass, with the memory they work on."""

    def __init__(
        self, module: VisionTransformer, function: Callable[..., Any], leaves: Sequence[Any], structure: Any
    ) -> None:
        self.inputs = [leaf.clone() for leaf in _tensors(leaves)]
        inputs = iter(self.inputs)
        arguments = [next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # a graph must cast the weights in each replay
        # Threads that load images or write a checkpoint may use the GPU's driver in the meantime.
        with torch.cuda.graph(self.forward_graph, capture_error_mode="thread_local"), fused_if_small():
            returned = function(*pytree.tree_unflatten(arguments, structure))
        torch.clear_autocast_cache()  # and nothing else may use its casts
        self.matrices = list(module.matrices.values())  # which the graph reads; the module may drop them
        found, self.structure = pytree.tree_flatten(returned)
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in found]
        outputs = _tensors(found)
        self.requires_grad = [output.requires_grad for output in outputs]
        self.parameters: list[nn.Parameter] = []
        if any(self.requires_grad):
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self._record_backward([output for output in outputs if output.requires_grad], parameters)
        self.outputs = [output.detach() for output in outputs]

    def _record_backward(self, outputs: list[Tensor], parameters: list[nn.Parameter]) -> None:
        self.output_gradients = [torch.zeros_like(output) for output in outputs]
        graph = torch.cuda.graph(
            self.backward_graph, pool=self.forward_graph.pool(), capture_error_mode="thread_local"
        )
        # As a step's backward pass, which is outside of its autocast.
        with graph, torch.autocast(DEVICE, enabled=False):
            found = torch.autograd.grad(outputs, parameters, self.output_gradients, allow_unused=True)
        used = [(p, grad) for p, grad in zip(parameters, found, strict=True) if grad is not None]
        self.parameters, self.gradients = [p for p, _ in used], [grad for _, grad in used]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outputs = iter(_Replay.apply(self, *tensors, *self.parameters))
        return pytree.tree_unflatten(
            [next(outputs) if is_t else None for is_t in self.is_tensor], self.structure
        )


class _Replay(torch.autograd.Function):
    """Copy what goes in, replay, and copy what comes out: the next replay overwrites it."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recording = recording
        if recording.inputs:
            torch._foreach_copy_(recording.inputs, tensors[: len(recording.inputs)])
        recording.forward_graph.replay()
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
        torch._foreach_copy_(recording.output_gradients, wanted)
        recording.backward_graph.replay()
        return None, *[None] * len(recording.inputs), *_copies(recording.gradients)


def _copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    copies = tuple(torch.empty_like(tensor) for tensor in tensors)
    if copies:
        torch._foreach_copy_(copies, tuple(tensors))
    return copies

"""The cross-entropy of student and teacher over many prototypes, in chunks of rows.

All logits of the student together would take most of the memory of a step (`benchmarks/step.py`). So they are
computed for a few rows at a time, and the gradients in the same pass.

k prototypes, d bottleneck features
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Of a chunk's logits in float32; a CPU needs about three times that memory, CUDA half of that. There the
# kernels of small chunks would take the host longer to start than the GPU to compute.
CHUNK_BYTES, CUDA_CHUNK_BYTES = 2**25, 2**28
# Of rows in float32 that a CPU takes from the logits to their gradient at a time: they stay in the cache of a
# core, where a whole chunk would go through memory once for each operation.
BLOCK_BYTES = 2**20
Index = Any  # of a tensor

# Given the index of a chunk, the student's logits (rows, k), a factor and a dtype, return the loss summed
# over the chunk, and the gradient of the logits times the factor, in the dtype. It may overwrite the logits.
ChunkLoss = Callable[[Index, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]


def teacher_targets(teacher_logits: Tensor, center: Tensor, temperature: float) -> Tensor:
    """Return the centred and sharpened probabilities of the teacher, in the dtype of the centre."""
    return F.softmax((teacher_logits - center) / temperature, dim=-1)


@dataclass(frozen=True)
class LazyLogits:
    """Logits (n, k) that are computed a few rows at a time, where all together would not fit into memory."""

    features: Tensor  # (n, d)
    prototypes: Tensor  # (k, d)
    values: Tensor | None = None  # (n, k): all of them, where they are few

    @classmethod
    def of(cls, features: Tensor, prototypes: Tensor) -> "LazyLogits":
        """Multiply in float16 on CUDA under autocast, and in float32 elsewhere.

        GPUs take 16 times as long for products of float32. Those in float16, which has the 11 bits of TF32,
        are off by less than 1e-4 times the length of a prototype (features have length 1).
        """
        if features.is_cuda and torch.is_autocast_enabled("cuda"):
            return cls(features.half(), prototypes.half())
        return cls(features, prototypes)

    def computed(self) -> "LazyLogits":
        """Return the same logits, computed once; the prototypes, which are large, are not kept."""
        return LazyLogits(self.features, self.prototypes.new_empty(0, self.prototypes.shape[1]), self[:])

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, rows: slice) -> Tensor:
        if self.values is not None:
            return self.values[rows]
        features = self.features[rows]
        if features.dtype == torch.float16:
            with torch.autocast(features.device.type, enabled=False):
                return _matmul(features, self.prototypes.T, torch.float32)
        return logits_of(features, self.prototypes)

    def scores(self, rows: slice, center: Tensor, temperature: float) -> Tensor:
        """Return (logits - center) / temperature of some rows."""
        if self.values is not None or self.features.dtype == torch.float16:
            return torch.add(-center / temperature, self[rows], alpha=1 / temperature)
        with torch.autocast(center.device.type, enabled=False):  # in one product
            return F.linear(self.features[rows] / temperature, self.prototypes, -center[0] / temperature)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[rows] for rows in self.chunks())

    def chunks(self, chunk_bytes: int | None = None) -> Iterator[slice]:
        """Yield the rows of each chunk, which are all where they are computed."""
        if self.values is not None:
            return iter([slice(0, len(self))])
        size = max(1, (chunk_bytes or chunk_bytes_on(self.features.device)) // (4 * len(self.prototypes)))
        return (slice(start, start + size) for start in range(0, max(1, len(self)), size))

    def sum(self) -> Tensor:
        """Return the sum of all rows, (1, k), at least in float32."""
        dtype = torch.promote_types(self.features.dtype, torch.float32)
        if self.values is not None:
            return self.values.sum(0, keepdim=True, dtype=dtype)
        # The logits of the sum of the features.
        return logits_of(self.features.sum(0, keepdim=True, dtype=dtype), self.prototypes.to(dtype))


def chunk_bytes_on(device: torch.device) -> int:
    """Return the bytes of a chunk's logits on a device."""
    return CUDA_CHUNK_BYTES if device.type == "cuda" else CHUNK_BYTES


def logits_of(features: Tensor, prototypes: Tensor) -> Tensor:
    """Return the logits (n, k) of features (n, d), in float32 under autocast too."""
    # Divided by a teacher temperature of 0.04, bfloat16's rounding of a logit near 1 would become 0.05.
    with torch.autocast(features.device.type, enabled=False):
        return F.linear(features, prototypes)


def chunked_cross_entropy(
    features: Tensor,  # (..., d)
    prototype_weight: Tensor,  # (k, d)
    chunks: Iterable[Index],  # of the features, which they cover
    chunk_loss: ChunkLoss,
    *,
    temperature: float,
    terms: int,  # by which the sum is divided
    terms_at_once: int,  # of a prototype in a chunk
) -> Tensor:
    """Return the loss of all chunks; its gradients reach the features and the prototypes."""
    device = features.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else features.dtype  # of the products
    accurate = torch.promote_types(features.dtype, torch.float32)  # of everything else
    grad_scale = _float16_scale(terms_at_once) if dtype == torch.float16 else 1.0
    needs_features = torch.is_grad_enabled() and features.requires_grad
    needs_weight = torch.is_grad_enabled() and prototype_weight.requires_grad

    total = features.new_zeros((), dtype=accurate)
    grad_features = torch.empty_like(features, dtype=accurate) if needs_features else None
    grad_weight: Tensor | None = None
    with torch.no_grad(), torch.autocast(device, enabled=False):
        weight = prototype_weight.to(dtype)
        for index in chunks:
            shape = features[index].shape
            chunk = features[index].flatten(0, -2)
            scaled = (chunk / temperature).to(dtype)
            logits = _matmul(scaled, weight.T, accurate)
            # The backward products use the autocast dtype too.
            loss, gradient = chunk_loss(index, logits, grad_scale, dtype)
            del logits
            total += loss
            if grad_features is not None:
                grad_features[index] = _matmul(gradient, weight, accurate).view(shape)
            if needs_weight:
                product = _matmul(gradient.T, chunk.to(dtype), accurate)
                grad_weight = product.to(accurate) if grad_weight is None else grad_weight.add_(product)
    factor = 1 / (grad_scale * terms * temperature)
    return _Loss.apply(features, prototype_weight, total / terms, grad_features, grad_weight, factor)


class _Loss(torch.autograd.Function):
    """A loss whose gradients with respect to its first two inputs are given up to a factor."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _, _, loss, grad_features, grad_weight, ctx.factor = inputs
        ctx.save_for_backward(grad_features, grad_weight)
        result: Tensor = loss.clone()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because the weight's gradient is large; so a second backward pass raises an error.
        factor = grad_loss * ctx.factor
        grads = (None if grad is None else grad.mul_(factor) for grad in ctx.saved_tensors)
        return (*grads, None, None, None, None)


def loss_and_gradient(
    function: Callable[..., tuple[Tensor, Tensor]],
    logits: Tensor,  # (..., rows, k)
    aligned: Sequence[Tensor],  # with the same rows
    common: Sequence[Any],
    dtype: torch.dtype,
    *,
    compiled: bool,
    dynamic: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient, in a dtype, by a function of a chunk of logits.

    Compiled for CUDA it is a kernel or two. A CPU takes a few rows at a time, and overwrites the logits.
    """
    if compiled:
        loss, gradient = compile_kernel(function, dynamic=dynamic)(logits, *aligned, *common, dtype)
        return loss, gradient
    rows, losses = max(1, logits.shape[-2]), []
    block = rows if logits.is_cuda else max(1, BLOCK_BYTES * rows // (4 * max(1, logits.numel())))
    for start in range(0, rows, block):
        part = [each[..., start : start + block, :] for each in (logits, *aligned)]
        loss, gradient = function(*part, *common, logits.dtype)
        part[0].copy_(gradient)
        losses.append(loss)
    return torch.stack(losses).sum(), logits.to(dtype)


@cache
def compile_kernel(function: Callable[..., Any], *, dynamic: bool | None = False) -> Callable[..., Any]:
    """Compile the operations on a large tensor into a kernel or two.

    In a step of ViT-S/16 with DINOv2's losses and 64 images, those on logits read and write 7.7 GB instead of
    27.6, which saves 6.6 of about 47 ms on an H100 (estimated from the bytes, not measured). `dynamic`: the
    number of masked patches differs from step to step.
    """
    # Rows are long, but many enough for a block of threads each: in parts, each sum would be a kernel itself.
    return torch.compile(function, dynamic=dynamic, options={"split_reductions": False})


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probabilities of logits, at least in float32."""
    return F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b, in `dtype` on CUDA and elsewhere in that of the inputs."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b)


def _float16_scale(largest_sum: int) -> float:
    """Return the power of two that keeps tiny gradients from underflow and their sums from overflow."""
    return 2.0 ** math.floor(math.log2(2**13 / largest_sum))

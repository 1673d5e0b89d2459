"""The DINO loss and its parts.

Axes: g global views, v all views (global ones first), b images, k prototypes, d bottleneck features.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from dino_vit.core.distributed import all_reduce_mean


def teacher_targets(teacher_logits: Tensor, center: Tensor, temperature: float) -> Tensor:
    """Return the centred and sharpened probabilities of the teacher, in the dtype of the centre."""
    return F.softmax((teacher_logits - center) / temperature, dim=-1)


def dino_loss(
    student_features: Tensor,  # (v*b, d)
    prototype_weight: Tensor,  # (k, d)
    teacher_logits: Tensor,  # (g*b, k)
    center: Tensor,  # (1, k)
    *,
    views: int,
    global_views: int,
    student_temperature: float,
    teacher_temperature: float,
    chunk_bytes: int = 2**25,
) -> Tensor:
    """Return the cross-entropy of student and teacher, averaged over pairs of different views and images.

    All logits of the student together would take most of the memory of a step (`benchmarks/step.py`). So they
    are computed for a few images at a time: as many as have `chunk_bytes` of logits in float32, which needs
    about three times that memory. The gradients are computed in the same pass.
    """
    images = len(student_features) // views
    assert views > 1 <= global_views <= views, (views, global_views)
    assert len(student_features) == views * images, (student_features.shape, views)
    assert len(teacher_logits) == global_views * images, (teacher_logits.shape, global_views, images)
    device = student_features.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else student_features.dtype  # of the products
    accurate = torch.promote_types(student_features.dtype, torch.float32)  # of everything else
    images_at_once = min(images, max(1, chunk_bytes // (4 * views * len(prototype_weight))))
    lift = _float16_lift(global_views * views * images_at_once) if dtype == torch.float16 else 1.0
    needs_features = torch.is_grad_enabled() and student_features.requires_grad
    needs_weight = torch.is_grad_enabled() and prototype_weight.requires_grad

    features = rearrange(student_features, "(v b) d -> v b d", v=views)
    teacher_logits = rearrange(teacher_logits, "(g b) k -> g b k", g=global_views)
    total = features.new_zeros((), dtype=accurate)
    grad_features = torch.empty_like(features, dtype=accurate) if needs_features else None
    grad_weight: Tensor | None = None
    with torch.no_grad(), torch.autocast(device, enabled=False):
        weight = prototype_weight.to(dtype)
        for start in range(0, images, images_at_once):
            part = slice(start, start + images_at_once)
            chunk = rearrange(features[:, part], "v b d -> (v b) d")
            targets = teacher_targets(teacher_logits[:, part], center, teacher_temperature).to(accurate)
            scaled = (chunk / student_temperature).to(dtype)
            needs_gradient = needs_features or needs_weight
            loss, grad_logits = _chunk_loss(scaled, weight, targets, lift, needs_gradient=needs_gradient)
            total += loss
            if grad_logits is None:
                continue
            grad_logits = grad_logits.to(dtype)  # the backward products use the autocast dtype too
            if grad_features is not None:
                grad_chunk = _matmul(grad_logits, weight, accurate)
                grad_features[:, part] = rearrange(grad_chunk, "(v b) d -> v b d", v=views)
            if needs_weight:
                grad_chunk = _matmul(grad_logits.T, chunk.to(dtype), accurate)
                grad_weight = grad_chunk if grad_weight is None else grad_weight.add_(grad_chunk)
    terms = images * global_views * (views - 1)
    factor = 1 / (lift * terms * student_temperature)
    return _Loss.apply(features, prototype_weight, total / terms, grad_features, grad_weight, factor)


class _Loss(torch.autograd.Function):
    """A loss whose gradients with respect to its first two inputs are known up to a factor."""

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


def _chunk_loss(
    scaled: Tensor, weight: Tensor, targets: Tensor, lift: float, *, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of a chunk (v*b, d) and, in the memory of its log-probabilities, its gradient.

    The targets (g, b, k) are summed before the product: over all global views for a local view, over the
    others for a global view. The gradient with respect to the logits is count * softmax - target.
    """
    count, images, _ = targets.shape
    logits = _matmul(scaled, weight.T, targets.dtype)
    log_probs = rearrange(F.log_softmax(logits, dim=-1), "(v b) k -> v b k", b=images)
    del logits
    of_globals, of_locals = log_probs[:count], log_probs[count:]
    for_locals = targets.sum(0)
    for_globals = for_locals - targets
    loss = -(for_globals * of_globals).sum() - (for_locals * of_locals.sum(0)).sum()
    if not needs_gradient:
        return loss, None
    log_probs.exp_()
    of_globals.mul_(lift * (count - 1)).sub_(for_globals, alpha=lift)
    of_locals.mul_(lift * count).sub_(for_locals, alpha=lift)
    return loss, log_probs.flatten(0, 1)


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`; except on CUDA, the product is rounded to the dtype of the inputs first."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _float16_lift(largest_sum: int) -> float:
    """Return the power of two that keeps tiny gradients from underflow and their sums from overflow."""
    return 2.0 ** math.floor(math.log2(2**13 / largest_sum))


class LossStatistics(NamedTuple):
    """The parts of the loss, as 0-d tensors over all processes."""

    mean_output_entropy: Tensor  # entropy of the mean target: ln(prototypes) if all are used equally
    output_entropy: Tensor  # mean entropy of the targets: 0 if each is certain
    entropy_gap: Tensor  # the first minus the second, the information about the image; 0 is a collapse
    student_divergence: Tensor  # KL(teacher || student), the part of the loss that the student can lower
    prototypes_in_use: Tensor  # number of prototypes that are the largest of some target


@torch.no_grad()
def loss_statistics(
    loss: Tensor, teacher_logits: Tensor, center: Tensor, *, teacher_temperature: float
) -> LossStatistics:
    """Decompose the loss of a batch; for logging steps only, as it computes all targets at once."""
    targets = teacher_targets(teacher_logits, center, teacher_temperature)
    used = torch.zeros_like(targets[0]).scatter_(0, targets.argmax(dim=-1), 1.0)
    scalars = torch.stack([_entropy(targets).mean(), loss.detach().to(targets.dtype)])
    mean_output, used = all_reduce_mean(torch.stack([targets.mean(0), used])).unbind()
    output_entropy, loss = all_reduce_mean(scalars).unbind()
    mean_output_entropy = _entropy(mean_output)
    return LossStatistics(
        mean_output_entropy=mean_output_entropy,
        output_entropy=output_entropy,
        entropy_gap=mean_output_entropy - output_entropy,
        student_divergence=loss - output_entropy,
        prototypes_in_use=(used > 0).sum(),
    )


def _entropy(probabilities: Tensor) -> Tensor:
    return -torch.xlogy(probabilities, probabilities).sum(-1)

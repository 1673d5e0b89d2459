"""The DINO loss and the centre that keeps it from collapsing.

Axes: g global views, v all views (global ones first), b images, k prototypes, d bottleneck features.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dino_vit.core.distributed import all_reduce_mean


def teacher_targets(teacher_logits: Tensor, center: Tensor, temperature: float) -> Tensor:
    """Return the centred, sharpened probabilities of the teacher in the precision of the centre."""
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

    The student's logits are computed, used and dropped for as many images at a time as keep them below
    `chunk_bytes` in float32 (at least one image); a chunk takes about three times that. The gradients are
    made in the same pass, so that nothing is computed twice.
    """
    if views < 2 or not 1 <= global_views <= views:
        raise ValueError(
            f"{views} views of which {global_views} global give no pair of a global view and another one: "
            "use at least 1 global view and 2 views in all."
        )
    images = len(student_features) // views
    assert len(student_features) == views * images, (student_features.shape, views)
    assert len(teacher_logits) == global_views * images, (teacher_logits.shape, global_views, images)
    device = student_features.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else student_features.dtype
    images_at_once = min(images, max(1, chunk_bytes // (4 * views * len(prototype_weight))))
    plan = _Plan(
        global_views=global_views,
        student_temperature=student_temperature,
        teacher_temperature=teacher_temperature,
        matmul_dtype=dtype,
        images_at_once=images_at_once,
        lift=_float16_lift(global_views * views * images_at_once) if dtype == torch.float16 else 1.0,
        needs_features=torch.is_grad_enabled() and student_features.requires_grad,
        needs_weight=torch.is_grad_enabled() and prototype_weight.requires_grad,
    )
    features = rearrange(student_features, "(v b) d -> v b d", v=views)
    teacher = rearrange(teacher_logits.detach(), "(g b) k -> g b k", g=global_views)
    loss: Tensor = _ChunkedLoss.apply(features, prototype_weight, teacher, center, plan)
    return loss


class _Plan(NamedTuple):
    global_views: int
    student_temperature: float
    teacher_temperature: float
    matmul_dtype: torch.dtype
    images_at_once: int
    lift: float
    needs_features: bool
    needs_weight: bool


class _ChunkedLoss(torch.autograd.Function):
    """The loss of all images, with its gradients computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, teacher_logits: Tensor, center: Tensor, plan: _Plan
    ) -> Tensor:
        views, images, _ = features.shape
        terms = images * plan.global_views * (views - 1)
        accurate = torch.promote_types(features.dtype, torch.float32)
        total = features.new_zeros((), dtype=accurate)
        grad_features = torch.empty_like(features, dtype=accurate) if plan.needs_features else None
        grad_weight: Tensor | None = None
        with torch.autocast(features.device.type, enabled=False):
            weight = weight.to(plan.matmul_dtype)
            for start in range(0, images, plan.images_at_once):
                part = slice(start, start + plan.images_at_once)
                chunk = rearrange(features[:, part], "v b d -> (v b) d")
                targets = teacher_targets(teacher_logits[:, part], center, plan.teacher_temperature)
                loss, grad_logits = _loss_and_logit_gradient(chunk, weight, targets.to(accurate), views, plan)
                total += loss
                if grad_logits is None:
                    continue
                grad_logits = grad_logits.to(plan.matmul_dtype)
                if grad_features is not None:
                    grad_chunk = _matmul(grad_logits, weight, accurate)
                    grad_features[:, part] = rearrange(grad_chunk, "(v b) d -> v b d", v=views)
                if plan.needs_weight:
                    grad_chunk = _matmul(grad_logits.T, chunk.to(plan.matmul_dtype), accurate)
                    grad_weight = grad_chunk if grad_weight is None else grad_weight.add_(grad_chunk)
        ctx.save_for_backward(grad_features, grad_weight)
        ctx.factor = 1 / (plan.lift * terms * plan.student_temperature)
        return total / terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as the weight's gradient is large; a second backward pass through this loss is an error.
        factor = grad_loss * ctx.factor
        grads = (None if grad is None else grad.mul_(factor) for grad in ctx.saved_tensors)
        return (*grads, None, None, None)


def _loss_and_logit_gradient(
    features: Tensor, weight: Tensor, targets: Tensor, views: int, plan: _Plan
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of a chunk (v*b, d) and, in the memory of its log-probabilities, the gradient.

    The targets (g, b, k) are summed before the product: over all global views for a local view, over the
    other ones for a global view. The gradient by the scaled logits is count * softmax - target, lifted.
    """
    scaled = (features / plan.student_temperature).to(weight.dtype)
    logits = _matmul(scaled, weight.T, targets.dtype)
    log_probs = rearrange(F.log_softmax(logits, dim=-1), "(v b) k -> v b k", v=views)
    del logits
    count = plan.global_views
    of_globals, of_locals = log_probs[:count], log_probs[count:]
    for_locals = targets.sum(0)
    for_globals = for_locals - targets
    loss = -(for_globals * of_globals).sum() - (for_locals * of_locals.sum(0)).sum()
    if not (plan.needs_features or plan.needs_weight):
        return loss, None
    log_probs.exp_()
    of_globals.mul_(plan.lift * (count - 1)).sub_(for_globals, alpha=plan.lift)
    of_locals.mul_(plan.lift * count).sub_(for_locals, alpha=plan.lift)
    return loss, log_probs.flatten(0, 1)


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`; only CUDA spares it a rounding to the inputs' dtype."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _float16_lift(largest_sum: int) -> float:
    """Return the power of two that lifts tiny gradients into float16 and keeps their sums in it."""
    return 2.0 ** math.floor(math.log2(2**13 / largest_sum))


class Center(nn.Module):
    """The running mean of the teacher's logits over all processes.

    A step accumulates its micro-batches and updates once, after all of them used the centre from before.
    """

    center: Tensor
    pending: Tensor

    def __init__(self, *, prototypes: int, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(1, prototypes))
        self.register_buffer("pending", torch.zeros(1, prototypes), persistent=False)
        self.pending_rows = 0

    @torch.no_grad()
    def accumulate(self, teacher_logits: Tensor) -> None:
        """Remember the teacher's logits (rows, prototypes) of a micro-batch for the next update."""
        self.pending += teacher_logits.sum(0, keepdim=True, dtype=self.pending.dtype)
        self.pending_rows += len(teacher_logits)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the mean of what was accumulated, unless that is not finite."""
        assert self.pending_rows > 0, "update() without accumulate()"
        mean = all_reduce_mean(self.pending / self.pending_rows)
        moved = self.center.lerp(mean, 1 - self.momentum)
        self.center.copy_(torch.where(mean.isfinite().all(), moved, self.center))
        self.pending.zero_()
        self.pending_rows = 0


class LossStatistics(NamedTuple):
    """What the loss is made of, as 0-d tensors over all processes."""

    mean_output_entropy: Tensor  # ln(prototypes) if all are used alike, 0 if one takes everything
    output_entropy: Tensor  # mean over the rows: ln(prototypes) if undecided, 0 if certain
    entropy_gap: Tensor  # the first minus the second: what an output tells about its image; 0 is a collapse
    student_divergence: Tensor  # KL(teacher || student), the part of the loss that the student can lower
    prototypes_in_use: Tensor  # how many are some row's largest


@torch.no_grad()
def loss_statistics(
    loss: Tensor, teacher_logits: Tensor, center: Tensor, *, teacher_temperature: float
) -> LossStatistics:
    """Take the loss of a batch apart; meant for the logging steps, as it makes all targets at once."""
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

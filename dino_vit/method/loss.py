"""The losses of views (DINO) and of masked patches (iBOT): cross-entropies of student and teacher.

g global views, v all views (global ones first), b images, m masked patches,
k prototypes, d bottleneck features
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.core.distributed import all_reduce_mean, world_size
from dino_vit.method.cross_entropy import (
    Index,
    LazyLogits,
    chunk_bytes_on,
    chunked_cross_entropy,
    log_softmax,
    teacher_targets,
)

# Of rows in float32 that a CPU takes from the logits to their gradient at a time: they stay in the cache of a
# core, where a whole chunk would go through memory once for each operation.
BLOCK_BYTES = 2**20


def dino_loss(
    student_features: Tensor,  # (v*b, d)
    prototype_weight: Tensor,  # (k, d)
    teacher_logits: LazyLogits,  # (g*b, k)
    center: Tensor,  # (1, k)
    *,
    views: int,
    global_views: int,
    student_temperature: float,
    teacher_temperature: float,
    chunk_bytes: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return the cross-entropy of student and teacher, averaged over pairs of different views and images."""
    images = len(student_features) // views
    assert views > 1, views
    assert 1 <= global_views <= views, (views, global_views)
    assert len(student_features) == views * images, (student_features.shape, views)
    assert len(teacher_logits) == global_views * images, (len(teacher_logits), global_views, images)
    chunk_bytes = chunk_bytes or chunk_bytes_on(student_features.device)
    images_at_once = min(images, max(1, chunk_bytes // (4 * views * len(prototype_weight))))
    starts = range(0, images, images_at_once)
    logits_by_view = rearrange(teacher_logits[:], "(g b) k -> g b k", g=global_views)

    def chunk_loss(
        index: Index, logits: Tensor, grad_scale: float | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if compiled and grad_scale is not None:
            sharpness = torch.full((), 1 / teacher_temperature, device=logits.device)
            by_view = rearrange(logits, "(v b) k -> v b k", v=views)
            given = by_view, logits_by_view[index], center, sharpness, grad_scale, dtype
            return _compiled(pairs_loss_and_gradient)(*given)
        log_probs = log_softmax(logits)
        targets = teacher_targets(logits_by_view[index], center, teacher_temperature).to(log_probs.dtype)
        loss = _pairs_loss(rearrange(log_probs, "(v b) k -> v b k", v=views), targets, grad_scale)
        if grad_scale is not None:
            logits.copy_(log_probs)
        return loss, logits.to(dtype)

    return chunked_cross_entropy(
        rearrange(student_features, "(v b) d -> v b d", v=views),
        prototype_weight,
        [(slice(None), slice(start, start + images_at_once)) for start in starts],
        chunk_loss,
        temperature=student_temperature,
        terms=images * global_views * (views - 1),
        terms_at_once=global_views * views * images_at_once,
    )


def _pairs_loss(log_probs: Tensor, targets: Tensor, grad_scale: float | None) -> Tensor:
    """Return the summed loss of log-probabilities (v, b, k) and targets (g, b, k).

    The targets are summed before the product: over all global views for a local view, over the others for a
    global view. The gradient with respect to the logits is count * softmax - target.
    """
    count = len(targets)
    global_log_probs, local_log_probs = log_probs[:count], log_probs[count:]
    local_targets = targets.sum(0)
    global_targets = local_targets - targets
    loss = -(global_targets * global_log_probs).sum() - (local_targets * local_log_probs.sum(0)).sum()
    if grad_scale is not None:
        log_probs.exp_()
        global_log_probs.mul_(grad_scale * (count - 1)).sub_(global_targets, alpha=grad_scale)
        local_log_probs.mul_(grad_scale * count).sub_(local_targets, alpha=grad_scale)
    return loss


def patch_loss(
    student_features: Tensor,  # (m, d)
    prototype_weight: Tensor,  # (k, d)
    teacher_logits: LazyLogits,  # (m, k)
    center: Tensor,  # (1, k)
    weights: Tensor,  # (m,): 1 / number of masked patches of the same view
    *,
    views: int,
    student_temperature: float,
    teacher_temperature: float,
    chunk_bytes: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return the sum of the mean cross-entropies of each view, divided by the number of global views.

    That number counts the views without masks too.
    """
    assert len(student_features) == len(teacher_logits) == len(weights)

    def chunk_loss(
        rows: Index, logits: Tensor, grad_scale: float | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        weight = weights[rows, None]
        if compiled and grad_scale is not None:
            sharpness = torch.full((), 1 / teacher_temperature, device=logits.device)
            given = logits, teacher_logits[rows], center, weight, sharpness, grad_scale, dtype
            return _compiled(rows_loss_and_gradient, dynamic=None)(*given)
        scores = teacher_logits.scores(rows, center, teacher_temperature)
        block = max(1, len(logits) if logits.is_cuda else BLOCK_BYTES // (4 * logits.shape[1]))
        starts = range(0, max(1, len(logits)), block)
        blocks = [slice(start, start + block) for start in starts]
        losses = [_block_loss(logits[part], scores[part], weight[part], grad_scale) for part in blocks]
        return torch.stack(losses).sum(), logits.to(dtype)

    device = student_features.device  # a CPU needs half the memory of views, a block at a time
    chunks = list(teacher_logits.chunks(chunk_bytes or (1 + (device.type == "cpu")) * chunk_bytes_on(device)))
    return chunked_cross_entropy(
        student_features,
        prototype_weight,
        chunks,
        chunk_loss,
        temperature=student_temperature,
        terms=views,
        terms_at_once=max(1, chunks[0].stop - chunks[0].start),
    )


def _block_loss(logits: Tensor, scores: Tensor, weight: Tensor, grad_scale: float | None) -> Tensor:
    """Return the loss of some rows; overwrite the logits by their gradient times `grad_scale`."""
    log_probs = log_softmax(logits)
    targets = scores.softmax(dim=-1).to(log_probs.dtype)
    weight = weight.to(log_probs.dtype)
    loss = -(weight * (targets * log_probs).sum(dim=1, keepdim=True)).sum()
    if grad_scale is not None:
        logits.copy_(log_probs.exp_().sub_(targets).mul_(grad_scale * weight))
    return loss


@cache
def _compiled(function: Callable[..., Any], *, dynamic: bool | None = False) -> Callable[..., Any]:
    """Compile the operations on a chunk of logits into a kernel or two.

    In a step of ViT-S/16 with DINOv2's losses and 64 images, they read and write 7.7 GB instead of 27.6,
    which saves 6.6 of about 47 ms on an H100 (estimated from the bytes, not measured). `dynamic`: the number
    of masked patches differs from step to step.
    """
    # Rows are long, but many enough for a block of threads each: in parts, each sum would be a kernel itself.
    return torch.compile(function, dynamic=dynamic, options={"split_reductions": False})


def pairs_loss_and_gradient(
    logits: Tensor,
    teacher_logits: Tensor,
    center: Tensor,
    sharpness: Tensor,  # 1 / the teacher's temperature, a tensor because it changes
    grad_scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the loss of `_pairs_loss` for logits (v, b, k) and (g, b, k), and the gradient (v*b, k)."""
    targets = ((teacher_logits - center) * sharpness).softmax(dim=-1)
    count, views = len(targets), len(logits)
    log_probs = log_softmax(logits)
    # Of a global view, the targets of the others; of a local view, all.
    others = targets.sum(0) - F.pad(targets, (0, 0, 0, 0, 0, views - count))
    terms = count - (torch.arange(views, device=logits.device) < count).to(log_probs.dtype)
    loss = -(others * log_probs).sum(-1).sum()
    gradient = (terms.view(-1, 1, 1) * log_probs.exp() - others) * grad_scale
    return loss, gradient.to(dtype).flatten(0, 1)


def rows_loss_and_gradient(
    logits: Tensor,
    teacher_logits: Tensor,
    center: Tensor,
    weight: Tensor,
    sharpness: Tensor,
    grad_scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the loss of `_block_loss` for rows of the student and the teacher, and the gradient."""
    scores, factor = (teacher_logits - center) * sharpness, weight * grad_scale
    total, teacher_total = (each.logsumexp(dim=-1, keepdim=True) for each in (logits, scores))
    # Inductor would store probabilities that are used twice.
    loss = -(weight * ((scores - teacher_total).exp() * (logits - total)).sum(dim=1, keepdim=True)).sum()
    targets = ((teacher_logits - center) * sharpness - teacher_total).exp()
    return loss, (((logits - total).exp() - targets) * factor).to(dtype)


@torch.no_grad()
def target_sums(
    loss: Tensor, teacher_logits: Iterable[Tensor], center: Tensor, *, teacher_temperature: float
) -> dict[str, Tensor]:
    """Return what `loss_statistics` takes of a micro-batch; those of several add up.

    For logging steps only, as it computes all targets again.
    """
    total = used = torch.zeros_like(center[0])
    entropies, rows = torch.zeros_like(total[0]), torch.zeros_like(total[0])
    for logits in teacher_logits:
        targets = teacher_targets(logits, center, teacher_temperature)
        used = used.scatter(0, targets.argmax(dim=-1), 1.0)
        total = total + targets.sum(0)
        entropies = entropies + _entropy(targets).sum()
        rows = rows + len(targets)
    scalars = {"entropies": entropies, "rows": rows, "loss": loss.detach().to(total.dtype)}
    return {"total": total, "used": used, **scalars}


def loss_statistics(sums: Mapping[str, Tensor], micro_batches: int = 1) -> dict[str, Tensor]:
    """Return entropy and usage of the targets, over all ranks."""
    total, used = all_reduce_mean(torch.stack([sums["total"], sums["used"]])).unbind()
    scalars = torch.stack([sums["entropies"], sums["rows"], sums["loss"] / micro_batches])
    entropies, rows, loss = all_reduce_mean(scalars).unbind()
    output_entropy, mean_output_entropy = entropies / rows, _entropy(total / rows)
    return {
        "mean_output_entropy": mean_output_entropy,  # ln(prototypes) if all are used equally
        "output_entropy": output_entropy,  # mean entropy of the targets: 0 if each is certain
        "entropy_gap": mean_output_entropy - output_entropy,  # information about the image; 0 is a collapse
        # KL(teacher || student), the part of the loss that the student can lower
        "student_divergence": loss - output_entropy,
        "prototypes_in_use": (used > 0).sum(),  # that are the largest of some target
        "rows": (rows * world_size()).round().long(),  # number of targets
    }


def _entropy(probabilities: Tensor) -> Tensor:
    return -torch.xlogy(probabilities, probabilities).sum(-1)

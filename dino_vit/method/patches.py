"""The loss of masked patches (iBOT): what the student makes of a patch it does not see, beside what the
teacher makes of the same patch of the same view.

m masked patches, k prototypes, d bottleneck features
"""

import torch
from torch import Tensor

from dino_vit.method.cross_entropy import (
    CHUNK_BYTES,
    Index,
    LazyLogits,
    chunked_cross_entropy,
    log_softmax,
)

# Of rows in float32 that a CPU takes from the logits to their gradient at a time: they stay in the cache of a
# core, where a whole chunk would go through memory once for each operation (`benchmarks/objective.py`).
BLOCK_BYTES = 2**20


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
    chunk_bytes: int = 2 * CHUNK_BYTES,  # of which a CPU needs half the memory, a block at a time
) -> Tensor:
    """Return the sum of the mean cross-entropies of each view, divided by the number of global views.

    That number counts the views without masks too.
    """
    assert len(student_features) == len(teacher_logits) == len(weights)

    def chunk_loss(rows: Index, logits: Tensor, grad_scale: float | None) -> Tensor:
        scores = teacher_logits.scores(rows, center, teacher_temperature)
        block = len(logits) if logits.is_cuda else max(1, BLOCK_BYTES // (4 * logits.shape[1]))
        starts = range(0, max(1, len(logits)), block)
        blocks = [slice(start, start + block) for start in starts]
        weight = weights[rows, None]
        losses = [_block_loss(logits[part], scores[part], weight[part], grad_scale) for part in blocks]
        return torch.stack(losses).sum()

    chunks = list(teacher_logits.chunks(chunk_bytes))
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

"""The loss of masked patches (iBOT): what the student makes of a patch it does not see, beside what the
teacher makes of the same patch of the same view.

m masked patches, k prototypes, d bottleneck features
"""

from torch import Tensor

from dino_vit.method.cross_entropy import (
    CHUNK_BYTES,
    Index,
    LazyLogits,
    chunked_cross_entropy,
    teacher_targets,
)


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
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return the sum of the mean cross-entropies of each view, divided by the number of global views.

    That number counts the views without masks too.
    """
    assert len(student_features) == len(teacher_logits) == len(weights)

    def chunk_loss(rows: Index, log_probs: Tensor, lift: float | None) -> Tensor:
        targets = teacher_targets(teacher_logits[rows], center, teacher_temperature).to(log_probs.dtype)
        weight = weights[rows, None].to(log_probs.dtype)
        loss = -(weight * (targets * log_probs).sum(dim=1, keepdim=True)).sum()
        if lift is not None:
            log_probs.exp_().sub_(targets).mul_(lift * weight)
        return loss

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

"""CLS tokens: the cross-entropy of student and teacher over different views of an image (DINO).

g global views, v all views (global ones first), b images, k prototypes, d bottleneck features
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.core.distributed import all_reduce_mean
from dino_vit.method.cross_entropy import (
    Index,
    LazyLogits,
    chunk_bytes_on,
    chunked_cross_entropy,
    log_softmax,
    loss_and_gradient,
)
from dino_vit.method.targets import CrossEntropyTerm, Targets, embedding_std
from dino_vit.method.term import Seen
from dino_vit.models.student_teacher import Need, Outputs

FEATURES, PROTOTYPES, CLS = Need("cls", "head"), Need("prototypes", "head"), Need("cls")


class Cls(CrossEntropyTerm):
    """The cross-entropy of the CLS tokens of student and teacher."""

    name = "cls"
    needs, teacher_needs = (FEATURES, PROTOTYPES), (CLS, FEATURES, PROTOTYPES)

    def target(self, outputs: Outputs, seen: Seen) -> Targets:
        logits = LazyLogits.of(outputs[FEATURES], outputs[PROTOTYPES]).computed()
        return self.centered(logits, seen, outputs[CLS])

    def loss(self, outputs: Outputs, target: Targets, seen: Seen) -> Tensor:
        return dino_loss(
            outputs[FEATURES],
            outputs[PROTOTYPES],
            target.logits,
            target.center,
            views=self.sizes.views,
            global_views=self.sizes.global_views,
            student_temperature=self.student_temperature,
            teacher_temperature=target.temperature,
            compiled=self.compiled,
        )

    def sums(self, loss: Tensor, target: Targets) -> dict[str, Tensor]:
        assert target.tokens is not None
        return {"embedding_std": embedding_std(target.tokens), **super().sums(loss, target)}

    def figures(self, sums: Mapping[str, Tensor], micro_batches: int) -> dict[str, Tensor]:
        spread = all_reduce_mean(sums["embedding_std"] / micro_batches)
        return {"embedding_std": spread, **super().figures(sums, micro_batches)}


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
        index: Index, logits: Tensor, grad_scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        temperature = center.new_full((), teacher_temperature)
        by_view = rearrange(logits, "(v b) k -> v b k", v=views)
        aligned, common = [logits_by_view[index]], (center, temperature, grad_scale)
        function = pairs_loss_and_gradient
        loss, gradient = loss_and_gradient(function, by_view, aligned, common, dtype, compiled=compiled)
        return loss, gradient.flatten(0, 1)

    return chunked_cross_entropy(
        rearrange(student_features, "(v b) d -> v b d", v=views),
        prototype_weight,
        [(slice(None), slice(start, start + images_at_once)) for start in starts],
        chunk_loss,
        temperature=student_temperature,
        terms=images * global_views * (views - 1),
        terms_at_once=global_views * views * images_at_once,
    )


def pairs_loss_and_gradient(
    logits: Tensor,  # (v, b, k)
    teacher_logits: Tensor,  # (g, b, k)
    center: Tensor,  # (1, k)
    temperature: Tensor,  # of the teacher: no number, as it changes
    grad_scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, and its gradient with respect to the logits, count * softmax - target."""
    log_probs = log_softmax(logits)
    targets = ((teacher_logits - center) / temperature).softmax(dim=-1).to(log_probs.dtype)
    count, views = len(targets), len(logits)
    # The targets are summed before the product: of a global view, those of the others; of a local view, all.
    others = targets.sum(0) - F.pad(targets, (0, 0, 0, 0, 0, views - count))
    factors = log_probs.new_full((views, 1, 1), grad_scale * count)
    factors[:count] = grad_scale * (count - 1)
    loss = -(others * log_probs).sum(-1).sum()
    return loss, torch.sub(factors * log_probs.exp(), others, alpha=grad_scale).to(dtype)

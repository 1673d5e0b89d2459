"""Masked patches: the cross-entropy of student and teacher (iBOT).

m masked patches, k prototypes, d bottleneck features
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dino_vit.core.distributed import all_reduce_mean
from dino_vit.method.centering import Center, SinkhornCenter
from dino_vit.method.cross_entropy import (
    Index,
    LazyLogits,
    chunk_bytes_on,
    chunked_cross_entropy,
    log_softmax,
    loss_and_gradient,
)
from dino_vit.method.targets import CrossEntropyTerm, Targets
from dino_vit.method.term import Seen, Sizes
from dino_vit.models.student_teacher import Need, Outputs

FIGURES = "mean_output_entropy", "output_entropy", "entropy_gap", "prototypes_in_use", "rows"


class Patch(CrossEntropyTerm):
    """The cross-entropy of masked patches, of which the student sees a mask token in their place."""

    name = "patch"

    def __init__(
        self,
        weight: float,
        sizes: Sizes,
        center: Center | SinkhornCenter,
        student_temperature: float,
        head: str,
    ) -> None:
        super().__init__(weight, sizes, center, student_temperature)
        self.features, self.prototypes = Need("masked", head), Need("prototypes", head)
        self.needs = self.teacher_needs = self.features, self.prototypes

    def target(self, outputs: Outputs, seen: Seen) -> Targets:
        return self.centered(LazyLogits.of(outputs[self.features], outputs[self.prototypes]), seen)

    def loss(self, outputs: Outputs, target: Targets, seen: Seen) -> Tensor:
        assert seen.weights is not None
        return patch_loss(
            outputs[self.features],
            outputs[self.prototypes],
            target.logits,
            target.center,
            seen.weights,
            views=len(seen.views),
            student_temperature=self.student_temperature,
            teacher_temperature=target.temperature,
            compiled=self.compiled,
        )

    def figures(self, sums: Mapping[str, Tensor], micro_batches: int) -> dict[str, Tensor]:
        figures = super().figures(sums, micro_batches)
        own = {f"{self.name}_{figure}": figures[figure] for figure in FIGURES}
        return {self.name: all_reduce_mean(sums["loss"] / micro_batches), **own}


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
        rows: Index, logits: Tensor, grad_scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        # Compiled, they are centred without a pass over the memory.
        centering = (center, center.new_full((), teacher_temperature)) if compiled else None
        given = teacher_logits
        scores = given[rows] if compiled else given.scores(rows, center, teacher_temperature)
        aligned, common, function = (
            [scores, weights[rows, None]],
            (grad_scale, centering),
            rows_loss_and_gradient,
        )
        return loss_and_gradient(function, logits, aligned, common, dtype, compiled=compiled, dynamic=None)

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


def rows_loss_and_gradient(
    logits: Tensor,  # (m, k)
    scores: Tensor,  # (m, k): the teacher's logits, centred and sharpened if no centre and temperature follow
    weight: Tensor,  # (m, 1)
    grad_scale: float,
    centering: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, and its gradient with respect to the logits."""
    if centering is not None:
        scores = (scores - centering[0]) / centering[1]
    log_probs = log_softmax(logits)
    targets, weight = scores.softmax(dim=-1).to(log_probs.dtype), weight.to(log_probs.dtype)
    loss = -(weight * (targets * log_probs).sum(dim=1, keepdim=True)).sum()
    return loss, ((log_probs.exp() - targets) * (grad_scale * weight)).to(dtype)

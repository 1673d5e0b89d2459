"""Masked patches: the cross-entropy of student and teacher (iBOT).

m masked patches, k prototypes, d bottleneck features
"""

from collections.abc import Mapping

import torch
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
from dino_vit.method.objective import Seen, Sizes
from dino_vit.method.targets import Center, CrossEntropyTerm, SinkhornCenter, Targets
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
        """Return the sum of the mean cross-entropies of each view, divided by the number of global views.

        That number counts the views without masks too.
        """
        features, weights, logits, center = outputs[self.features], seen.weights, target.logits, target.center
        assert weights is not None

        def chunk_loss(
            rows: Index, student_logits: Tensor, grad_scale: float, dtype: torch.dtype
        ) -> tuple[Tensor, Tensor]:
            # Compiled, they are centred without a pass over the memory.
            centering = (center, center.new_full((), target.temperature)) if self.compiled else None
            scores = logits[rows] if self.compiled else logits.scores(rows, center, target.temperature)
            return loss_and_gradient(
                rows_loss_and_gradient,
                student_logits,
                [scores, weights[rows, None]],
                (grad_scale, centering),
                dtype,
                compiled=self.compiled,
                dynamic=None,
            )

        # A CPU needs half the memory of views, a block at a time.
        larger = 2 if features.device.type == "cpu" else 1
        chunks = logits.chunks(larger * chunk_bytes_on(features.device))
        return chunked_cross_entropy(
            features,
            outputs[self.prototypes],
            chunks,
            chunk_loss,
            temperature=self.student_temperature,
            terms=len(seen.views),
            terms_at_once=max(1, chunks[0].stop - chunks[0].start),
        )

    def figures(self, sums: Mapping[str, Tensor], micro_batches: int) -> dict[str, Tensor]:
        figures = super().figures(sums, micro_batches)
        own = {f"{self.name}_{figure}": figures[figure] for figure in FIGURES}
        return {self.name: all_reduce_mean(sums["loss"] / micro_batches), **own}


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

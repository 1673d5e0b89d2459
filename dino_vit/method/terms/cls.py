"""CLS tokens: the cross-entropy of student and teacher over different views of an image (DINO).

g global views, v all views (global ones first), b images, k prototypes, d bottleneck features
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.method.cross_entropy import (
    Index,
    LazyLogits,
    chunk_bytes_on,
    chunked_cross_entropy,
    log_softmax,
    loss_and_gradient,
)
from dino_vit.method.objective import Seen
from dino_vit.method.targets import CrossEntropyTerm, Targets
from dino_vit.models.student_teacher import Need, Outputs

FEATURES, PROTOTYPES = Need("cls", "head"), Need("prototypes", "head")


class Cls(CrossEntropyTerm):
    """The cross-entropy of the CLS tokens of student and teacher."""

    name = "cls"
    needs = teacher_needs = FEATURES, PROTOTYPES

    def target(self, outputs: Outputs, seen: Seen) -> Targets:
        return self.centered(LazyLogits.of(outputs[FEATURES], outputs[PROTOTYPES]).computed(), seen)

    def loss(self, outputs: Outputs, target: Targets, seen: Seen) -> Tensor:
        """Return the cross-entropy, averaged over pairs of different views and images."""
        views, global_views, prototypes = self.sizes.views, self.sizes.global_views, outputs[PROTOTYPES]
        features = rearrange(outputs[FEATURES], "(v b) d -> v b d", v=views)
        teacher_logits = rearrange(target.logits[:], "(g b) k -> g b k", g=global_views)
        images = features.shape[1]
        chunk_bytes = chunk_bytes_on(features.device)
        images_at_once = min(images, max(1, chunk_bytes // (4 * views * len(prototypes))))

        def chunk_loss(
            index: Index, logits: Tensor, grad_scale: float, dtype: torch.dtype
        ) -> tuple[Tensor, Tensor]:
            temperature = target.center.new_full((), target.temperature)
            loss, gradient = loss_and_gradient(
                pairs_loss_and_gradient,
                rearrange(logits, "(v b) k -> v b k", v=views),
                [teacher_logits[index]],
                (target.center, temperature, grad_scale),
                dtype,
                compiled=self.compiled,
            )
            return loss, gradient.flatten(0, 1)

        starts = range(0, images, images_at_once)
        return chunked_cross_entropy(
            features,
            prototypes,
            [(slice(None), slice(start, start + images_at_once)) for start in starts],
            chunk_loss,
            temperature=self.student_temperature,
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

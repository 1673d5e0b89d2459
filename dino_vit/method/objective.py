"""The loss of a forward pass, as a weighted sum of terms.

v views (global ones first), g global views, b images
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.core import Size
from dino_vit.method.term import Seen, Term
from dino_vit.models.student_teacher import Network

# Of some views: mask (g·b, N), indices of the masked patches (m,), and their weights (m,).
Masks = tuple[Tensor, Tensor, Tensor]


class Losses(NamedTuple):
    """The loss of a forward pass, the loss of each term before its weight, and what each compares with."""

    total: Tensor
    terms: dict[str, Tensor]
    targets: dict[str, Any]

    @property
    def main(self) -> Tensor:
        """The loss of the first term: of CLS tokens."""
        return next(iter(self.terms.values()))


class Objective:
    """The terms of the loss. The teacher is the average of the student, or a frozen network."""

    def __init__(
        self,
        terms: Sequence[Term],  # the first has a weight of 1
        *,
        global_views: int,
        global_size: Size,
        fixed_teacher: Network | None = None,
    ) -> None:
        self.terms = terms
        self.global_views, self.global_size = global_views, global_size
        self.fixed_teacher = fixed_teacher
        # Each once, in the order of the terms.
        self.needs = [*dict.fromkeys(need for term in terms for need in term.needs)]
        self.teacher_needs = [*dict.fromkeys(need for term in terms for need in term.teacher_needs)]

    def __call__(
        self,
        student: nn.Module,
        teacher: Network,
        views: Sequence[Tensor],  # by size, each (views of that size * b, C, h, w); the global ones first
        masks: Masks | None,
        *,
        images: int,
        teacher_temperature: float,
        kept: Tensor | None = None,  # (g·b, kept): indices of the patches that the student sees
    ) -> Losses:
        """Compute the loss of a micro-batch; `student` is a Network that may be wrapped."""
        rows = self.global_views * images
        original, views = views[0][:rows], self._resize_global(views, rows)
        mask, masked, weights = masks or (None, None, None)
        seen = Seen(
            images=images,
            views=views[0][:rows],
            original=original,
            weights=weights,
            teacher_temperature=teacher_temperature,
        )
        targets = self._targets(self.fixed_teacher or teacher, masked, seen)
        # As in DINOv2's distillation, the student of a frozen teacher sees all patches.
        hidden = None if self.fixed_teacher else mask
        outputs = student(views, self.needs, masked=masked, hidden=hidden, kept=kept)
        losses = dict[str, Tensor]()
        for term in self.terms:
            losses[term.name] = term.loss(outputs, targets[term.name], seen)
        total = losses[self.terms[0].name]
        for term in self.terms[1:]:
            total = total.add(losses[term.name], alpha=term.weight)
        return Losses(total, losses, targets)

    def _resize_global(self, views: Sequence[Tensor], rows: int) -> Sequence[Tensor]:
        """Return the views, the global ones as the student sees them; a Gram teacher may see more."""
        if views[0].shape[-2:] == self.global_size:
            return views
        resized = F.interpolate(views[0][:rows], size=self.global_size, mode="bicubic", antialias=True)
        return [resized, *(view for view in (views[0][rows:], *views[1:]) if len(view))]

    @torch.no_grad()
    def _targets(self, teacher: Network, masked: Tensor | None, seen: Seen) -> dict[str, Any]:
        """Return what each term compares with."""
        outputs = teacher([seen.views], self.teacher_needs, masked=masked)
        return {term.name: term.target(outputs, seen) for term in self.terms}

    def sums(self, losses: Losses) -> dict[str, Tensor]:
        """Return what `figures` takes of a micro-batch; those of several add up."""
        return {
            f"{term.name}.{key}": value
            for term in self.terms
            for key, value in term.sums(losses.terms[term.name], losses.targets[term.name]).items()
        }

    def figures(self, sums: Mapping[str, Tensor], micro_batches: int) -> dict[str, Tensor]:
        """Return what a log line says of the micro-batches of a step, over all processes."""
        figures = dict[str, Tensor]()
        for term in self.terms:
            prefix = f"{term.name}."
            parts = {key.removeprefix(prefix): sums[key] for key in sums if key.startswith(prefix)}
            figures |= term.figures(parts, micro_batches) if parts else {}
        return figures

    @property
    def state(self) -> dict[str, nn.Module]:
        """The modules of terms that a checkpoint holds, by name."""
        return {term.name: term.state for term in self.terms if term.state is not None}

    def compile(self) -> None:
        """Compile what terms compute of large tensors, when it is first called."""
        for term in self.terms:
            term.compiled = True

    def update(self) -> None:
        """Let the terms follow a step, after its last micro-batch."""
        for term in self.terms:
            term.update()

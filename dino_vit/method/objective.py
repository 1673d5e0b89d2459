"""The loss of a forward pass, as a weighted sum of terms; `terms/` has them, a file each.

v views (global ones first), g global views, b images
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.core import Size
from dino_vit.core.distributed import all_reduce_mean
from dino_vit.models.student_teacher import HeadBuilder, Need, Network, Outputs

# Of some views: mask (g·b, N), indices of the masked patches (m,), and their weights (m,).
Masks = tuple[Tensor, Tensor, Tensor]
CLS = Need("cls")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The views of an image, as the student sees them."""

    views: int  # global ones first
    global_views: int
    size: Size  # of a global view
    grid: Size  # of its patches


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a term knows of a forward pass beside the outputs of the networks."""

    images: int
    views: Tensor  # the global views (g·b, C, h, w), as the student sees them
    original: Tensor  # the same as they were made: larger, if a Gram teacher sees more
    weights: Tensor | None  # (m,): 1 / number of masked patches of the same view
    teacher_temperature: float


class Term:
    """A term of the loss, which counts by its weight: its needs, its head, its loss and its figures."""

    name: ClassVar[str]
    setting: ClassVar[str | None] = None  # its weight in the section `loss`, if nothing else decides on it
    title: ClassVar[str] = ""  # of its chart in a report; none if empty
    caption: ClassVar[str] = ""
    # A head of the student alone, and what builds it from `in_dim`, the width of tokens.
    head_name: ClassVar[str] = ""
    build_head: ClassVar[HeadBuilder | None] = None
    needs: tuple[Need, ...] = ()  # of the student
    teacher_needs: tuple[Need, ...] = ()
    state: nn.Module | None = None  # its tensors, which a checkpoint holds under its name
    compiled = False  # what can be; a run on CUDA that compiles sets it

    def __init__(self, weight: float, sizes: Sizes) -> None:
        self.weight, self.sizes = weight, sizes

    def target(self, outputs: Outputs, seen: Seen) -> Any:
        """Return what `loss` compares with, by the outputs of the teacher; without gradients."""

    def loss(self, outputs: Outputs, target: Any, seen: Seen) -> Tensor:
        """Return the loss of the outputs of the student, before its weight."""
        raise NotImplementedError

    def sums(self, loss: Tensor, target: Any) -> dict[str, Tensor]:
        """Return what `figures` takes of a micro-batch of a logged step; those of several add up."""
        return {"loss": loss.detach()}

    def figures(self, sums: Mapping[str, Tensor], micro_batches: int) -> dict[str, Tensor]:
        """Return what a log line says of it, over all processes."""
        return {self.name: all_reduce_mean(sums["loss"] / micro_batches)}

    def update(self) -> None:
        """Follow a step, after its last micro-batch."""


class Losses(NamedTuple):
    """The loss of a forward pass, the loss of each term before its weight, and what each compares with."""

    total: Tensor
    terms: dict[str, Tensor]
    targets: dict[str, Any]
    teacher_cls: Tensor  # (g·b, D)

    @property
    def main(self) -> Tensor:
        """The loss of the first term: of CLS tokens."""
        return next(iter(self.terms.values()))


class Objective:
    """The terms of the loss. The teacher is the average of the student, or a frozen network."""

    def __init__(self, terms: Sequence[Term], frozen_teacher: Network | None = None) -> None:
        """The first of the terms has a weight of 1."""
        self.terms, self.sizes, self.frozen_teacher = terms, terms[0].sizes, frozen_teacher
        # Each once, in the order of the terms.
        self.needs = [*dict.fromkeys(need for term in terms for need in term.needs)]
        self.teacher_needs = [*dict.fromkeys([CLS, *(need for term in terms for need in term.teacher_needs)])]
        self._noted: list[tuple[Tensor, list[dict[str, Tensor]]]] = []  # of each micro-batch

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
        rows = self.sizes.global_views * images
        original, views = views[0][:rows], self._resize_global(views, rows)
        mask, masked, weights = masks or (None, None, None)
        seen = Seen(
            images=images,
            views=views[0][:rows],
            original=original,
            weights=weights,
            teacher_temperature=teacher_temperature,
        )
        with torch.no_grad():
            taught = (self.frozen_teacher or teacher)([seen.views], self.teacher_needs, masked=masked)
            targets = {term.name: term.target(taught, seen) for term in self.terms}
        # As in DINOv2's distillation, the student of a frozen teacher sees all patches.
        hidden = None if self.frozen_teacher else mask
        outputs = student(views, self.needs, masked=masked, hidden=hidden, kept=kept)
        losses = dict[str, Tensor]()
        for term in self.terms:
            losses[term.name] = term.loss(outputs, targets[term.name], seen)
        total = losses[self.terms[0].name]
        for term in self.terms[1:]:
            total = total.add(losses[term.name], alpha=term.weight)
        return Losses(total, losses, targets, taught[CLS])

    def _resize_global(self, views: Sequence[Tensor], rows: int) -> Sequence[Tensor]:
        """Return the views, the global ones as the student sees them; a Gram teacher may see more."""
        if views[0].shape[-2:] == self.sizes.size:
            return views
        resized = F.interpolate(views[0][:rows], size=self.sizes.size, mode="bicubic", antialias=True)
        return [resized, *(view for view in (views[0][rows:], *views[1:]) if len(view))]

    def note(self, losses: Losses) -> None:
        """Take note of a micro-batch, for the next `figures`."""
        each = zip(self.terms, losses.terms.values(), losses.targets.values(), strict=True)
        sums = [term.sums(loss, target) for term, loss, target in each]
        self._noted.append((embedding_std(losses.teacher_cls), sums))

    def figures(self) -> dict[str, Tensor]:
        """Return what a log line says of the micro-batches since the last one, over all processes."""
        spreads, sums = zip(*self._noted, strict=True)
        self._noted.clear()
        figures = {"embedding_std": all_reduce_mean(sum(spreads) / len(spreads))}
        for term, parts in zip(self.terms, zip(*sums, strict=True), strict=True):
            totals = {key: sum(part[key] for part in parts) for key in parts[0]}
            figures |= term.figures(totals, len(parts))
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


def embedding_std(cls: Tensor) -> Tensor:
    """Return the spread of normalised CLS features: 1 if uniform on the sphere, 0 if all are equal."""
    unit = F.normalize(cls.float(), dim=-1)
    return unit.std(dim=0).mean() * unit.shape[1] ** 0.5

"""What a term of the loss is: its needs, its head, its loss and its figures; `terms/` has them all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from dino_vit.core import Size
from dino_vit.core.distributed import all_reduce_mean
from dino_vit.models.student_teacher import HeadBuilder, Need, Outputs


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The views of an image, as the student sees them."""

    views: int  # global ones first
    global_views: int
    grid: Size  # of patches of a global view


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a term knows of a forward pass beside the outputs of the networks."""

    images: int
    views: Tensor  # the global views (g·b, C, h, w), as the student sees them
    original: Tensor  # the same as they were made: larger, if a Gram teacher sees more
    weights: Tensor | None  # (m,): 1 / number of masked patches of the same view
    teacher_temperature: float


class Term:
    """A term of the loss, which counts by its weight."""

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

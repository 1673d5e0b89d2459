"""The teacher's outputs as targets of a cross-entropy, and what a log line says of them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.core.distributed import all_reduce_mean, world_size
from dino_vit.method.centering import Center, SinkhornCenter
from dino_vit.method.cross_entropy import LazyLogits, teacher_targets
from dino_vit.method.term import Seen, Sizes, Term


class Targets(NamedTuple):
    """The logits of a teacher, and what turns them into probabilities."""

    logits: LazyLogits
    center: Tensor
    temperature: float
    tokens: Tensor | None = None  # (g·b, D): those of CLS, of which the logits are


class CrossEntropyTerm(Term):
    """A cross-entropy of student and teacher, with a centre of the teacher's logits."""

    def __init__(
        self, weight: float, sizes: Sizes, center: Center | SinkhornCenter, student_temperature: float
    ) -> None:
        super().__init__(weight, sizes)
        self.state = self.center = center
        self.student_temperature = student_temperature

    def centered(self, logits: LazyLogits, seen: Seen, tokens: Tensor | None = None) -> Targets:
        """Return the targets of logits, which the centre counts."""
        temperature = seen.teacher_temperature
        return Targets(logits, self.center(logits, temperature), temperature, tokens)

    def sums(self, loss: Tensor, target: Targets) -> dict[str, Tensor]:
        logits, center, temperature, _ = target
        return target_sums(loss, logits, center, teacher_temperature=temperature)

    def figures(self, sums: Mapping[str, Tensor], micro_batches: int) -> dict[str, Tensor]:
        return target_statistics(sums, micro_batches)

    def update(self) -> None:
        self.center.update()


@torch.no_grad()
def target_sums(
    loss: Tensor, teacher_logits: Iterable[Tensor], center: Tensor, *, teacher_temperature: float
) -> dict[str, Tensor]:
    """Return what `target_statistics` takes of a micro-batch; those of several add up.

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


def target_statistics(sums: Mapping[str, Tensor], micro_batches: int = 1) -> dict[str, Tensor]:
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
        "prototypes": torch.full_like(rows, len(total)).long(),
        "prototypes_in_use": (used > 0).sum(),  # that are the largest of some target
        "rows": (rows * world_size()).round().long(),  # number of targets
    }


def _entropy(probabilities: Tensor) -> Tensor:
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def embedding_std(cls: Tensor) -> Tensor:
    """Return the spread of normalised CLS features: 1 if uniform on the sphere, 0 if all are equal."""
    unit = F.normalize(cls.float(), dim=-1)
    return unit.std(dim=0).mean() * unit.shape[1] ** 0.5

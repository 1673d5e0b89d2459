"""The teacher's outputs as targets of a cross-entropy: their centre, and what a log line says of them.

A centre is subtracted from the logits, so that no prototype takes all images: a running mean (2021), or the
offsets with which the prototypes share each batch equally (2023), or the last few batches.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dino_vit.core.distributed import all_reduce_logsumexp, all_reduce_mean, world_size
from dino_vit.method.cross_entropy import LazyLogits, teacher_targets
from dino_vit.method.objective import Seen, Sizes, Term

MOMENTUM = 0.9  # of the mean of the teacher's logits
ITERATIONS = 3  # of Sinkhorn-Knopp, as in DINOv2


class Center(nn.Module):
    """The running mean of the teacher's logits over all processes, updated once per step."""

    center: Tensor
    pending: Tensor
    rows: Tensor

    def __init__(self, *, prototypes: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, prototypes))
        self.register_buffer("pending", torch.zeros(1, prototypes), persistent=False)
        self.register_buffer("rows", torch.zeros(1, 1), persistent=False)

    @torch.no_grad()
    def forward(self, teacher_logits: LazyLogits, temperature: float) -> Tensor:
        """Return the centre (1, prototypes) for the logits of a micro-batch, which the next update counts."""
        self.pending += teacher_logits.sum()
        self.rows += len(teacher_logits)
        return self.center

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the mean of the logits since the last update, unless it is not finite."""
        # Sums and counts, not means: processes have different numbers of masked patches.
        sums = all_reduce_mean(torch.cat([self.pending, self.rows], dim=1))
        mean = sums[:, :-1] / sums[:, -1:]
        moved = self.center.lerp(mean, 1 - MOMENTUM)
        self.center.copy_(torch.where(mean.isfinite().all(), moved, self.center))
        self.pending.zero_()
        self.rows.zero_()


class SinkhornCenter(nn.Module):
    """The centre that balances the prototypes over each micro-batch of all processes, or over the last ones.

    A small batch has fewer rows than there are prototypes to share them. So the sums of the prototypes, whose
    logarithm the centre is, may be a running mean over batches.
    """

    center: Tensor

    def __init__(self, *, prototypes: int, momentum: float = 0.0) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(1, prototypes))

    @torch.no_grad()
    def forward(self, teacher_logits: LazyLogits, temperature: float) -> Tensor:
        """Return the centre (1, prototypes) for the logits of a micro-batch."""
        center = sinkhorn_center(teacher_logits, temperature)
        if self.momentum:
            kept = self.momentum * self.center.any()  # nothing at first
            parts = kept.log() + self.center / temperature, (1 - kept).log() + center / temperature
            center = temperature * torch.logaddexp(*parts)
            center = center - center.mean()
        # The report assigns images to prototypes by the last one.
        self.center.copy_(torch.where(center.isfinite().all(), center, self.center))
        return center

    def update(self) -> None:
        """Do nothing: each micro-batch moves the centre by itself."""


def sinkhorn_center(
    teacher_logits: Iterable[Tensor], temperature: float, iterations: int = ITERATIONS
) -> Tensor:
    """Return the centre (1, k) that gives each prototype an equal share of the rows of all processes.

    The logits come in chunks (rows, k), once per iteration, so that all of them need not fit into memory.

    Sinkhorn-Knopp scales the columns and rows of exp(logits / temperature) in turn, until each prototype has
    the same sum and each row a sum of 1. It ends with the rows, which is the softmax of the loss. So only the
    columns' scales are needed here, and the centre is -temperature times their logarithm. Scaling the rows is
    a softmax too; its sums over the rows are not 0, as each prototype had its share before.
    """
    log_scale: Tensor | None = None
    for _ in range(iterations):
        parts = []
        for logits in teacher_logits:
            if log_scale is None:
                parts.append(torch.logsumexp(logits.float() / temperature, dim=0, keepdim=True))
            else:
                scores = torch.add(log_scale, logits.float(), alpha=1 / temperature)
                parts.append(scores.softmax(dim=1).sum(0, keepdim=True).log())
        total = all_reduce_logsumexp(torch.logsumexp(torch.cat(parts), dim=0, keepdim=True))
        log_scale = -total if log_scale is None else log_scale - total
    assert log_scale is not None, iterations
    return -temperature * (log_scale - log_scale.mean())


# By `loss.centering`.
CENTERS: Mapping[str, Callable[..., Center | SinkhornCenter]] = {
    "ema": Center,
    "sinkhorn": SinkhornCenter,
    "sinkhorn_ema": partial(SinkhornCenter, momentum=0.8),
}


class Targets(NamedTuple):
    """The logits of a teacher, and what turns them into probabilities."""

    logits: LazyLogits
    center: Tensor
    temperature: float


class CrossEntropyTerm(Term):
    """A cross-entropy of student and teacher, with a centre of the teacher's logits."""

    def __init__(
        self, weight: float, sizes: Sizes, center: Center | SinkhornCenter, student_temperature: float
    ) -> None:
        super().__init__(weight, sizes)
        self.state = self.center = center
        self.student_temperature = student_temperature

    def centered(self, logits: LazyLogits, seen: Seen) -> Targets:
        """Return the targets of logits, which the centre counts."""
        temperature = seen.teacher_temperature
        return Targets(logits, self.center(logits, temperature), temperature)

    def update(self) -> None:
        self.center.update()

    @torch.no_grad()
    def sums(self, loss: Tensor, target: Targets) -> dict[str, Tensor]:
        # For logging steps only, as it computes all targets again.
        total = used = torch.zeros_like(target.center[0])
        entropies, rows = torch.zeros_like(total[0]), torch.zeros_like(total[0])
        for logits in target.logits:
            targets = teacher_targets(logits, target.center, target.temperature)
            used = used.scatter(0, targets.argmax(dim=-1), 1.0)
            total = total + targets.sum(0)
            entropies = entropies + _entropy(targets).sum()
            rows = rows + len(targets)
        scalars = {"entropies": entropies, "rows": rows, "loss": loss.detach().to(total.dtype)}
        return {"total": total, "used": used, **scalars}

    def figures(self, sums: Mapping[str, Tensor], micro_batches: int) -> dict[str, Tensor]:
        """Return entropy and usage of the targets, over all ranks."""
        total, used = all_reduce_mean(torch.stack([sums["total"], sums["used"]])).unbind()
        scalars = torch.stack([sums["entropies"], sums["rows"], sums["loss"] / micro_batches])
        entropies, rows, loss = all_reduce_mean(scalars).unbind()
        output_entropy, mean_output_entropy = entropies / rows, _entropy(total / rows)
        return {
            "mean_output_entropy": mean_output_entropy,  # ln(prototypes) if all are used equally
            "output_entropy": output_entropy,  # mean entropy of the targets: 0 if each is certain
            # Information about the image; 0 is a collapse.
            "entropy_gap": mean_output_entropy - output_entropy,
            # KL(teacher || student), the part of the loss that the student can lower
            "student_divergence": loss - output_entropy,
            "prototypes": torch.full_like(rows, len(total)).long(),
            "prototypes_in_use": (used > 0).sum(),  # that are the largest of some target
            "rows": (rows * world_size()).round().long(),  # number of targets
        }


def _entropy(probabilities: Tensor) -> Tensor:
    return -torch.xlogy(probabilities, probabilities).sum(-1)

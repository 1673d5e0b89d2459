"""What is subtracted from the teacher's logits, so that no prototype takes all images.

Two ways: a running mean (2021), or the offsets with which the prototypes share each batch equally (2023).
"""

import torch
from torch import Tensor, nn

from dino_vit.core.distributed import all_reduce_logsumexp, all_reduce_mean

ITERATIONS = 3  # of Sinkhorn-Knopp, as in DINOv2


class Center(nn.Module):
    """The running mean of the teacher's logits over all processes, updated once per step."""

    center: Tensor
    pending: Tensor

    def __init__(self, *, prototypes: int, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(1, prototypes))
        self.register_buffer("pending", torch.zeros(1, prototypes), persistent=False)
        self.pending_rows = 0

    def forward(self, teacher_logits: Tensor, temperature: float) -> Tensor:
        """Return the centre (1, prototypes) for the teacher's logits of a forward pass."""
        return self.center

    @torch.no_grad()
    def accumulate(self, teacher_logits: Tensor) -> None:
        """Add the teacher's logits (rows, prototypes) of a micro-batch to the next update."""
        self.pending += teacher_logits.sum(0, keepdim=True, dtype=self.pending.dtype)
        self.pending_rows += len(teacher_logits)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the mean of the accumulated logits, unless it is not finite."""
        assert self.pending_rows > 0, "update() without accumulate()"
        mean = all_reduce_mean(self.pending / self.pending_rows)
        moved = self.center.lerp(mean, 1 - self.momentum)
        self.center.copy_(torch.where(mean.isfinite().all(), moved, self.center))
        self.pending.zero_()
        self.pending_rows = 0


class SinkhornCenter(Center):
    """The centre that balances the prototypes over each forward pass of all processes; it keeps no mean."""

    @torch.no_grad()
    def forward(self, teacher_logits: Tensor, temperature: float) -> Tensor:
        """Return the centre (1, prototypes) for the teacher's logits of a forward pass."""
        center = sinkhorn_center(teacher_logits, temperature)
        # The report assigns images to prototypes by the last one.
        self.center.copy_(torch.where(center.isfinite().all(), center, self.center))
        return center

    def accumulate(self, teacher_logits: Tensor) -> None:
        """Do nothing."""

    def update(self) -> None:
        """Do nothing."""


def build_center(method: str, *, prototypes: int, momentum: float) -> Center:
    """Return the centre of `loss.centring`."""
    kind = SinkhornCenter if method == "sinkhorn" else Center
    return kind(prototypes=prototypes, momentum=momentum)


def sinkhorn_center(teacher_logits: Tensor, temperature: float, iterations: int = ITERATIONS) -> Tensor:
    """Return the centre (1, k) that gives each prototype an equal share of the rows (n, k) of all processes.

    Sinkhorn-Knopp scales the columns and rows of exp(logits / temperature) in turn, until each prototype has
    the same sum and each row a sum of 1. It ends with the rows, which is the softmax of the loss. So only the
    columns' scales are needed here, and the centre is -temperature times their logarithm.
    """
    scores = teacher_logits.float() / temperature
    balanced = scores
    for _ in range(iterations):
        log_scale = -all_reduce_logsumexp(torch.logsumexp(balanced, dim=0, keepdim=True))
        balanced = scores - torch.logsumexp(scores + log_scale, dim=1, keepdim=True)
    return -temperature * (log_scale - log_scale.mean())

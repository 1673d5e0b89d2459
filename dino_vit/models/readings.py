"""Features levelled: each part centred, multiplied by a power of its covariance, and of unit length.

It is fitted in `features/readings.py`, on images without labels.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Levelling(nn.Module):
    """Level features (n, d), whose parts follow each other: (part - mean) @ matrix, at unit length."""

    mean: Tensor  # (d,)

    def __init__(self, mean: Tensor, matrices: Sequence[Tensor]) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        for number, matrix in enumerate(matrices):  # (d, d) of each part
            self.register_buffer(f"matrix{number}", matrix)

    @property
    def matrices(self) -> list[Tensor]:
        """The matrix of each part, in their order."""
        return [tensor for name, tensor in self.named_buffers() if name != "mean"]

    @property
    def widths(self) -> list[int]:
        """The number of features of each part."""
        return [len(matrix) for matrix in self.matrices]

    def of_parts(self, numbers: Sequence[int]) -> "Levelling":
        """Return what levels some of the parts, as if there were no others."""
        means, matrices = torch.split(self.mean, self.widths), self.matrices
        return Levelling(torch.cat([means[n] for n in numbers]), [matrices[n] for n in numbers])

    def forward(self, features: Tensor) -> Tensor:
        parts = torch.split(features - self.mean, self.widths, dim=1)
        levelled = [part @ matrix for part, matrix in zip(parts, self.matrices, strict=True)]
        return torch.cat([F.normalize(part) for part in levelled], dim=1)

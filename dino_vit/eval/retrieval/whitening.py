"""Whitening of features by PCA (Jégou and Chum, 2012), learned from a set of images.

Features of length 1 are centred, turned to their principal components, divided by the standard deviation of
each, and made of length 1 again. The cosine then counts all directions alike. The code of 2021 takes features
of any length, and centres what it whitens but not what it learns from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dino_vit.eval.neighbours import Matrix, unit

_ROWS = 16_384  # in memory at a time
_LEAST_VARIANCE = 1e-5  # of the greatest; smaller ones are rounding, which whitening would blow up


@dataclass(frozen=True)
class Whitening:
    """A linear map that was learned from features; it takes features of the same kind."""

    mean: Tensor  # (D,)
    matrix: Tensor  # (d, D)

    @classmethod
    def learn(cls, features: Matrix, device: torch.device, dimensions: int | None = None) -> "Whitening":
        """Learn from features (n, D), which may be a memory map; keep the first dimensions, or all."""
        width = features.shape[1]
        if dimensions is not None and dimensions > width:
            raise ValueError(f"whitening to {dimensions} dimensions, but the features have {width}")
        if len(features) < 2:
            raise ValueError("whitening is learned from 2 images or more")
        exact = torch.float32 if device.type == "mps" else torch.float64
        total = torch.zeros(width, dtype=exact, device=device)
        products = torch.zeros(width, width, dtype=exact, device=device)
        for start in range(0, len(features), _ROWS):
            rows = unit(torch.as_tensor(features[start : start + _ROWS], device=device)).to(exact)
            total += rows.sum(0)
            products += rows.T @ rows
        mean = total / len(features)
        variances, directions = torch.linalg.eigh((products / len(features) - mean.outer(mean)).cpu())
        if variances[-1] < 1e-12:  # of vectors of length 1: no more than rounding
            raise ValueError("whitening has nothing to learn from: all features are the same")
        variances = variances.clamp(min=_LEAST_VARIANCE * float(variances[-1])).flip(0)[:dimensions]
        matrix = directions.flip(1).T[:dimensions] / variances.sqrt()[:, None]
        return cls(mean.float(), matrix.float().to(device))

    def __call__(self, features: Tensor) -> Tensor:
        """Return features (n, D) whitened, of length 1 in float32: (n, d)."""
        return unit((unit(features.to(self.mean.device)) - self.mean) @ self.matrix.T)

"""Classifiers of features: linear ones, and the vote of the nearest labelled images."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

VOTE_TEMPERATURE = 0.07  # of neighbours, as published with DINO
BLOCK, _PRODUCTS = 1024, 2**26  # images at a time, and their products with a bank


def vote_logits(cosines: Tensor) -> Tensor:
    """Return the log of what each neighbour weighs, (n, k) with the nearest first: cosine / temperature.

    That of the nearest is subtracted, so that the weights stay finite.
    """
    return (cosines - cosines[:, :1]) / VOTE_TEMPERATURE


class LinearScores(nn.Module):
    """Scores (n, c) that are linear in the features."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.float())
        self.register_buffer("bias", bias.float())

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)


Columns = slice | list[int]  # of features


class LinearHeads(NamedTuple):
    """Linear classifiers that read the same columns of the features."""

    weight: Tensor  # (r, c, d)
    bias: Tensor  # (r, c)
    columns: Columns = slice(None)

    def scores(self, x: Tensor) -> Tensor:
        """Return the logits of all heads for the columns that they read, (n, d) -> (n, r, c)."""
        joined = F.linear(x, self.weight.flatten(0, 1), self.bias.flatten())
        return rearrange(joined, "n (r c) -> n r c", r=len(self.bias))


def on_standardised(
    train: Callable[[Tensor], list[LinearHeads]], features: Tensor, *, by_column: bool = True
) -> list[LinearHeads]:
    """Return the heads that `train` returns for features of mean 0 and variance 1, to read them as they are.

    So each column has the same say, as those of untrained networks, above all, are of very different sizes.
    Otherwise 1 is the mean of their variances: parts of unit length keep the same say, of any width.
    """
    std, mean = torch.std_mean(features.double(), dim=0, correction=0)
    if not by_column:
        std = std.square().mean().sqrt().expand_as(std)
    scale = std.clamp(min=1e-6 * float(std.max()) + 1e-12).reciprocal().to(features.dtype)
    mean = mean.to(features.dtype)
    heads = []
    for weight, bias, columns in train((features - mean) * scale):
        weight = weight * scale[columns].to(weight)
        heads.append(LinearHeads(weight, bias - weight @ mean[columns].to(weight), columns))
    return heads


class NeighbourScores(nn.Module):
    """Scores (n, c) from the nearest labelled images: the log of their votes."""

    bank: Tensor
    targets: Tensor

    def __init__(self, bank: Tensor, targets: Tensor, *, k: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("bank", bank)  # (m, d), unit vectors
        self.register_buffer("targets", targets)  # (m,) classes; (m, c) 0 or 1 for each label
        self.k, self.classes = min(k, len(bank)), classes

    def forward(self, features: Tensor) -> Tensor:
        cosines, rows = (F.normalize(features) @ self.bank.T).topk(self.k)
        return vote(cosines, self.targets[rows], self.classes)


def vote(cosines: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Return scores (n, c) from the cosines (n, k) and the targets of neighbours, the nearest first.

    A class without a vote counts as 1 / (k · c) of one, so that no score is infinite.
    """
    weights = vote_logits(cosines).softmax(dim=1)
    unseen = 1 / (cosines.shape[1] * classes)
    if targets.ndim == 2:
        none = weights.new_zeros(weights.shape[0], classes)  # `len` would fix the batch of an ONNX graph
        return (none.scatter_add(1, targets, weights) + unseen).log()
    means = (weights[:, :, None] * targets).sum(dim=1)
    return (means + unseen).log() - (1 - means + unseen).log()


Scores = LinearScores | NeighbourScores


def score_in_blocks(
    scores: Scores, features: Tensor, reading: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the scores of the features of many images, which are read first, some at a time."""
    bank = len(scores.bank) if isinstance(scores, NeighbourScores) else 1
    size = max(1, min(BLOCK, _PRODUCTS // bank))
    blocks = torch.split(features, size)
    return torch.cat([scores(reading(block) if reading else block) for block in blocks])

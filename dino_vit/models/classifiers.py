"""Classifiers of features: linear ones, and the vote of the nearest labelled images."""

import torch
import torch.nn.functional as F
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


class NeighbourScores(nn.Module):
    """Scores (n, c) from the nearest labelled images: the log of their votes."""

    bank: Tensor
    targets: Tensor

    def __init__(self, bank: Tensor, targets: Tensor, *, k: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("bank", F.normalize(bank.float()))  # (m, d)
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


def score_in_blocks(scores: Scores, features: Tensor) -> Tensor:
    """Return the scores of many images, some at a time."""
    bank = len(scores.bank) if isinstance(scores, NeighbourScores) else 1
    size = max(1, min(BLOCK, _PRODUCTS // bank))
    return torch.cat([scores(block) for block in torch.split(features, size)])

"""Formulas written out as loops, for tests that compare the library with them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_vit.method.cross_entropy import LazyLogits


def attention_weights(block: nn.Module, tokens: Tensor) -> Tensor:
    """Return the softmax of q·k/√d head by head and query by query, (b, heads, n, n)."""
    width, heads = tokens.shape[-1], block.attn.heads
    size = width // heads
    qkv = F.linear(block.norm1(tokens), block.attn.qkv.weight, block.attn.qkv.bias).double()
    weights = torch.empty(len(tokens), heads, tokens.shape[1], tokens.shape[1], dtype=torch.float64)
    for head in range(heads):
        q = qkv[..., head * size : (head + 1) * size]
        k = qkv[..., width + head * size : width + (head + 1) * size]
        for query in range(tokens.shape[1]):
            scores = (q[:, query, None] * k).sum(-1) / math.sqrt(size)
            weights[:, head, query] = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return weights.detach()


def ranked_classes(similarities: list[float], labels: list, k: int) -> list:
    """Return the classes of the k nearest, the one with the most votes first, in Python numbers."""
    order = sorted(range(len(labels)), key=lambda row: -similarities[row])
    scores = {}
    for row in order[:k]:
        scores[labels[row]] = scores.get(labels[row], 0) + math.exp(similarities[row] / 0.07)
    return sorted(scores, key=lambda label: -scores[label])


def right_by_loop(features, labels, k):
    """Return of which images the k nearest others tell the label."""
    similar, right = F.normalize(features) @ F.normalize(features).T, []
    for query, label in enumerate(labels):
        others = [i for i in range(len(labels)) if i != query]
        classes = ranked_classes(similar[query, others].tolist(), [labels[i] for i in others], k)
        right.append(classes[0] == label)
    return right


def as_logits(values: Tensor) -> LazyLogits:
    """Return logits whose values are given."""
    return LazyLogits(values, torch.eye(values.shape[1]), values)

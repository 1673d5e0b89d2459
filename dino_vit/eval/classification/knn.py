"""Weighted k-nearest-neighbour classification of features, as published with DINO.

Features are L2-normalised; the score of a class is the sum of exp(cosine / temperature) over those of the k
nearest neighbours that belong to it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.eval.neighbours import Matrix, Search, nearest

RANKED = 5  # classes returned per query: enough for top-1 and top-5
NO_CLASS = torch.iinfo(torch.int64).min  # fills the ranking where fewer classes have a vote
# Numbers in memory at a time: features of queries and their neighbours, and scores of classes.
_QUERIES, _VOTES = 2**25, 2**23


def weighted_knn(
    bank: Matrix,
    bank_labels: Tensor,
    queries: Matrix,
    *,
    k: Sequence[int],
    temperature: float = 0.07,
    own: int | None = None,
    search: Search = "auto",
    device: torch.device | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[int, Tensor]:
    """Return, for each k, the labels of the best five classes of each query, best first: (queries, ≤ 5).

    Labels are any integers; of classes with equal scores the lower label is first. With `own`, query i is row
    own + i of the bank and does not find itself. Works on the device of the queries by default.
    """
    if bank_labels.shape != bank.shape[:1]:
        raise ValueError(f"the bank has {len(bank)} images, but {len(bank_labels)} labels")
    available = len(bank) - (own is not None)
    if beyond := sorted(wanted for wanted in k if wanted > available):
        log.warning("k-NN: for k = %s, all %d images of the bank vote", str(beyond)[1:-1], available)
    device = device or (queries.device if isinstance(queries, Tensor) else torch.device("cpu"))
    labels, classes = torch.unique(bank_labels.to(device), return_inverse=True)
    ranked: dict[int, list[Tensor]] = {wanted: [] for wanted in k}
    size = max(1, _QUERIES // (queries.shape[1] + 2 * max(k)))
    votes = max(1, _VOTES // len(labels))
    for start in range(0, len(queries) or 1, size):
        block = torch.as_tensor(queries[start : start + size], device=device)
        itself = None if own is None else own + start
        cosines, rows = nearest(bank, block, k=min(max(k), available), own=itself, search=search)
        for first in range(0, len(block) or 1, votes):
            some = slice(first, first + votes)
            scores = _class_scores(
                cosines[some], classes[rows[some]], k=k, classes=len(labels), temperature=temperature
            )
            for wanted, of_k in scores.items():
                ranked[wanted].append(_best(of_k, labels))
        if progress:
            progress(len(block))
    return {wanted: torch.cat(blocks) for wanted, blocks in ranked.items()}


def _class_scores(
    cosines: Tensor, neighbour_classes: Tensor, *, k: Sequence[int], classes: int, temperature: float
) -> dict[int, Tensor]:
    """Return the classes' scores for each k: (queries, classes), from neighbours with the nearest first.

    They are divided by the weight of the nearest neighbour, so that no temperature makes them infinite.
    """
    weights = ((cosines - cosines[:, :1]) / temperature).exp()
    # CUDA adds in any order: in float64 the order does not change the sums in float32.
    weights = weights.double() if weights.is_cuda else weights
    scores, total, counted = {}, weights.new_zeros(len(weights), classes), 0
    for wanted in sorted(k):
        part = slice(counted, wanted)
        total = total.scatter_add(1, neighbour_classes[:, part], weights[:, part])
        scores[wanted], counted = total.float(), wanted
    return scores


def _best(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the labels of the classes with the greatest scores, the lower label first among equals."""
    best, remaining = [], scores.clone()
    for _ in range(min(RANKED, len(labels))):
        score, column = remaining.max(dim=1)  # the first column among equals, unlike topk
        best.append(labels[column].masked_fill(score <= 0, NO_CLASS))
        remaining.scatter_(1, rearrange(column, "q -> q 1"), -1)
    return torch.stack(best, dim=1)


def few_shot_rows(
    labels: NDArray[np.int64], keys: NDArray[np.int64], *, shots: int, seed: int, repeat: int
) -> NDArray[np.int64]:
    """Choose `shots` rows of each label, ascending: a function of the seed, the repeat and the rows' keys."""
    bits = random_bits(seed, RngPurpose.EVALUATION, repeat, keys)
    order = np.lexsort((bits, labels))
    sorted_labels = labels[order]
    rank_in_class = np.arange(len(labels)) - np.searchsorted(sorted_labels, sorted_labels)
    return np.sort(order[rank_in_class < shots])

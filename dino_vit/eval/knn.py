"""Weighted k-nearest-neighbour classification of features, as published with DINO.

Features are L2-normalised; the score of a class is the sum of exp(cosine / temperature) over those of the k
nearest neighbours that belong to it. Exact, in blocks, on whatever device the queries are.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

log = logging.getLogger("dino_vit")

RANKED = 5  # classes named per query: enough for top-1 and top-5
# Queries and bank rows compared at a time: 128 MiB of float32 similarities.
_QUERY_BLOCK, _BANK_BLOCK = 1024, 32768


def weighted_knn(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    k: Sequence[int],
    temperature: float = 0.07,
    leave_one_out: bool = False,
) -> dict[int, Tensor]:
    """Return, for each k, the labels of the best five classes of each query, best first: (queries, ≤ 5).

    Labels are any integers. A k beyond the bank means the whole bank, with a notice. `leave_one_out` is for
    queries that are the bank: row i finds all rows but row i.
    """
    _check(bank, bank_labels, queries, k, leave_one_out)
    available = len(bank) - leave_one_out
    if beyond := sorted(wanted for wanted in k if wanted > available):
        log.warning("k-NN: for k = %s, all %d images of the bank vote", str(beyond)[1:-1], available)
    bank, queries = _normalised(bank.to(queries.device)), _normalised(queries)
    labels, classes = torch.unique(bank_labels.to(queries.device), return_inverse=True)
    ranked: dict[int, list[Tensor]] = {wanted: [] for wanted in k}
    for start in range(0, max(1, len(queries)), _QUERY_BLOCK):
        block = queries[start : start + _QUERY_BLOCK]
        own = start if leave_one_out else None
        similarities, neighbours = nearest(bank, block, k=min(max(k), available), own=own)
        scores = class_scores(
            similarities, classes[neighbours], k=k, classes=len(labels), temperature=temperature
        )
        for wanted, of_class in scores.items():
            ranked[wanted].append(labels[of_class.topk(min(RANKED, len(labels))).indices])
    return {wanted: torch.cat(blocks) for wanted, blocks in ranked.items()}


def nearest(bank: Tensor, queries: Tensor, *, k: int, own: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the k greatest dot products with bank rows and the rows, greatest first: (queries, k) each.

    With `own`, query i is bank row own + i and does not find itself.
    """
    best = queries.new_empty(len(queries), 0)
    rows = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    for start in range(0, len(bank), _BANK_BLOCK):
        similarities = queries @ bank[start : start + _BANK_BLOCK].T
        if own is not None:
            similarities.diagonal(own - start).fill_(-torch.inf)
        found = similarities.topk(min(k, similarities.shape[1]))
        best, kept = torch.cat([best, found.values], 1).topk(min(k, best.shape[1] + found.values.shape[1]))
        rows = torch.cat([rows, found.indices + start], 1).gather(1, kept)
    return best, rows


def class_scores(
    similarities: Tensor, neighbour_classes: Tensor, *, k: Sequence[int], classes: int, temperature: float
) -> dict[int, Tensor]:
    """Return the classes' scores for each k: (queries, classes), from neighbours with the nearest first."""
    weights = (similarities / temperature).exp()
    scores, total, counted = {}, similarities.new_zeros(len(similarities), classes), 0
    for wanted in sorted(k):
        part = slice(counted, wanted)
        total = total.scatter_add(1, neighbour_classes[:, part], weights[:, part])
        scores[wanted], counted = total, wanted
    return scores


def _check(bank: Tensor, labels: Tensor, queries: Tensor, k: Sequence[int], leave_one_out: bool) -> None:
    if bank.ndim != 2 or queries.ndim != 2 or bank.shape[1] != queries.shape[1]:
        raise ValueError(
            f"k-NN compares features (images, width) of one width, but the bank is {tuple(bank.shape)} and "
            f"the queries are {tuple(queries.shape)}."
        )
    if labels.shape != bank.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"k-NN needs one integer label for each of the {len(bank)} bank images, but got {labels.dtype} "
            f"{tuple(labels.shape)}. Map other labels to integers first."
        )
    if len(bank) <= leave_one_out:
        raise ValueError(f"k-NN needs a neighbour for each query, but the bank has {len(bank)} images.")
    if not k or min(k) < 1:
        raise ValueError(f"k-NN needs one or more k from 1 up, but got {list(k)}.")
    if leave_one_out and len(queries) != len(bank):
        raise ValueError(
            f"leave_one_out is for queries that are the bank, but there are {len(queries)} queries and "
            f"{len(bank)} bank images."
        )


def _normalised(features: Tensor) -> Tensor:
    return F.normalize(features.float(), dim=-1)

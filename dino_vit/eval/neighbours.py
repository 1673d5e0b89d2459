"""Exact nearest neighbours by cosine, and what they vote for.

FAISS finds neighbours, on CPUs and on GPUs. Where it is not installed, products and topk do.
"""

import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.text import plural, progress
from dino_vit.models.classifiers import vote_logits

# On macOS FAISS and torch each bring an OpenMP, and a process with two of them is aborted.
FAISS = sys.platform != "darwin" and find_spec("faiss") is not None
RANKED = 5  # classes returned per query: enough for top-1 and top-5
NO_CLASS = torch.iinfo(torch.int64).min  # fills the ranking where fewer classes have a vote
_FAISS_GPU_MOST = 2048  # neighbours that FAISS can find on a GPU
# Numbers in memory at a time: of the bank, of queries with their neighbours, of products, of class scores.
_BANK, _QUERIES, _PRODUCTS, _VOTES = 2**24, 2**25, 2**24, 2**23


def unit(features: Tensor) -> Tensor:
    """Return features of length 1 in float32; zeros stay."""
    if not features.isfinite().all():
        raise ValueError("some features are not finite, so they have no neighbours; is the network broken?")
    return F.normalize(features.float()).contiguous()


def nearest(
    bank: Tensor, queries: Tensor, *, k: int, self_offset: int | None = None, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cosines with the k nearest bank rows and the rows, nearest first: (queries, k) each.

    Works on the device of the queries. With `self_offset`, query i is bank row self_offset + i and does not
    find itself; `among` are the only rows to find. A bank of fewer than k rows is returned whole.
    """
    queries, with_itself = unit(queries), self_offset is not None
    length = len(bank) if among is None else len(among)
    k = min(k, length - with_itself)
    cosines = queries.new_empty(len(queries), 0)
    rows = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    size = max(1, _BANK // queries.shape[1])
    for start in range(0, length if len(queries) else 0, size):
        part = slice(start, start + size)
        chosen = part if among is None else among[part]  # a block at a time: a copy of all may be too large
        block = unit(bank[chosen].to(queries.device))
        block_cosines, block_rows = _search(block, queries, min(k + with_itself, len(block)))
        block_rows = block_rows + start if among is None else among[part][block_rows]
        if self_offset is not None:
            itself = torch.arange(self_offset, self_offset + len(queries), device=queries.device)
            block_cosines = block_cosines.masked_fill(block_rows == rearrange(itself, "q -> q 1"), -torch.inf)
        cosines, rows = torch.cat([cosines, block_cosines], 1), torch.cat([rows, block_rows], 1)
        cosines, order = cosines.topk(min(k, cosines.shape[1]))
        rows = rows.gather(1, order)
    return cosines, rows


def _search(block: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the greatest k products of each query with the rows of a block, and the rows."""
    if FAISS and queries.device.type == "cpu":
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
        cosines, rows = faiss.knn(queries.numpy(), block.numpy(), k, metric=faiss.METRIC_INNER_PRODUCT)
        return torch.from_numpy(cosines), torch.from_numpy(rows)
    if queries.is_cuda and k <= _FAISS_GPU_MOST and (resources := _gpu_resources()):
        import faiss

        metric, device = faiss.METRIC_INNER_PRODUCT, queries.device.index
        return faiss.knn_gpu(resources, queries, block, k, metric=metric, device=device)
    size = max(1, _PRODUCTS // len(block))
    parts = [(part @ block.T).topk(k) for part in torch.split(queries, size)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


@cache
def _gpu_resources() -> Any:
    """Return what FAISS needs to work on tensors of a GPU, or None if this FAISS has no GPUs."""
    if not FAISS:
        return None
    import faiss

    if not faiss.get_num_gpus():
        return None
    import faiss.contrib.torch_utils  # lets the functions of FAISS take tensors

    return faiss.StandardGpuResources()


def weighted_knn(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    k: Sequence[int],
    self_offset: int | None = None,
    device: torch.device | None = None,
) -> dict[int, Tensor]:
    """Return, for each k, the labels of the best five classes of each query, best first: (queries, ≤ 5).

    As published with DINO, the score of a class is the sum of exp(cosine / temperature) over those of the k
    nearest neighbours that belong to it. Labels are any integers; of classes with equal scores the lower
    label is first. `self_offset` is that of `nearest`. Works on the device of the queries by default.
    """
    _warn_of_few(k, len(bank) - (self_offset is not None))
    device = device or queries.device
    labels, classes = torch.unique(bank_labels.to(device), return_inverse=True)
    ranked: dict[int, list[Tensor]] = {wanted: [] for wanted in k}
    size = max(1, min(_QUERIES // (queries.shape[1] + 2 * max(k)), _VOTES // len(labels)))
    with progress("neighbours", len(queries)) as advance:
        for start in range(0, len(queries) or 1, size):
            block = queries[start : start + size].to(device)
            itself = None if self_offset is None else self_offset + start
            cosines, rows = nearest(bank, block, k=max(k), self_offset=itself)
            scores = class_scores(cosines, classes[rows], k=k, classes=len(labels))
            for wanted, by_class in scores.items():
                ranked[wanted].append(_best(by_class, labels))
            advance(len(block))
    return {wanted: torch.cat(blocks) for wanted, blocks in ranked.items()}


def _warn_of_few(k: Sequence[int], available: int) -> None:
    if beyond := sorted(wanted for wanted in k if wanted > available):
        text = "k-NN with k = %s: the bank has only %s, and all of them vote"
        log.warning(text, str(beyond)[1:-1], plural(available, "image"))


def neighbour_means(
    bank: Tensor, targets: Tensor, queries: Tensor, *, k: Sequence[int], self_offset: int | None = None
) -> dict[int, Tensor]:
    """Return, for each k, the mean targets (n, c) of the k nearest images of each query: (queries, c).

    An image weighs as it does in `weighted_knn`, so that the mean of a 0 or 1 is a share of the votes.
    """
    _warn_of_few(k, len(bank) - (self_offset is not None))
    cosines, rows = nearest(bank, queries, k=max(k), self_offset=self_offset)
    # In float64, which a Mac's GPU lacks: images whose neighbours all agree have equal means, and tie.
    dtype = torch.float32 if cosines.device.type == "mps" else torch.float64
    weights = vote_logits(cosines).exp().to(dtype)
    values = targets.to(rows.device).to(dtype)
    if not len(queries):  # of one process of many
        return {wanted: weights.new_zeros(0, values.shape[1]).float() for wanted in k}
    shares = {wanted: F.normalize(weights[:, :wanted], p=1) for wanted in k}
    return {
        wanted: F.embedding_bag(rows[:, :wanted], values, mode="sum", per_sample_weights=share).float()
        for wanted, share in shares.items()
    }


def class_scores(
    cosines: Tensor, neighbour_classes: Tensor, *, k: Sequence[int], classes: int
) -> dict[int, Tensor]:
    """Return the classes' scores for each k: (queries, classes), from neighbours with the nearest first."""
    weights = vote_logits(cosines).exp()
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
    best, order = scores.sort(dim=1, descending=True, stable=True)
    return labels[order[:, :RANKED]].masked_fill(best[:, :RANKED] <= 0, NO_CLASS)

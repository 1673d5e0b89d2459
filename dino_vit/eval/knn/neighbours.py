"""Exact nearest neighbours by cosine, at the speed of 16-bit products, whatever fits into memory.

A bank is searched chunk by chunk, so that it may be a memory map that no memory holds. In each chunk a cheap
search makes a shortlist with every neighbour on it; then those on it are compared exactly, by one formula. So
the results are the same whichever search it was: the greater cosine is nearer, of equal ones the lower row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.eval.knn import shortlist
from dino_vit.eval.knn.shortlist import Search, open_finder

Matrix = Tensor | NDArray[Any]  # an array may be a memory map

_BANK = 2**26  # numbers of the bank that are held at a time, as float32
_FEWEST_ROWS = 4096  # of a chunk
_ROUNDING = 2**-20  # how far a length in float32 may be off
_PRODUCTS = 2**24  # that are held at a time
_NOTHING = torch.iinfo(torch.int64).min
_LAST_ROW = 2**32 - 1


def nearest(
    bank: Matrix, queries: Tensor, *, k: int, own: int | None = None, search: Search = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the cosines with the k nearest bank rows and the rows, nearest first: (queries, k) each.

    Works on the device of the queries. With `own`, query i is bank row own + i and does not find itself.
    Fewer than k rows are all found. `search` is about speed alone: by default it is what is faster here.
    """
    device = queries.device
    if device.type not in ("cpu", "cuda"):  # such as mps, where not all the operations are
        cosines, rows = nearest(bank, queries.cpu(), k=k, own=own, search=search)
        return cosines.to(device), rows.to(device)
    queries = unit(queries)
    found = min(k, len(bank) - (own is not None))
    best = torch.full((len(queries), found), _NOTHING, device=device)
    chunk_rows = max(_BANK // queries.shape[1], _FEWEST_ROWS)
    for start in range(0, len(bank) if best.numel() else 0, chunk_rows):
        chunk = unit(torch.as_tensor(bank[start : start + chunk_rows], device=device))
        finder = open_finder(search, chunk, found)
        parts = -(-len(queries) // finder.queries)
        size = -(-len(queries) // max(1, parts))  # even, so that one buffer serves all of them
        for first in range(0, len(queries), max(1, size)):
            part = slice(first, first + size)
            itself = None if own is None else torch.arange(len(queries), device=device)[part] + own - start
            for some, rows in finder.shortlist(queries[part], _cosines(best[part, -1]), itself):
                places = some + first
                cosines = exact_cosines(queries[places], chunk, rows)
                keys = _keys(cosines, torch.where(rows < 0, rows, rows + start))
                best[places] = torch.cat([best[places], keys], 1).topk(found).values
    return _cosines(best), _LAST_ROW - (best & _LAST_ROW)


def exact_cosines(queries: Tensor, rows: Tensor, listed: Tensor) -> Tensor:
    """Return the products of unit queries with listed rows, (queries, most), -inf for row -1.

    The product of a query and a row does not depend on what else is listed.
    """
    if queries.device.type == "cpu" and shortlist.FAISS:
        import faiss

        products = np.empty(listed.shape, np.float32)
        arrays = products, queries.contiguous().numpy(), rows.numpy(), listed.contiguous().numpy()
        multiply = faiss.fvec_inner_products_by_idx  # type: ignore[attr-defined]  # its stubs lack it
        multiply(*map(faiss.swig_ptr, arrays), queries.shape[1], *listed.shape)
        return torch.from_numpy(products)
    size = max(1, _PRODUCTS // max(1, listed.shape[1] * queries.shape[1]))
    parts = [slice(start, start + size) for start in range(0, len(listed), size)]
    sums = [
        _added(rows[listed[part].clamp(min=0)] * rearrange(queries[part], "q d -> q 1 d")) for part in parts
    ]
    return torch.cat(sums).masked_fill(listed < 0, -torch.inf)


def _added(products: Tensor) -> Tensor:
    """Add up the last axis by halves: the order of the sums does not depend on the other axes."""
    while (width := products.shape[-1]) > 1:
        half = (width + 1) // 2
        products[..., : width - half] += products[..., half:]
        products = products[..., :half]
    return products[..., 0]


def _keys(cosines: Tensor, rows: Tensor) -> Tensor:
    """Return numbers in the order of the neighbours: the greater cosine first, the lower row among equals."""
    bits = (cosines + 0).view(torch.int32)  # of -0 and 0 they would differ
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return torch.where(rows < 0, _NOTHING, (ordered << 32) | (_LAST_ROW - rows))


def _cosines(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).int()
    cosines = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)
    return cosines.masked_fill(keys == _NOTHING, -torch.inf)


def unit(features: Tensor) -> Tensor:
    """Return features of length 1 in float32; zeros stay, and so do rows that are of length 1 already."""
    features = features.float()
    lengths = features.norm(dim=1, keepdim=True)
    if not lengths.isfinite().all():
        raise ValueError("some features are not finite, so they have no neighbours; is the network broken?")
    lengths = torch.where((lengths - 1).abs() < _ROUNDING, 1.0, lengths)
    if (lengths == 1).all():
        return features.contiguous()
    return (features / lengths.clamp(min=1e-12)).contiguous()

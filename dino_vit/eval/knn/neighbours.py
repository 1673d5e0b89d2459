"""Exact nearest neighbours by cosine, on a CPU or a GPU, in a bank that may be larger than the memory.

The bank, which may be a memory map, is searched chunk by chunk. By default torch makes shortlists by products
in 16 bits and then compares exactly, which is 1.7 times as fast as FAISS's flat index on a CPU with bfloat16
(`benchmarks/knn.py`). On a CPU without it FAISS's flat index is faster and is the default. The greater cosine
is nearer; of equal ones, torch lists the lower row first.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.runtime import DTYPES, choose_precision
from dino_vit.eval.knn.shortlist import Shortlist

Matrix = Tensor | NDArray[Any]  # an array may be a memory map
Search = Literal["auto", "faiss", "torch"]

# On macOS FAISS and torch each bring an OpenMP, and a process with two of them is aborted. Elsewhere FAISS
# may not be installed. Torch needs neither.
FAISS = sys.platform != "darwin" and find_spec("faiss") is not None
_FAISS_GPU_NEIGHBOURS = 2048  # the most that FAISS finds on a GPU
_BANK = 2**26  # numbers of the bank in memory at a time, as float32
_FEWEST_ROWS = 4096  # of a chunk
_ROUNDING = 2**-20  # how far a length in float32 may be off
_PRODUCTS = 2**24  # in memory at a time
_NOTHING = torch.iinfo(torch.int64).min
_LAST_ROW = 2**32 - 1


def nearest(
    bank: Matrix, queries: Tensor, *, k: int, own: int | None = None, search: Search = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the cosines with the k nearest bank rows and the rows, nearest first: (queries, k) each.

    Works on the device of the queries. With `own`, query i is bank row own + i and does not find itself.
    A bank of fewer than k rows is returned whole. The searches agree up to rounding in float32.
    """
    device = queries.device
    if device.type not in ("cpu", "cuda"):  # mps lacks some of the operations
        cosines, rows = nearest(bank, queries.cpu(), k=k, own=own, search=search)
        return cosines.to(device), rows.to(device)
    queries = unit(queries)
    k = min(k, len(bank) - (own is not None))
    dtype = torch.float16 if device.type == "cuda" else DTYPES[choose_precision("auto", device)]
    by_faiss = search == "faiss" or (search == "auto" and FAISS and dtype == torch.float32)
    if by_faiss and not FAISS:
        raise ValueError("search=faiss needs FAISS, which is not available here; use search=torch")
    best = torch.full((len(queries), k), _NOTHING, device=device)
    chunk_rows = max(_BANK // queries.shape[1], _FEWEST_ROWS)
    for start in range(0, len(bank) if best.numel() else 0, chunk_rows):
        chunk = unit(torch.as_tensor(bank[start : start + chunk_rows], device=device))
        itself = None if own is None else own - start
        if by_faiss:
            found = _keys(*_search_by_faiss(chunk, queries, k, itself), start)
            best = torch.cat([best, found], 1).topk(k).values
            continue
        shortlist = Shortlist(chunk, k, dtype)
        for part, rows in shortlist.search(queries, _cosines(best[:, -1]), itself):
            found = _keys(exact_cosines(queries[part], chunk, rows), rows, start)
            best[part] = torch.cat([best[part], found], 1).topk(k).values
    return _cosines(best), _LAST_ROW - (best & _LAST_ROW)


def _search_by_faiss(chunk: Tensor, queries: Tensor, k: int, own: int | None) -> tuple[Tensor, Tensor]:
    """Return the cosines with the k nearest rows of a chunk and the rows, -1 for none."""
    import faiss

    index: faiss.Index = faiss.IndexFlatIP(chunk.shape[1])
    if chunk.is_cuda and faiss.get_num_gpus() and k < _FAISS_GPU_NEIGHBOURS:
        index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), chunk.device.index, index)
    else:
        faiss.omp_set_num_threads(torch.get_num_threads())
    index.add(chunk.cpu().numpy())
    found = index.search(queries.cpu().numpy(), min(k + (own is not None), len(chunk)))
    cosines, rows = (torch.from_numpy(array).to(queries.device) for array in found)
    if own is not None:
        itself = torch.arange(own, own + len(queries), device=rows.device)
        rows = rows.masked_fill(rows == rearrange(itself, "q -> q 1"), -1)
    return cosines, rows


def exact_cosines(queries: Tensor, rows: Tensor, listed: Tensor) -> Tensor:
    """Return the products of unit queries with listed rows, (queries, most), -inf for row -1.

    The product of a query and a row does not depend on what else is listed.
    """
    if queries.device.type == "cpu" and FAISS:
        import faiss

        products = np.empty(listed.shape, np.float32)
        arrays = products, queries.contiguous().numpy(), rows.numpy(), listed.contiguous().numpy()
        multiply = faiss.fvec_inner_products_by_idx  # type: ignore[attr-defined]  # its stubs lack it
        multiply(*map(faiss.swig_ptr, arrays), queries.shape[1], *listed.shape)
        return torch.from_numpy(products)
    size = max(1, _PRODUCTS // max(1, listed.shape[1] * queries.shape[1]))
    sums = [
        _sum(rows[some.clamp(min=0)] * rearrange(of_some, "q d -> q 1 d"))
        for some, of_some in zip(torch.split(listed, size), torch.split(queries, size), strict=True)
    ]
    return torch.cat(sums).masked_fill(listed < 0, -torch.inf)


def _sum(products: Tensor) -> Tensor:
    """Add up the last axis by halves: the order of the sums does not depend on the other axes."""
    while (width := products.shape[-1]) > 1:
        half = (width + 1) // 2
        products[..., : width - half] += products[..., half:]
        products = products[..., :half]
    return products[..., 0]


def _keys(cosines: Tensor, rows: Tensor, start: int) -> Tensor:
    """Return integers in the order of the neighbours: the greater cosine first, then the lower bank row."""
    bits = (cosines + 0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return torch.where(rows < 0, _NOTHING, (ordered << 32) | (_LAST_ROW - rows - start))


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

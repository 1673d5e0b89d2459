"""Exact nearest neighbours by cosine, on a CPU or a GPU, in a bank that may be larger than the memory.

The bank, which may be a memory map, is searched chunk by chunk. By default torch makes shortlists by products
in 16 bits and then compares exactly, which is 1.7 times as fast as FAISS's flat index on a CPU with bfloat16
(`benchmarks/knn.py`). On a CPU without it FAISS's flat index is faster and is the default. The greater cosine
is nearer; of equal ones, torch lists the lower row first.

A shortlist has the rows of a chunk of the bank that can be among the nearest neighbours of a query. A score
a in 16 bits differs from the exact cosine e of a query q and a row b by less than a known error E: by
Cauchy-Schwarz, rounding q by δq and b by δb moves q·b by at most |q||δb| + |δq||b + δb|, lengths that are
measured; adding D products in float32, in any order, loses less than D·2⁻²² of |q||b|. If k rows have a ≥
t, their e is at least t - E, so is that of the k-th nearest, and each of the k nearest has a ≥ t - 2E:
these rows are the shortlist. To make E small the mean of the chunk is subtracted from its rows, which moves
all scores of a query alike.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core.runtime import DTYPES, choose_precision

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
# Of the shortlists:
_PREPARED = 2048  # rows rounded at a time, few enough to stay in the cache
_COLUMNS = 16384  # of scores per product, few enough to stay in the cache
_CACHE_LINE = 32  # 16-bit numbers
_GROUP = 16  # scores that are skipped together if the greatest of them is too low
_SCORES = {"cpu": 2**25, "cuda": 2**29}  # in memory at a time
_LISTED = 2**24  # rows on the shortlists in memory at a time
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


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


def format_cosines(cosines: Sequence[float]) -> list[str]:
    """Return cosines with the digits that tell them apart, four to six: float32 resolves no more near 1."""
    exact = [f"{cosine:.6f}" for cosine in cosines]
    for digits in (4, 5):
        texts = [f"{cosine:.{digits}f}" for cosine in cosines]
        if len(set(texts)) == len(set(exact)):
            return texts
    return exact


class Shortlist:
    """Finds the rows of a chunk of unit vectors that can be among the k nearest of a query."""

    def __init__(self, chunk: Tensor, k: int, dtype: torch.dtype) -> None:
        self.k, self.rows, self.dtype = k, len(chunk), dtype
        # At least one score of a group reaches the group's greatest, so k groups account for k rows.
        self.group = max(g for g in (1, 2, 4, 8, _GROUP) if g == 1 or len(chunk) >= 4 * g * k)
        blocks, multiple = -(-len(chunk) // _COLUMNS), self.group * _CACHE_LINE
        self.columns = -(-len(chunk) // (blocks * multiple)) * multiple
        self.blocks = -(-len(chunk) // self.columns)
        self.mean = chunk.mean(0)
        self.bank = chunk.new_zeros(self.blocks * self.columns, chunk.shape[1], dtype=dtype)
        lengths, errors = [], []
        for start in range(0, len(chunk), _PREPARED):
            rows = chunk[start : start + _PREPARED] - self.mean
            rounded = self.bank[start : start + len(rows)].copy_(rows)
            lengths.append(rounded.norm(dim=1, dtype=torch.float32).amax())
            errors.append(rows.sub_(rounded).norm(dim=1).amax())
        self.length = torch.stack(lengths).amax()
        # The second term is the rounding of `rows` when the mean was subtracted.
        self.error = torch.stack(errors).amax() + 2**-23 * self.length

    def search(self, queries: Tensor, floor: Tensor, own: int | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the queries and their rows (n, most), -1 for none.

        Rows with a cosine below a query's `floor` may be missing, and so is row own + i of query i.
        """
        device = queries.device
        passes = max(1, -(-len(queries) * self.rows // _SCORES[device.type]))
        size = -(-len(queries) // passes)  # equal passes share one buffer
        # CUDA adds the products in float32 and stores them as they are.
        stored = torch.float32 if device.type == "cuda" else self.dtype
        scores = torch.empty(self.blocks, size, self.columns, dtype=stored, device=device)
        for start in range(0, len(queries), size):
            part = slice(start, min(start + size, len(queries)))
            of_part = scores[:, : part.stop - start]
            greatest = self._score(queries[part], None if own is None else own + start, of_part)
            limit = self._limit(queries[part], floor[part], greatest)
            for some, rows in self._select(of_part, greatest, limit):
                yield slice(start + some.start, start + some.stop), rows

    def _score(self, queries: Tensor, own: int | None, scores: Tensor) -> Tensor:
        """Fill in scores (blocks, queries, columns) and return their greatest (queries, blocks, groups).

        The maxima are those of the bits read as integers, which takes half the time. Positive numbers are in
        the same order as their bits; the maximum of a group without any is some negative number.
        """
        rounded, bits = queries.to(self.dtype), scores.view(_BITS[scores.dtype])
        greatest = bits.new_empty(len(queries), self.blocks, self.columns // self.group)
        for block in range(self.blocks):
            first = block * self.columns
            rows = self.bank[first : first + self.columns].T
            # The products are added up in float32.
            if queries.is_cuda:
                scores[block].copy_(torch.mm(rounded, rows, out_dtype=torch.float32))
            else:
                torch.mm(rounded, rows, out=scores[block])
            scores[block, :, self.rows - first :] = -torch.inf  # padding
            if own is not None:
                scores[block].diagonal(own - first).fill_(-torch.inf)
            members = rearrange(bits[block], "q (g c) -> q g c", g=self.group)
            torch.amax(members, 1, out=greatest[:, block])
        return greatest.view(scores.dtype)

    def _limit(self, queries: Tensor, floor: Tensor, greatest: Tensor) -> Tensor:
        """Return the score that a row needs to be listed."""
        error, number = self.error_of(queries), torch.finfo(greatest.dtype)
        limit = floor - (queries * self.mean).sum(1) - error
        if greatest[0].numel() >= self.k:
            reached = _kth_greatest(greatest.flatten(1), self.k).float()
            # Epsilon is twice what rounding a score can change.
            limit = torch.maximum(limit, reached - number.eps * reached.abs() - 2 * error)
        # Bits do not order negative scores: where these matter, all rows but those at -inf are listed.
        limit = limit.to(greatest.dtype)
        return limit.masked_fill(limit <= 0, number.min)

    def _select(self, scores: Tensor, greatest: Tensor, limit: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the queries and the rows whose scores reach the limit."""
        promising = (greatest >= rearrange(limit, "q -> q 1 1")) | rearrange(limit < 0, "q -> q 1 1")
        groups = rearrange(scores, "b q (g c) -> b q c g", g=self.group)
        most = max(1, int(promising.flatten(1).sum(1).amax())) * self.group
        size = max(1, _LISTED // most)
        for start in range(0, len(limit), size):
            part = slice(start, min(start + size, len(limit)))
            query, block, column = promising[part].nonzero(as_tuple=True)
            reached = groups[block, query + start, column] >= rearrange(limit[part][query], "p -> p 1")
            group, member = reached.nonzero(as_tuple=True)
            rows = block[group] * self.columns + member * groups.shape[2] + column[group]
            yield part, _padded(query[group], rows, part.stop - start)

    def error_of(self, queries: Tensor) -> Tensor:
        """Return how far scores can be off, before they are rounded: from the exact ones less the mean's."""
        rounded, width = queries.to(self.dtype).float(), queries.shape[1]
        error = self.error + (queries - rounded).norm(dim=1) * self.length
        error += width * 2**-22 * rounded.norm(dim=1) * self.length  # adding up the scores
        # The last term is adding up the exact cosines and the mean's; 1 % is for these lines themselves.
        return 1.01 * (error + (width + 1) * 2**-22)


def _kth_greatest(scores: Tensor, k: int) -> Tensor:
    """Return, for each row of scores, the k-th greatest by their bits."""
    bits = scores.view(_BITS[scores.dtype])
    if bits.is_cuda:
        kth = bits.topk(k, sorted=False).values.amin(1)
    else:  # NumPy's partition is several times as fast as topk on a CPU
        column = bits.shape[1] - k
        kth = torch.from_numpy(np.partition(bits.numpy(), column, axis=1)[:, column])
    return kth.view(scores.dtype)


def _padded(queries: Tensor, rows: Tensor, count: int) -> Tensor:
    """Set the rows of each query, in order of the queries, side by side: (count, most), -1 after the last."""
    counts = torch.bincount(queries, minlength=count)
    columns = torch.arange(len(queries), device=rows.device) - (counts.cumsum(0) - counts)[queries]
    padded = rows.new_full((count, int(counts.amax())), -1)
    padded[queries, columns] = rows
    return padded

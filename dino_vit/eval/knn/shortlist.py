"""Shortlists: of the rows of a chunk, those that can be among the nearest of a query, cheaply found.

A cheap score a of a query q and a row b differs from the exact one e by less than an error E that is known:
by Cauchy-Schwarz, rounding q by δq and b by δb moves q·b by no more than |q||δb| + |δq||b + δb|, lengths that
are measured; D products that are added in float32, in any order, lose less than D·2⁻²² of |q||b|. If k rows
have a ≥ t, their e is at least t - E, so is that of the k-th nearest, and each of the k nearest has
a ≥ t - 2E: these are the shortlist. To make E small, the mean of the chunk is subtracted from its rows: that
moves all scores of a query alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal, Protocol

import numpy as np
import torch
from einops import rearrange, reduce
from torch import Tensor

from dino_vit.core.distributed import world_size
from dino_vit.core.runtime import DTYPES, choose_precision
from dino_vit.models.onednn import linear

Search = Literal["auto", "faiss", "torch"]

# On macOS FAISS and torch each bring an OpenMP, and a process with two of them is ended. Elsewhere an
# environment may lack it, and torch finds the same.
FAISS = sys.platform != "darwin" and find_spec("faiss") is not None
_CACHED = 2048  # rows that are prepared at a time, and
_COLUMNS = 16384  # of scores that one product computes: few enough to stay in the cache
_LINE = 32  # of them begin where the cache's lines do
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_GROUP = 16  # scores that are passed over at once if the greatest of them is too low
_SCORES = {"cpu": 2**25, "cuda": 2**29}  # that are held at a time
_LISTED = 2**24  # rows that are looked at together
_MARGIN = 16  # neighbours beyond the k-th that FAISS is asked for
_FAISS_GPU_NEIGHBOURS = 2048  # it finds no more


class Finder(Protocol):
    """Something that names, of a chunk of unit rows, those that can be among the k nearest of a query."""

    queries: int  # that it takes at a time

    def shortlist(
        self, queries: Tensor, floor: Tensor, own: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield places of queries (n,) and their rows (n, most), -1 for none; what is below a floor can lack.

        With `own`, query i is row own[i], which may be outside the chunk, and does not find itself.
        """


def open_finder(search: Search, chunk: Tensor, k: int) -> Finder:
    """Choose a search of a chunk of unit rows; all of them serve equally exact results."""
    device = chunk.device
    dtype = torch.float16 if device.type == "cuda" else DTYPES[choose_precision("auto", device)]
    if search == "torch" or (search == "auto" and dtype != torch.float32):
        return TorchFinder(chunk, k, dtype)
    if FAISS and _faiss_finds(k, device):
        return FaissFinder(chunk, k)
    if search == "faiss":
        raise ValueError(f"FAISS has no search for {k} neighbours on {device.type} here; take search=torch")
    return TorchFinder(chunk, k, dtype)


def _faiss_finds(k: int, device: torch.device) -> bool:
    import faiss

    if device.type == "cpu":
        return True
    return device.type == "cuda" and (faiss.get_num_gpus() > 0 and k + _MARGIN < _FAISS_GPU_NEIGHBOURS)


class TorchFinder:
    """Shortlist by blocks of scores in a short type, of which only the promising groups are looked at."""

    def __init__(self, chunk: Tensor, k: int, dtype: torch.dtype) -> None:
        self.k, self.rows, self.dtype = k, len(chunk), dtype
        self.queries = max(1, _SCORES[chunk.device.type] // len(chunk))
        # Of every group at least one score reaches the greatest, so k groups stand for k rows.
        self.group = max(g for g in (1, 2, 4, 8, _GROUP) if g == 1 or len(chunk) >= 4 * g * k)
        blocks, whole = -(-len(chunk) // _COLUMNS), self.group * _LINE
        self.columns = -(-len(chunk) // (blocks * whole)) * whole
        blocks = -(-len(chunk) // self.columns)  # the last of them is not empty
        self.bank = torch.empty(blocks * self.columns, chunk.shape[1], dtype=dtype, device=chunk.device)
        self.bank[len(chunk) :] = 0
        self.mean = chunk.mean(0)
        lengths, errors = [], []
        for start in range(0, len(chunk), _CACHED):
            rows = chunk[start : start + _CACHED] - self.mean
            low = self.bank[start : start + len(rows)].copy_(rows)
            lengths.append(low.norm(dim=1, dtype=torch.float32).amax())
            errors.append(rows.sub_(low).norm(dim=1).amax())
        self.length = torch.stack(lengths).amax()
        # What `rows` lost to rounding when the mean was subtracted counts too.
        self.error = torch.stack(errors).amax() + 2**-23 * self.length
        # On CUDA products in float16 are stored as they were added, in float32.
        stored = torch.float32 if chunk.is_cuda else dtype
        self.scores = torch.empty(0, dtype=stored, device=chunk.device)

    def shortlist(
        self, queries: Tensor, floor: Tensor, own: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        scores, bits = self._score(queries, own)
        greatest = bits.view(scores.dtype)
        limit = self._limit(queries, floor, bits)
        if not (limit > 0).all():  # the bits do not tell which groups reach it
            greatest = reduce(scores, "b q (g c) -> q b c", "max", g=self.group)
            limit = self._limit(queries, floor, greatest.float())
        promising = greatest >= rearrange(limit, "q -> q 1 1")
        apart = self.columns // self.group  # are the members of a group
        groups = scores.as_strided((scores.numel() - apart * (self.group - 1), self.group), (1, apart))
        for part in _parts(promising.flatten(1).sum(1), _LISTED // self.group):
            query, block, column = promising[part].nonzero(as_tuple=True)
            first = (block * len(queries) + query + part.start) * self.columns + column
            reached = groups[first] >= rearrange(limit[part][query], "p -> p 1")
            of, member = reached.nonzero(as_tuple=True)
            rows = block[of] * self.columns + column[of] + member * apart
            places = torch.arange(part.start, part.stop, device=rows.device)
            yield places, _padded(query[of], rows, len(places))

    def _score(self, queries: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the scores (blocks, queries, columns) and the groups' greatest (queries, blocks, groups).

        The greatest are of the scores' bits as integers, whose maxima are found in half the time: theirs are
        in order down to 0, and where all scores of a group are below it, so is what stands for it.
        """
        blocks = len(self.bank) // self.columns
        shape = blocks, len(queries), self.columns
        if self.scores.shape != shape:
            self.scores = self.scores.new_empty(shape)
        scores, low = self.scores, queries.to(self.dtype)
        bits = scores.view(_BITS[scores.dtype])
        greatest = bits.new_empty(len(queries), blocks, self.columns // self.group)
        for block in range(blocks):
            start = block * self.columns
            _multiply(low, self.bank[start : start + self.columns], scores[block])
            scores[block, :, self.rows - start :] = -torch.inf
            if own is not None:
                _leave_out(scores[block], own - start)
            members = rearrange(bits[block], "q (g c) -> q g c", g=self.group)
            torch.amax(members, 1, out=greatest[:, block])
        return scores, greatest

    def _limit(self, queries: Tensor, floor: Tensor, greatest: Tensor) -> Tensor:
        """Return what the score of a listed row is at least, going by the groups' greatest or their bits."""
        error, number = self.error_of(queries), torch.finfo(self.scores.dtype)
        limit = floor - (queries * self.mean).sum(1) - error
        if greatest[0].numel() >= self.k:
            reached = _kth_greatest(greatest.flatten(1), self.k)
            if not greatest.is_floating_point():
                reached = reached.view(self.scores.dtype)
            reached = reached.float()
            # Epsilon is twice what one rounding can change.
            limit = torch.maximum(limit, reached - number.eps * reached.abs() - 2 * error)
        return limit.clamp(min=number.min).to(self.scores.dtype)  # what is left out has -inf

    def error_of(self, queries: Tensor) -> Tensor:
        """Return how far scores can be off, before they are rounded: from the exact ones less the mean's."""
        low, width = queries.to(self.dtype).float(), queries.shape[1]
        error = self.error + (queries - low).norm(dim=1) * self.length
        error += width * 2**-22 * low.norm(dim=1) * self.length  # as the scores are added up
        return 1.01 * (error + (width + 1) * 2**-22)  # as the exact ones and the mean's are; these lines too


class FaissFinder:
    """Shortlist by FAISS in float32; where it cannot be shown that it missed none, by torch."""

    def __init__(self, chunk: Tensor, k: int) -> None:
        import faiss

        self.chunk, self.k = chunk, k
        self.queries = max(1, _SCORES[chunk.device.type] // (k + _MARGIN))
        self.index: faiss.Index = faiss.IndexFlatIP(chunk.shape[1])
        if not chunk.is_cuda:
            faiss.omp_set_num_threads(torch.get_num_threads())
        elif world_size() == 1:
            self.index = faiss.index_cpu_to_all_gpus(self.index)
        else:
            resources = faiss.StandardGpuResources()
            self.index = faiss.index_cpu_to_gpu(resources, chunk.device.index, self.index)
        self.index.add(chunk.cpu().numpy())

    def shortlist(
        self, queries: Tensor, floor: Tensor, own: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        asked = min(self.k + (own is not None) + _MARGIN, len(self.chunk))
        found = self.index.search(queries.cpu().numpy(), asked)
        scores, rows = (torch.from_numpy(array).to(queries.device) for array in found)
        lowest = scores[:, -1]
        if own is not None:
            me = rows == rearrange(own, "q -> q 1")
            scores, rows = scores.masked_fill(me, -torch.inf), rows.masked_fill(me, -1)
        missed = torch.zeros(len(queries), dtype=torch.bool, device=queries.device)
        if asked < len(self.chunk):
            error = (queries.shape[1] + 1) * 2**-22  # of these scores and of the exact ones together
            needed = scores.topk(self.k, sorted=False).values.amin(1)
            missed = (lowest >= needed - 2 * error) & (lowest >= floor - error)
        (clear,) = (~missed).nonzero(as_tuple=True)
        yield clear, rows[clear]
        (unclear,) = missed.nonzero(as_tuple=True)
        if len(unclear):
            other = TorchFinder(self.chunk, self.k, torch.float32)
            own = None if own is None else own[unclear]
            for places, rows in other.shortlist(queries[unclear], floor[unclear], own):
                yield unclear[places], rows


def _kth_greatest(scores: Tensor, k: int) -> Tensor:
    """Return of each row the score that k reach."""
    if scores.is_cuda:
        return scores.topk(k, sorted=False).values.amin(1)
    place = scores.shape[1] - k  # NumPy's partition is several times as fast as topk on a CPU
    return torch.from_numpy(np.partition(scores.numpy(), place, axis=1)[:, place])


def _leave_out(scores: Tensor, columns: Tensor) -> None:
    """Set one score of each query to -inf, if it has such a column."""
    place = rearrange(columns.clamp(0, scores.shape[1] - 1), "q -> q 1")
    inside = rearrange(columns, "q -> q 1") == place
    scores.scatter_(1, place, scores.gather(1, place).masked_fill(inside, -torch.inf))


def _multiply(queries: Tensor, rows: Tensor, out: Tensor) -> None:
    """Multiply with products that are added up in float32."""
    if out.dtype == queries.dtype == torch.float32:
        out.copy_(linear(queries, rows))
    elif queries.is_cuda:
        out.copy_(torch.mm(queries, rows.T, out_dtype=torch.float32))
    else:
        torch.mm(queries, rows.T, out=out)


def _parts(counts: Tensor, most: int) -> Iterator[slice]:
    """Cut queries into runs, of two or more only if the longest count times their number is within bounds."""
    longest, start = counts.tolist(), 0
    while start < len(longest):
        end, top = start + 1, max(longest[start], 1)
        while end < len(longest) and max(top, longest[end]) * (end + 1 - start) <= most:
            top, end = max(top, longest[end]), end + 1
        yield slice(start, end)
        start = end


def _padded(queries: Tensor, rows: Tensor, count: int) -> Tensor:
    """Set the rows of each query, in order of the queries, side by side: (count, most), -1 after the last."""
    counts = torch.bincount(queries, minlength=count)
    places = torch.arange(len(queries), device=rows.device) - (counts.cumsum(0) - counts)[queries]
    padded = rows.new_full((count, int(counts.amax())), -1)
    padded[queries, places] = rows
    return padded

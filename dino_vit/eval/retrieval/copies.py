"""Copy detection: how well the originals of copies are found by cosine, by query and over all pairs.

The micro-AP takes all pairs of a query and an original as one ranked list: it asks for one threshold that
tells copies from other images for every query. It is exact, and no list is kept: for each true pair the pairs
that are at least as similar are counted, block by block. Pairs whose cosines differ by less than 1e-6 are
ties, and of ties the true pair counts as the last. On the same random features the mAP by trapezoids equals
that of the Holidays evaluation, which the code of 2021 uses, to the last digit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from dino_vit.core.distributed import all_gather, share
from dino_vit.eval.accuracy import Accuracy, accuracy
from dino_vit.eval.confidence import Interval, measured_share, with_confidence
from dino_vit.eval.neighbours import Matrix, unit

Transform = Callable[[Tensor], Tensor]

_TIE = 1e-6
_PRECISION = 0.9
_LEVELS = 200  # at which pairs are counted by query, for the confidence of the micro-AP
_COUNTS = 2**22  # in memory at a time, and as many cosines
_QUERIES = 256  # of a block
_NUMBERS = 2**24  # of the features of originals, in memory at a time


class CopyFigures(NamedTuple):
    """How well the originals of copies are found; in per cent."""

    recall_at_1: Accuracy  # queries whose nearest image is an original of theirs
    mean_ap: Interval  # over the queries that have an original
    mean_ap_trapezoid: float  # the same by trapezoids, as INRIA's Holidays and Copydays are judged
    micro_ap: Interval
    recall_at_precision_90: float  # of the true pairs, at the lowest threshold with that precision


class Search(NamedTuple):
    """What was found for each query, in order, and how many pairs are as similar as the true ones."""

    pairs: Tensor  # (p, 2), the true ones: rows of query and original, sorted by query
    nearest: Tensor  # (q,), row of the nearest original of each query
    own: Tensor  # (p, 2), originals at least as near to the query of a pair: true ones, and all
    total: Tensor  # (p, 2), the same over all queries, from the lowest level to the highest
    counts: Tensor  # (q, levels, 2), by query at some of the levels

    @property
    def found(self) -> Tensor:
        """Which queries with an original (in their order) have it as the nearest image."""
        first = (self.own[:, 0] == self.own[:, 1]).double()
        return _by_query(self.pairs, first, "amax") > 0


def search_originals(
    queries: Tensor,
    originals: Sequence[Matrix],
    pairs: Tensor,
    device: torch.device,
    transform: Transform = unit,
) -> Search:
    """Search for queries (q, D) among the rows of all matrices; each process takes a share of the queries.

    `pairs` (p, 2) are the true ones, a row each of a query and an original; `transform` makes features of
    length 1, such as a whitening. All processes must call it.
    """
    pairs = pairs[pairs[:, 0].argsort(stable=True)].to(device)
    parts = torch.split(pairs, _QUERIES)
    cosines = torch.cat([_true_cosines(queries, originals, some, transform) for some in parts])
    levels = cosines.sort().values - _TIE
    some_levels = torch.linspace(0, len(levels) - 1, min(_LEVELS, len(levels)), device=device).round().long()
    level = torch.searchsorted(levels, cosines - _TIE)  # of each pair
    mine = share(range(len(queries)))
    size = max(1, min(_QUERIES, _COUNTS // (len(levels) + 1)))
    none = torch.zeros(0, 2, dtype=torch.long, device=device)
    nearest, own, counts = [none[:, 0]], [none], [none.new_zeros(0, len(some_levels), 2)]
    total = none.new_zeros(len(levels), 2)
    for start in range(mine.start, mine.stop, size):
        rows = range(start, min(start + size, mine.stop))
        inside = (pairs[:, 0] >= rows.start) & (pairs[:, 0] < rows.stop)
        true = pairs[inside] - pairs.new_tensor([start, 0])
        of_rows = transform(queries[rows.start : rows.stop].to(device))
        chunk = max(1, min(_COUNTS // len(rows), _NUMBERS // queries.shape[1]))
        chunks = _chunks(originals, chunk, device, transform)
        both, best = _count(of_rows, chunks, true, levels)
        nearest.append(best)
        own.append(both[true[:, 0], level[inside]])
        counts.append(both[:, some_levels])
        total += both.sum(0)
    gathered = map(all_gather, (torch.cat(nearest), torch.cat(own), total[None], torch.cat(counts)))
    nearest_of_all, own_of_all, totals, counts_of_all = (one.cpu() for one in gathered)
    # On the CPU: figures are float64, which mps lacks.
    return Search(pairs.cpu(), nearest_of_all, own_of_all, totals.sum(0), counts_of_all)


def _true_cosines(
    queries: Tensor, originals: Sequence[Matrix], pairs: Tensor, transform: Transform
) -> Tensor:
    found = torch.empty(len(pairs), queries.shape[1], device=pairs.device)
    start = 0
    for bank in originals:
        inside = (pairs[:, 1] >= start) & (pairs[:, 1] < start + len(bank))
        rows = (pairs[inside, 1] - start).cpu()
        found[inside] = torch.as_tensor(bank[rows], dtype=torch.float32).to(pairs.device)
        start += len(bank)
    return (transform(queries[pairs[:, 0].cpu()].to(pairs.device)) * transform(found)).sum(1)


def _count(
    queries: Tensor, originals: Iterable[tuple[int, Tensor]], pairs: Tensor, levels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many pairs, true ones and all, reach each level, and the nearest original of each query."""
    counts = torch.zeros(2, len(queries), len(levels) + 1, dtype=torch.long, device=queries.device)
    cosines = torch.full((len(queries),), -torch.inf, device=queries.device)
    nearest = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    rows = torch.arange(len(queries), device=queries.device)[:, None]
    for start, chunk in originals:
        scores = queries @ chunk.T
        query, original = pairs[(pairs[:, 1] >= start) & (pairs[:, 1] < start + len(chunk))].unbind(1)
        # The same products are counted as true and among all: others differ in the last bits.
        counts[0] += _histogram(query, scores[query, original - start], levels, len(queries))
        counts[1] += _histogram(rows.expand_as(scores), scores, levels, len(queries))
        best, row = scores.max(1)
        nearest = torch.where(best > cosines, row + start, nearest)
        cosines = torch.maximum(best, cosines)
    at_least = counts.flip(2).cumsum(2).flip(2)[..., 1:]
    return rearrange(at_least, "kind query level -> query level kind"), nearest


def _chunks(
    originals: Sequence[Matrix], size: int, device: torch.device, transform: Transform
) -> Iterator[tuple[int, Tensor]]:
    """Yield transformed rows of all matrices, with the number of those before them."""
    before = 0
    for bank in originals:
        for start in range(0, len(bank), size):
            yield before + start, transform(torch.as_tensor(bank[start : start + size], device=device))
        before += len(bank)


def _histogram(rows: Tensor, cosines: Tensor, levels: Tensor, count: int) -> Tensor:
    """Count the cosines of each of `count` rows by the number of levels that they reach."""
    reached = torch.searchsorted(levels, cosines.contiguous(), right=True)
    bins = (rows * (len(levels) + 1) + reached).flatten()
    return bins.bincount(minlength=count * (len(levels) + 1)).view(count, len(levels) + 1)


def _by_query(pairs: Tensor, values: Tensor, reduce: str) -> Tensor:
    """Return the mean or greatest value of the pairs of each query that has one."""
    queries, row = torch.unique(pairs[:, 0], return_inverse=True)
    return values.new_zeros(len(queries)).scatter_reduce(0, row, values, reduce, include_self=False)


def copy_figures(search: Search) -> CopyFigures:
    """Return how well originals are found."""
    true, as_near = search.own.double().unbind(1)
    before = torch.where(as_near > 1, (true - 1) / (as_near - 1).clamp(min=1), 1.0)
    average = _by_query(search.pairs, true / as_near, "mean")
    trapezoids = _by_query(search.pairs, (true / as_near + before) / 2, "mean")
    found, some = search.found, torch.arange(len(average)).numpy()
    precision = search.total[:, 0].double() / search.total[:, 1]
    recall = search.total[:, 0].double() / len(search.pairs)
    interval = with_confidence(search.counts.unbind(2), _micro_ap)
    return CopyFigures(
        recall_at_1=accuracy(int(found.sum()), len(found)),
        mean_ap=measured_share("mAP", some, average).interval,
        mean_ap_trapezoid=float(100 * trapezoids.mean()),
        micro_ap=Interval(float(100 * precision.mean()), interval.low, interval.high),
        recall_at_precision_90=float(100 * recall.where(precision >= _PRECISION, 0.0).amax()),
    )


def _micro_ap(true: Tensor, as_near: Tensor) -> Tensor:
    """Return the average precision of counts at levels, the lowest first, which all true pairs reach."""
    steps = true - torch.cat([true[1:], true.new_zeros(1)])
    return (steps * true / as_near.clamp(min=1)).sum() / true[0]

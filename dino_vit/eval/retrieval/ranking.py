"""How early the relevant images come when a bank is ranked by cosine to a query.

The cosines of the relevant images and those of the others are sorted apart, without their indices: the rank
of a relevant image is its place among its own plus the number of others before it. On one core of a CPU that
takes less than half the time of sorting the indices of the whole list. 100,000 images that search each other
with 384 numbers each take 5 to 7 minutes of one core, with 1,000 or 10 classes, and 1.1 GB of memory in all.

Blocks of queries bound the memory, and the bank, which may be a memory map, goes to the device in chunks. Of
equal cosines the relevant image counts as the later one, so that features that are all the same score no
better than chance. The trapezoidal precision and the junk are those of the Oxford buildings' evaluation,
which the 2021 code follows; the tests compare with its definition, rank by rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dino_vit.eval.neighbours import Matrix, unit

_COSINES = {"cpu": 2**23, "cuda": 2**27}  # of a block of queries with the whole bank
_BANK = 2**24  # numbers of the bank on the device at a time

# Of a slice of the queries, which of the bank (queries, n) are relevant and which are left out as junk.
Judgement = Callable[[slice], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Ranks:
    """The ranks of the relevant images of each query, the first one 1, without those left out."""

    values: Tensor  # (queries, most) in float64, ascending, then inf
    counts: Tensor  # (queries,), relevant images of each

    def average_precision(self) -> Tensor:
        """Return, of each query, the mean of the precision at every relevant image."""
        return self._mean(self._places() / self.values)

    def trapezoidal_precision(self) -> Tensor:
        """Return the same as Oxford and Paris compute it: the mean with the precision one rank before.

        That is the area below the line through (recall, precision), which starts at precision 1.
        """
        before = torch.where(self.values == 1, 1.0, (self._places() - 1) / (self.values - 1).clamp(min=1))
        return self._mean((self._places() / self.values + before) / 2)

    def found_at(self, k: int) -> Tensor:
        """Return whether a relevant image is among the first k (recall at k of metric learning)."""
        return self._or_nan((self.values <= k).any(1).double())

    def precision_at(self, k: int) -> Tensor:
        """Return the share of relevant images among the first k."""
        return self._or_nan((self.values <= k).sum(1).double() / k)

    def precision_at_last(self, k: int) -> Tensor:
        """Return the same as Oxford and Paris do: of the first k or, if that is fewer, up to the last one."""
        last = self.values.where(self.values.isfinite(), 0).amax(1).clamp(max=k)
        return self._or_nan((self.values <= last[:, None]).sum(1).double() / last)

    def r_precision(self) -> Tensor:
        """Return the share of relevant images among the first R, if there are R relevant ones."""
        return self._mean((self.values <= self.counts[:, None]).double())

    def _places(self) -> Tensor:
        return torch.arange(1, self.values.shape[1] + 1, device=self.values.device)

    def _mean(self, of_each: Tensor) -> Tensor:
        """Return the mean over the relevant images; the places after the last one hold 0."""
        return self._or_nan(of_each.sum(1) / self.counts)

    def _or_nan(self, of_query: Tensor) -> Tensor:
        return of_query.where(self.counts > 0, torch.nan)


def device_of_figures(device: torch.device) -> torch.device:
    """Return where ranks are counted: they are float64, which mps lacks."""
    return torch.device("cpu") if device.type == "mps" else device


def rank_relevant(
    bank: Matrix, queries: Tensor, judge: Judgement, device: torch.device
) -> Iterator[tuple[slice, Ranks]]:
    """Yield the ranks of the relevant images block by block of the queries (q, D)."""
    size = max(1, _COSINES["cuda" if device.type == "cuda" else "cpu"] // max(1, len(bank)))
    for start in range(0, len(queries), size):
        rows = slice(start, min(start + size, len(queries)))
        relevant, junk = (mask.to(device_of_figures(device)) for mask in judge(rows))
        block = unit(queries[rows].to(device))
        chunk = max(1, _BANK // queries.shape[1])
        parts = (torch.as_tensor(bank[at : at + chunk], device=device) for at in range(0, len(bank), chunk))
        cosines = torch.cat([block @ unit(part).T for part in parts], dim=1).to(relevant.device)
        yield rows, ranks_of(cosines, relevant & ~junk, junk)


def ranks_of(cosines: Tensor, relevant: Tensor, junk: Tensor) -> Ranks:
    """Return the ranks of the relevant images by cosines; all are (queries, bank), the masks disjoint."""
    distances, counts = -cosines, relevant.sum(1)
    most = max(1, int(counts.amax()))
    own = _sorted(distances.masked_fill(~relevant, torch.inf))[:, :most].contiguous()
    others = _sorted(distances.masked_fill_(relevant | junk, torch.inf))
    before = torch.searchsorted(others, own, right=True)
    places = torch.arange(1, most + 1, device=own.device)
    values = (before + places).double().masked_fill(places > counts[:, None], torch.inf)
    return Ranks(values, counts)


def _sorted(values: Tensor) -> Tensor:
    if values.is_cuda:
        return values.sort(dim=1).values
    # NumPy's sort is several times as fast as torch's on a CPU, which moves the indices too.
    return torch.from_numpy(np.sort(values.cpu().numpy(), axis=1)).to(values.device)


def same_label(bank: Tensor, queries: Tensor, device: torch.device, *, own: int | None = None) -> Judgement:
    """Judge images with the query's label as relevant; with `own`, query i is row own + i and left out."""
    bank, queries = bank.to(device), queries.to(device)

    def judge(rows: slice) -> tuple[Tensor, Tensor]:
        relevant = queries[rows, None] == bank
        junk = torch.zeros_like(relevant)
        if own is not None:
            number = torch.arange(len(relevant), device=device)
            junk[number, number + own + rows.start] = True
        return relevant, junk

    return judge

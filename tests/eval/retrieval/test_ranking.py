import math

import numpy as np
import pytest
import torch

from dino_vit.eval.retrieval import ranking
from dino_vit.eval.retrieval.ranking import Ranks, rank_relevant, ranks_of, same_label

CPU = torch.device("cpu")
FIGURES = {
    "average": lambda ranks: ranks.average_precision(),
    "trapezoidal": lambda ranks: ranks.trapezoidal_precision(),
    "found at 3": lambda ranks: ranks.found_at(3),
    "precision at 3": lambda ranks: ranks.precision_at(3),
    "precision at 3, or the last": lambda ranks: ranks.precision_at_last(3),
    "r-precision": lambda ranks: ranks.r_precision(),
}


def naive(cosines, relevant, junk):
    """Sort the whole list of one query, relevant images after others of the same cosine, and walk it."""
    kept = [i for i in range(len(cosines)) if not junk[i]]
    order = sorted(kept, key=lambda i: (-cosines[i], relevant[i]))
    hits = [bool(relevant[i]) for i in order]
    total = sum(hits)
    if not total:
        return dict.fromkeys(FIGURES, math.nan)
    average, area, precision_before, recall_before = 0.0, 0.0, 1.0, 0.0
    for number in range(1, len(hits) + 1):
        precision, recall = sum(hits[:number]) / number, sum(hits[:number]) / total
        average += precision * hits[number - 1] / total
        area += (recall - recall_before) * (precision + precision_before) / 2
        precision_before, recall_before = precision, recall
    last = min(3, max(number for number, hit in enumerate(hits, 1) if hit))
    return {
        "average": average,
        "trapezoidal": area,
        "found at 3": float(any(hits[:3])),
        "precision at 3": sum(hits[:3]) / 3,
        "precision at 3, or the last": sum(hits[:last]) / last,
        "r-precision": sum(hits[:total]) / total,
    }


def published(ranks, count):
    """Average precision of ranks from 0 as the Oxford buildings' evaluation defines it, step by step."""
    area = 0.0
    for number, rank in enumerate(ranks):
        before = 1.0 if rank == 0 else number / rank
        area += (before + (number + 1) / (rank + 1)) / (2 * count)
    return area


@pytest.mark.parametrize("distinct", [3, 1000])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_figures_are_those_of_a_walk_down_the_list(distinct, share):
    """With many ties or few, junk, and queries without a relevant image."""
    generator = np.random.default_rng(0)
    cosines = generator.integers(0, distinct, (40, 30)) / distinct
    relevant = generator.random((40, 30)) < share
    junk = (generator.random((40, 30)) < 0.2) & ~relevant
    relevant[7] = False
    ranks = ranks_of(*map(torch.from_numpy, (cosines, relevant, junk)))
    expected = [naive(*one) for one in zip(cosines, relevant, junk, strict=True)]
    for title, figure in FIGURES.items():
        np.testing.assert_allclose(figure(ranks), [one[title] for one in expected], err_msg=title)
    for query, count in enumerate(ranks.counts.tolist()):
        if count:
            by_rank = published([int(rank) - 1 for rank in ranks.values[query, :count]], count)
            assert float(ranks.trapezoidal_precision()[query]) == pytest.approx(by_rank)


def test_figures_of_lists_written_by_hand():
    inf = torch.inf
    ranks = Ranks(torch.tensor([[1, 3.0], [2, inf], [1, 2]]).double(), torch.tensor([2, 1, 2]))
    assert ranks.average_precision().tolist() == pytest.approx([(1 + 2 / 3) / 2, 1 / 2, 1])
    assert ranks.trapezoidal_precision().tolist() == pytest.approx([(1 + (1 / 2 + 2 / 3) / 2) / 2, 1 / 4, 1])
    assert ranks.found_at(1).tolist() == [1, 0, 1]
    assert ranks.r_precision().tolist() == [1 / 2, 0, 1]
    assert ranks.precision_at(10).tolist() == [0.2, 0.1, 0.2]
    assert ranks.precision_at_last(10).tolist() == pytest.approx([2 / 3, 1 / 2, 1])


def test_junk_moves_what_comes_after_it_up():
    cosines = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5]])
    relevant = torch.tensor([[False, False, True, False, True]])
    junk = torch.tensor([[True, False, False, True, False]])
    assert ranks_of(cosines.clone(), relevant, torch.zeros_like(junk)).values.tolist() == [[3, 5]]
    assert ranks_of(cosines, relevant, junk).values.tolist() == [[2, 3]]


@pytest.mark.parametrize("own", [None, 4])
def test_blocks_and_chunks_change_nothing(monkeypatch, tmp_path, own):
    generator = torch.Generator().manual_seed(0)
    bank, labels = torch.randn(60, 8, generator=generator), torch.arange(60) % 7
    queries, asked = (
        (bank[4:24], labels[4:24]) if own else (torch.randn(20, 8, generator=generator), labels[:20])
    )

    def ranked(bank):
        return list(rank_relevant(bank, queries, same_label(labels, asked, CPU, own=own), CPU))

    ((rows, whole),) = ranked(bank)
    assert rows == slice(0, 20)
    monkeypatch.setattr(ranking, "_COSINES", {"cpu": 60 * 3})
    monkeypatch.setattr(ranking, "_BANK", 8 * 11)
    np.save(tmp_path / "bank.npy", bank.numpy())
    parts = ranked(np.load(tmp_path / "bank.npy", mmap_mode="c"))
    assert len(parts) == 7
    for title, figure in FIGURES.items():
        torch.testing.assert_close(torch.cat([figure(part) for _, part in parts]), figure(whole), msg=title)
    cosines = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(bank).T
    for query in range(20):
        junk = np.arange(60) == (own + query if own else -1)
        relevant = (labels == asked[query]).numpy() & ~junk
        expected = naive(cosines[query].tolist(), relevant, junk)
        assert {title: float(figure(whole)[query]) for title, figure in FIGURES.items()} == pytest.approx(
            expected
        )


def test_features_that_are_all_the_same_find_nothing_first():
    labels = torch.tensor([0, 0, 1, 1])
    ((_, ranks),) = rank_relevant(
        torch.ones(4, 3), torch.ones(4, 3), same_label(labels, labels, CPU, own=0), CPU
    )
    assert ranks.values.tolist() == [[3]] * 4

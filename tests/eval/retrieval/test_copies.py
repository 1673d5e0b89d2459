"""Figures of copy detection beside loops over all pairs, and beside rankings made by hand."""

import pytest
import torch
from torch.nn import functional as F

from dino_vit.eval.neighbours import unit
from dino_vit.eval.retrieval import copies
from dino_vit.eval.retrieval.copies import copy_figures, search_originals
from dino_vit.eval.retrieval.whitening import Whitening

CPU = torch.device("cpu")


def judge(queries, originals, pairs):
    search = search_originals(queries, originals, torch.tensor(pairs), CPU)
    return search, copy_figures(search)


def average_precision(scored):
    """Of (cosine, is true), the true last among ties; by steps, and by trapezoids."""
    ranked = sorted(scored, key=lambda one: (-round(one[0], 5), one[1]))
    true, steps, trapezoids = 0, 0.0, 0.0
    for rank, (_, right) in enumerate(ranked, 1):
        if right:
            before = true / (rank - 1) if rank > 1 else 1
            true += 1
            steps += true / rank
            trapezoids += (true / rank + before) / 2
    return steps / true, trapezoids / true


@pytest.mark.parametrize("counts", [2**22, 60])  # 60: blocks of a few rows
@pytest.mark.parametrize("width", [3, 24])
def test_figures_are_those_of_loops_over_all_pairs(counts, width, monkeypatch):
    monkeypatch.setattr(copies, "_COUNTS", counts)
    generator = torch.Generator().manual_seed(width)
    originals = torch.randn(40, width, generator=generator)
    queries = torch.randn(17, width, generator=generator)
    pairs = [(row, 2 * row) for row in range(13)] + [(3, 31), (8, 33)]  # queries 13 to 16 have no original
    for query, original in pairs:
        queries[query] += originals[original]
    search, found = judge(queries, [originals[:25].numpy(), originals[25:].numpy()], pairs)
    cosines = F.cosine_similarity(queries[:, None].double(), originals[None].double(), dim=-1).tolist()
    true = set(pairs)
    every = [[(cosines[q][o], (q, o) in true) for o in range(40)] for q in range(17)]
    by_query = [average_precision(row) for row in every[:13]]
    assert found.mean_ap.percent == pytest.approx(100 * sum(step for step, _ in by_query) / 13)
    assert found.mean_ap_trapezoid == pytest.approx(100 * sum(area for _, area in by_query) / 13)
    pooled = [one for row in every for one in row]
    assert found.micro_ap.percent == pytest.approx(100 * average_precision(pooled)[0])
    assert found.micro_ap.low <= found.micro_ap.percent <= found.micro_ap.high
    first = [max(row)[1] for row in every[:13]]
    assert search.found.tolist() == first
    assert (found.recall_at_1.correct, found.recall_at_1.images) == (sum(first), 13)
    assert search.nearest.tolist() == [row.index(max(row)) for row in cosines]
    best = 0
    for threshold, _ in pooled:
        taken = [right for cosine, right in pooled if cosine >= threshold]
        if sum(taken) >= 0.9 * len(taken):
            best = max(best, sum(taken))
    assert found.recall_at_precision_90 == pytest.approx(100 * best / 15)


def on_a_circle(*degrees):
    turns = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([turns.cos(), turns.sin()], 1).float()


def test_a_threshold_for_all_is_harder_than_one_for_each():
    """Query 0 is 10 degrees from its original; query 1 is 30 from its own, query 2 is 20 from a stranger."""
    queries, originals = on_a_circle(10, 130, 280), on_a_circle(0, 100, 260)
    search, found = judge(queries, [originals.numpy()], [(1, 1), (0, 0)])
    assert search.found.tolist() == [True, True]
    assert (found.recall_at_1.percent, found.mean_ap.percent) == (100, 100)
    assert found.micro_ap.percent == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert found.recall_at_precision_90 == 50
    assert search.nearest.tolist() == [0, 1, 2]


def test_of_equal_images_none_is_found():
    queries, originals = on_a_circle(10, 100), on_a_circle(10, 10, 100)
    search, found = judge(queries, [originals.numpy()], [(0, 1), (1, 2)])
    assert search.found.tolist() == [False, True]
    assert found.mean_ap.percent == 75
    assert found.micro_ap.percent == pytest.approx(100 * 2 / 3)  # all three pairs have a cosine of 1
    assert found.mean_ap_trapezoid == pytest.approx(100 * (0.25 + 1) / 2)


def test_features_that_are_all_the_same_find_nothing():
    same = torch.ones(5, 4)
    _, found = judge(same, [same.numpy()], [(row, row) for row in range(5)])
    assert found.recall_at_1.percent == 0
    assert found.micro_ap.percent == pytest.approx(20)


def test_whitening_finds_what_a_common_direction_hides():
    generator = torch.Generator().manual_seed(0)
    common = 20 * torch.randn(8, generator=generator)
    noise, strangers, originals = (torch.randn(60, 8, generator=generator) for _ in range(3))
    originals[:, 0] *= 30
    queries = originals + 0.2 * noise * torch.tensor([150.0] + 7 * [1.0]) + common
    pairs = torch.tensor([(row, row) for row in range(60)])
    banks = [(originals + common).numpy()]
    strangers[:, 0] *= 30
    whitening = Whitening.learn(strangers + common, CPU)
    plain, white = (search_originals(queries, banks, pairs, CPU, one) for one in (unit, whitening))
    assert white.found.sum() > plain.found.sum() + 5
    by_hand = search_originals(whitening(queries), [whitening(torch.as_tensor(banks[0])).numpy()], pairs, CPU)
    assert torch.equal(by_hand.own, white.own)


def test_the_interval_covers_more_true_pairs_than_levels(monkeypatch):
    monkeypatch.setattr(copies, "_LEVELS", 20)
    generator = torch.Generator().manual_seed(0)
    originals = torch.randn(300, 8, generator=generator)
    queries = originals + 0.8 * torch.randn(300, 8, generator=generator)
    _, found = judge(queries, [originals.numpy()], [(row, row) for row in range(300)])
    assert found.micro_ap.low < found.micro_ap.percent < found.micro_ap.high


def test_a_single_query_does_not_take_all_originals_into_memory(monkeypatch):
    monkeypatch.setattr(copies, "_NUMBERS", 80)
    originals, taken = torch.randn(100, 8), []

    def transform(features):
        taken.append(len(features))
        return unit(features)

    pairs = torch.tensor([[0, 70]])
    search = search_originals(originals[70:71], [originals.numpy()], pairs, CPU, transform)
    assert max(taken) == 10
    assert search.nearest.tolist() == [70]

import math
import runpy
import sys

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsRegressor

from dino_vit.eval import neighbours
from dino_vit.eval.neighbours import NO_CLASS, nearest, neighbour_means, weighted_knn
from tests.support.naive import ranked_classes


def clustered(count, classes=7, width=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    return centers[labels] + 1.5 * torch.randn(count, width, generator=generator), labels


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


@pytest.fixture(params=["faiss", "topk"])
def _search(request, monkeypatch):
    """Both searches, in many small blocks."""
    monkeypatch.setattr(neighbours, "FAISS", request.param == "faiss")
    monkeypatch.setattr(neighbours, "_BANK", 11 * 16)
    monkeypatch.setattr(neighbours, "_QUERIES", 7 * 56)
    monkeypatch.setattr(neighbours, "_PRODUCTS", 60)
    monkeypatch.setattr(neighbours, "_VOTES", 30)


@pytest.mark.usefixtures("_search")
@pytest.mark.parametrize("offset", [20, 0.0], ids=["cone", "sphere"])
@pytest.mark.parametrize(("rows", "k", "self_offset"), [(60, 10, None), (60, 59, 40), (7, 10, 2), (1, 1, 0)])
def test_the_nearest_are_those_of_all_cosines_in_order(offset, rows, k, self_offset):
    bank = offset + clustered(rows)[0]
    queries = offset + clustered(20, seed=1)[0] if self_offset is None else bank[self_offset:]
    cosines, found = nearest(bank, queries, k=k, self_offset=self_offset)
    exact = torch.tensor([[cosine(q, b) for b in bank.tolist()] for q in queries.tolist()])
    if self_offset is not None:
        exact.diagonal(self_offset).fill_(-torch.inf)
    expected = exact.topk(min(k, rows - (self_offset is not None))).values
    torch.testing.assert_close(cosines, expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(exact.gather(1, found), expected, rtol=0, atol=5e-6)
    assert all(len(set(row)) == expected.shape[1] for row in found.tolist())


@pytest.mark.usefixtures("_search")
def test_copies_and_zeros_do_not_hide_neighbours():
    """Copies tie, so that an image need not be the first that it finds."""
    copies = torch.randn(3, 16).repeat(8, 1).half()
    _, rows = nearest(copies, copies, k=7, self_offset=0)
    for query, found in enumerate(rows.tolist()):
        assert {row % 3 for row in found} == {query % 3}
        assert len({*found} - {query}) == 7
    cosines, _ = nearest(torch.eye(2, 16)[:, :2] * 0, torch.ones(1, 2), k=2)
    assert cosines.tolist() == [[0, 0]]


def test_without_faiss_installed_topk_searches(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)  # no import finds it
    names, rows = runpy.run_path(neighbours.__file__), torch.eye(20)
    assert not names["FAISS"]
    assert names["nearest"](rows, rows, k=1)[1].flatten().tolist() == list(range(20))


def test_features_that_are_not_finite_are_refused():
    bank = torch.randn(30, 8)
    bank[3, 2] = torch.nan
    for bad in (lambda: nearest(bank, bank[:2], k=3), lambda: nearest(bank[:3], bank[3:4], k=3)):
        with pytest.raises(ValueError, match="not finite"):
            bad()


@pytest.mark.usefixtures("_search")
@pytest.mark.parametrize("self_offset", [None, 0, 30])
def test_weighted_knn_equals_the_loop(self_offset):
    bank, labels = clustered(60)
    labels = labels * 1000 - 3000  # gaps and negative numbers are labels too
    queries = clustered(25, seed=1)[0] if self_offset is None else bank[self_offset:]
    ranked = weighted_knn(bank, labels, queries, k=(10, 1, 20), self_offset=self_offset)
    assert set(ranked) == {1, 10, 20}
    for k, best in ranked.items():
        assert best.shape == (len(queries), 5)
        for i, query in enumerate(queries.tolist()):
            others = [row for row in range(60) if self_offset is None or row != self_offset + i]
            cosines = [cosine(bank[row].tolist(), query) for row in others]
            voted = ranked_classes(cosines, labels[others].tolist(), k)[:5]
            assert best[i].tolist() == voted + [NO_CLASS] * (5 - len(voted))


def test_k_beyond_the_bank_is_the_whole_bank_with_a_warning(caplog):
    bank, labels = clustered(8, classes=3)
    queries = clustered(4, seed=2)[0]
    ranked = weighted_knn(bank, labels, queries, k=(5, 100, 200))
    assert torch.equal(ranked[100], weighted_knn(bank, labels, queries, k=(8,))[8])
    assert "with k = 100, 200: the bank has only 8 images, and all of them vote" in caplog.text
    assert len(caplog.records) == 1


def test_one_class_one_neighbour_half_precision():
    bank, queries = torch.randn(3, 4).half(), torch.randn(2, 4).half()
    labels = torch.tensor([5, 5, 5])
    assert weighted_knn(bank, labels, queries, k=(2,))[2].tolist() == [[5], [5]]
    assert weighted_knn(bank[:1], torch.tensor([7]), queries, k=(1,))[1].tolist() == [[7], [7]]
    assert weighted_knn(bank, labels, queries[:0], k=(2,))[2].shape == (0, 1)


def test_of_equal_votes_the_lower_label_is_first():
    bank = torch.tensor([[1.0, 0.0]] * 6)
    ranked = weighted_knn(bank, torch.tensor([9, 2, 9, 2, 4, -1]), bank[:1], k=(6,))[6]
    assert ranked.tolist() == [[2, 9, -1, 4]]


@pytest.mark.parametrize("self_offset", [None, 0])
def test_means_are_those_of_scikit_learn(self_offset):
    bank, targets = torch.randn(60, 8), torch.randn(60, 3)
    queries = torch.randn(25, 8) if self_offset is None else bank
    means = neighbour_means(bank, targets, queries, k=[1, 7, 100], self_offset=self_offset)
    for k, found in means.items():
        for query in range(len(queries)):
            others = [row for row in range(60) if self_offset is None or row != query]
            peer = KNeighborsRegressor(
                min(k, len(others)), weights=lambda far: np.exp(-far / 0.07), metric="cosine"
            )
            expected = peer.fit(bank[others], targets[others]).predict(queries[query : query + 1])
            assert found[query].numpy() == pytest.approx(expected[0], abs=1e-4)


def test_means_of_neighbours_that_agree_are_equal_whatever_they_weigh():
    bank = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    means = neighbour_means(bank, torch.ones(200, 1), bank, k=[3, 20], self_offset=0)
    assert all(torch.equal(mean, torch.ones(200, 1)) for mean in means.values())

import math

import numpy as np
import pytest
import torch

from dino_vit.eval import neighbours
from dino_vit.eval.classification import knn
from dino_vit.eval.classification.knn import NO_CLASS, few_shot_rows, weighted_knn
from tests.support.naive import ranked_classes


def clustered(count, classes=7, width=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    return centers[labels] + 1.5 * torch.randn(count, width, generator=generator), labels


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr(knn, "_QUERIES", 7 * 56)
    monkeypatch.setattr(knn, "_VOTES", 30)
    monkeypatch.setattr(neighbours, "_BANK", 1)
    monkeypatch.setattr(neighbours, "_FEWEST_ROWS", 11)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("search", ["auto", "faiss", "torch"])
@pytest.mark.parametrize("own", [None, 0, 30])
def test_weighted_knn_equals_the_loop(search, own):
    bank, labels = clustered(60)
    labels = labels * 1000 - 3000  # gaps and negative numbers are labels too
    queries = clustered(25, seed=1)[0] if own is None else bank[own:]
    done = []
    ranked = weighted_knn(bank, labels, queries, k=(10, 1, 20), own=own, search=search, progress=done.append)
    assert set(ranked) == {1, 10, 20}
    assert sum(done) == len(queries)
    assert len(done) > 1
    for k, best in ranked.items():
        assert best.shape == (len(queries), 5)
        for i, query in enumerate(queries.tolist()):
            others = [row for row in range(60) if own is None or row != own + i]
            cosines = [cosine(bank[row].tolist(), query) for row in others]
            voted = ranked_classes(cosines, labels[others].tolist(), k)[:5]
            assert best[i].tolist() == voted + [NO_CLASS] * (5 - len(voted))


def test_k_beyond_the_bank_is_the_whole_bank_with_a_warning(caplog):
    bank, labels = clustered(8, classes=3)
    queries = clustered(4, seed=2)[0]
    ranked = weighted_knn(bank, labels, queries, k=(5, 100, 200))
    assert torch.equal(ranked[100], weighted_knn(bank, labels, queries, k=(8,))[8])
    assert "for k = 100, 200, all 8 images of the bank vote" in caplog.text
    assert len(caplog.records) == 1


def test_one_class_one_neighbour_half_precision_arrays():
    bank, queries = torch.randn(3, 4).half(), torch.randn(2, 4).half()
    one = torch.tensor([5, 5, 5])
    assert weighted_knn(bank, one, queries, k=(2,))[2].tolist() == [[5], [5]]
    assert weighted_knn(bank.numpy(), one, queries.numpy(), k=(2,))[2].tolist() == [[5], [5]]
    assert weighted_knn(bank[:1], torch.tensor([7]), queries, k=(1,))[1].tolist() == [[7], [7]]
    assert weighted_knn(bank, one, queries[:0], k=(2,))[2].shape == (0, 1)


def test_of_equal_votes_the_lower_label_is_first():
    bank = torch.tensor([[1.0, 0.0]] * 6)
    ranked = weighted_knn(bank, torch.tensor([9, 2, 9, 2, 4, -1]), bank[:1], k=(6,))[6]
    assert ranked.tolist() == [[2, 9, -1, 4]]


def test_no_temperature_is_too_low():
    bank, labels = clustered(40)
    coldest = weighted_knn(bank, labels, bank, k=(20,), own=0, temperature=1e-5)[20]
    assert torch.equal(coldest[:, 0], weighted_knn(bank, labels, bank, k=(1,), own=0)[1][:, 0])


def test_few_shots_are_of_each_class_and_a_function_of_seed_and_repeat():
    labels = np.array([7] * 50 + [-2] * 3 + [1000] * 20)
    keys = np.arange(500, 573)
    chosen = few_shot_rows(labels, keys, shots=5, seed=1, repeat=0)
    assert [int((labels[chosen] == label).sum()) for label in (7, -2, 1000)] == [5, 3, 5]
    assert len(set(chosen.tolist())) == 13
    assert chosen.tolist() == sorted(chosen.tolist())
    assert np.array_equal(chosen, few_shot_rows(labels, keys, shots=5, seed=1, repeat=0))
    for other in ({"seed": 2, "repeat": 0}, {"seed": 1, "repeat": 1}):
        assert not np.array_equal(chosen, few_shot_rows(labels, keys, shots=5, **other))
    # The same images in another order, and without those that were not chosen, are chosen again.
    back = few_shot_rows(labels[::-1], keys[::-1], shots=5, seed=1, repeat=0)
    assert sorted(keys[::-1][back].tolist()) == keys[chosen].tolist()
    drawn = [few_shot_rows(labels, keys, shots=1, seed=0, repeat=repeat).tolist() for repeat in range(300)]
    assert {row for rows in drawn for row in rows} == set(range(73)), "everyone has its turn"


def test_each_image_of_the_bank_needs_a_label():
    with pytest.raises(ValueError, match="the bank has 6 images, but 5 labels"):
        weighted_knn(torch.zeros(6, 4), torch.zeros(5, dtype=torch.long), torch.zeros(2, 4), k=(3,))

import math

import pytest
import torch

from dino_vit.eval import knn
from dino_vit.eval.knn import nearest, weighted_knn
from dino_vit.eval.rankme import rankme


def clustered(count, classes=7, width=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    return centers[labels] + 1.5 * torch.randn(count, width, generator=generator), labels


def naive_ranking(bank, labels, query, k, excluded=None):
    """The classes by score for one query, in Python numbers; a class without a vote scores 0."""

    def cosine(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    cosines = sorted(
        (
            (cosine(row, query), label)
            for i, (row, label) in enumerate(zip(bank, labels, strict=True))
            if i != excluded
        ),
        reverse=True,
    )
    scores = dict.fromkeys(sorted(set(labels)), 0.0)
    for similarity, label in cosines[:k]:
        scores[label] += math.exp(similarity / 0.07)
    return sorted(scores, key=lambda label: -scores[label]), scores


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr(knn, "_QUERY_BLOCK", 7)
    monkeypatch.setattr(knn, "_BANK_BLOCK", 11)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_weighted_knn_equals_the_loop(leave_one_out):
    bank, labels = clustered(60)
    labels = labels * 1000 - 3000  # gaps and negative numbers are labels too
    queries = bank if leave_one_out else clustered(25, seed=1)[0]
    ranked = weighted_knn(bank, labels, queries, k=(10, 1, 20), leave_one_out=leave_one_out)
    assert set(ranked) == {1, 10, 20}
    for k, best in ranked.items():
        assert best.shape == (len(queries), 5)
        for i, query in enumerate(queries.tolist()):
            order, scores = naive_ranking(
                bank.tolist(), labels.tolist(), query, k, excluded=i if leave_one_out else None
            )
            voted = [label for label in order if scores[label]]  # ties without a vote have no order
            assert best[i].tolist()[: len(voted)] == voted[:5]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(("bank_rows", "k"), [(30, 5), (30, 30), (3, 2), (11, 11), (12, 12)])
def test_nearest_is_the_sorted_matrix_whatever_the_blocks(bank_rows, k):
    bank, queries = torch.randn(bank_rows, 4), torch.randn(9, 4)
    similarities, rows = nearest(bank, queries, k=k)
    expected, order = (queries @ bank.T).sort(dim=1, descending=True)
    torch.testing.assert_close(similarities, expected[:, :k])
    assert torch.equal(rows, order[:, :k])


def test_one_pass_over_blocks_of_queries_is_one_pass_over_all(monkeypatch):
    bank, labels = clustered(300)
    whole = weighted_knn(bank, labels, bank, k=(20, 200), leave_one_out=True)
    monkeypatch.setattr(knn, "_QUERY_BLOCK", 64)
    monkeypatch.setattr(knn, "_BANK_BLOCK", 100)
    blocks = weighted_knn(bank, labels, bank, k=(20, 200), leave_one_out=True)
    assert all(torch.equal(whole[k], blocks[k]) for k in (20, 200))


def test_k_beyond_the_bank_is_the_whole_bank_and_said(caplog):
    bank, labels = clustered(8, classes=3)
    queries = clustered(4, seed=2)[0]
    ranked = weighted_knn(bank, labels, queries, k=(5, 100, 200))
    assert torch.equal(ranked[100], weighted_knn(bank, labels, queries, k=(8,))[8])
    assert "for k = 100, 200, all 8 images of the bank vote" in caplog.text
    assert len(caplog.records) == 1


def test_one_class_one_neighbour_half_precision():
    bank, queries = torch.randn(3, 4).bfloat16(), torch.randn(2, 4).bfloat16()
    assert weighted_knn(bank, torch.tensor([5, 5, 5]), queries, k=(2,))[2].tolist() == [[5], [5]]
    assert weighted_knn(bank[:1], torch.tensor([7]), queries, k=(1,))[1].tolist() == [[7], [7]]
    assert weighted_knn(bank, torch.tensor([5, 5, 5]), queries[:0], k=(2,))[2].shape == (0, 1)


def test_features_of_a_large_norm_do_not_vote_more():
    bank = torch.tensor([[1.0, 0.1], [100.0, 100.0]])
    assert weighted_knn(bank, torch.tensor([0, 1]), torch.tensor([[1.0, 0.0]]), k=(2,))[2][0, 0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(2, 5)}, r"one width, but the bank is \(6, 4\)"),
        ({"bank_labels": torch.zeros(5, dtype=torch.long)}, "each of the 6 bank images"),
        ({"bank_labels": torch.zeros(6)}, "Map other labels to integers"),
        ({"k": ()}, r"one or more k from 1 up, but got \[\]"),
        ({"k": (0, 10)}, "one or more k"),
        ({"leave_one_out": True}, "2 queries and 6 bank images"),
        (
            {"bank": torch.zeros(0, 4), "bank_labels": torch.zeros(0, dtype=torch.long)},
            "the bank has 0 images",
        ),
    ],
)
def test_mistakes_are_explained(change, message):
    given = {
        "bank": torch.zeros(6, 4),
        "bank_labels": torch.zeros(6, dtype=torch.long),
        "queries": torch.zeros(2, 4),
        "k": (3,),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        weighted_knn(given.pop("bank"), given.pop("bank_labels"), given.pop("queries"), **given)


@pytest.mark.parametrize("shape", [(50, 8), (5, 12), (9, 9)])
def test_rankme_is_the_exponential_of_the_entropy_of_the_singular_values(shape):
    features = torch.randn(*shape) @ torch.diag(torch.logspace(-2, 1, shape[1]))
    product = features.double().T @ features.double()
    singular = [math.sqrt(value) for value in torch.linalg.eigvalsh(product).tolist() if value > 1e-12]
    shares = [value / sum(singular) for value in singular]
    expected = math.exp(-sum(share * math.log(share) for share in shares))
    assert rankme(features) == pytest.approx(expected, rel=1e-6)


def test_rankme_counts_directions():
    basis = torch.linalg.qr(torch.randn(20, 20)).Q
    assert rankme(basis[:, :6]) == pytest.approx(6)
    assert rankme(torch.ones(20, 6)) == pytest.approx(1)
    assert rankme(torch.zeros(20, 6)) == 1

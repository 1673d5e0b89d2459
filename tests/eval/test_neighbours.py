import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from dino_vit.eval import neighbours
from dino_vit.eval.neighbours import Shortlist, exact_cosines, format_cosines, nearest, unit

CASES = [(2000, 10, None), (2000, 20, 100), (300, 299, 0), (7, 10, 2), (1, 1, None)]  # rows, k, own


def features(rows, width, kind, seed=0):
    """Features as they come: all over the sphere, close together, in groups, or many times the same."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, width, generator=generator)
    if kind == "cone":
        return 20 + noise
    if kind == "groups":
        return torch.randn(5, width, generator=generator)[torch.arange(rows) % 5] + 0.3 * noise
    if kind == "nearly":
        return noise[:1] + 2e-7 * torch.randn(rows, width, generator=generator)
    if kind == "copies":
        return noise[torch.arange(rows) % max(1, rows // 3)]
    return noise


def sorted_matrix(bank, queries, k, own=None):
    """All cosines, each pair's on its own, in order: the greater first, then the lower row."""
    bank, queries = unit(bank), unit(queries)
    every = torch.arange(len(bank)).expand(len(queries), -1)
    cosines = torch.cat(
        [exact_cosines(queries[i : i + 1], bank, every[i : i + 1]) for i in range(len(queries))]
    )
    if own is not None:
        cosines[torch.arange(len(queries)), torch.arange(len(queries)) + own] = -torch.inf
    order = cosines.sort(dim=1, descending=True, stable=True)
    k = min(k, len(bank) - (own is not None))
    return order.values[:, :k], order.indices[:, :k]


@pytest.fixture(params=[False, True], ids=["one chunk", "many"])
def _chunks(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(neighbours, "_BANK", 1)
        monkeypatch.setattr(neighbours, "_FEWEST_ROWS", 700)
        monkeypatch.setattr(neighbours, "_COLUMNS", 64)
        monkeypatch.setattr(neighbours, "_LISTED", 300)
        monkeypatch.setattr(neighbours, "_SCORES", {"cpu": 9000})


def bank_and_queries(kind, rows, own):
    bank = features(rows, 24, kind)
    return bank, features(13, 24, kind, seed=1) if own is None else bank[own : own + 13]


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["sphere", "cone", "groups", "copies", "nearly"])
@pytest.mark.parametrize(("rows", "k", "own"), CASES)
def test_torch_finds_the_sorted_matrix(monkeypatch, precision, kind, rows, k, own):
    monkeypatch.setattr(neighbours, "choose_precision", lambda wanted, device: precision)
    bank, queries = bank_and_queries(kind, rows, own)
    cosines, found = nearest(bank, queries, k=k, own=own, search="torch")
    expected, order = sorted_matrix(bank, queries, k, own)
    assert torch.equal(found, order)
    assert torch.equal(cosines, expected)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("search", ["auto", "faiss"])
@pytest.mark.parametrize("kind", ["sphere", "cone", "groups", "copies", "nearly"])
@pytest.mark.parametrize(("rows", "k", "own"), CASES)
def test_faiss_finds_the_sorted_matrix_up_to_rounding(monkeypatch, search, kind, rows, k, own):
    """By default too where a CPU has no native bfloat16."""
    monkeypatch.setattr(neighbours, "choose_precision", lambda wanted, device: "no")
    monkeypatch.setattr(neighbours, "Shortlist", None)
    bank, queries = bank_and_queries(kind, rows, own)
    cosines, found = nearest(bank, queries, k=k, own=own, search=search)
    expected, _ = sorted_matrix(bank, queries, k, own)
    torch.testing.assert_close(cosines, expected, rtol=0, atol=5e-7)
    torch.testing.assert_close(exact_cosines(unit(queries), unit(bank), found), cosines, rtol=0, atol=5e-7)
    assert (cosines.diff(dim=1) <= 0).all()
    for query, row in enumerate(found.tolist()):
        assert len({*row} - {None if own is None else own + query}) == expected.shape[1]


def test_cosines_are_those_of_float64():
    bank, queries = features(50, 37, "cone"), features(9, 37, "sphere")
    cosines, rows = nearest(bank, queries, k=50)
    for query, of_query, found in zip(queries.double(), cosines.tolist(), rows.tolist(), strict=True):
        for cosine, row in zip(of_query, found, strict=True):
            other = bank[row].double()
            exact = float(query @ other) / (math.hypot(*query.tolist()) * math.hypot(*other.tolist()))
            assert cosine == pytest.approx(exact, abs=3e-7)


def test_without_faiss_installed_torch_searches():
    code = """
import sys
sys.modules["faiss"] = None  # no import finds it
import torch
from dino_vit.eval.neighbours import nearest
rows = torch.eye(20)
print(nearest(rows, rows, k=1)[1].flatten().tolist() == list(range(20)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "True\n"


def test_without_faiss_the_products_are_the_same_but_for_rounding(monkeypatch):
    bank, queries = unit(features(90, 37, "sphere")), unit(features(5, 37, "groups"))
    listed = torch.tensor([[3, -1, 89], [0, 1, 2], [-1, -1, -1], [5, 5, 5], [7, 8, -1]])
    by_faiss = exact_cosines(queries, bank, listed)
    monkeypatch.setattr(neighbours, "FAISS", False)
    for products in (2**24, 1):
        monkeypatch.setattr(neighbours, "_PRODUCTS", products)
        torch.testing.assert_close(exact_cosines(queries, bank, listed), by_faiss, atol=2e-7, rtol=0)
    assert torch.equal(by_faiss == -torch.inf, listed < 0)
    with pytest.raises(ValueError, match="use search=torch"):
        nearest(bank, queries, k=3, search="faiss")
    assert torch.equal(nearest(bank, queries, k=9)[1], sorted_matrix(bank, queries, 9)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["sphere", "cone", "groups"])
@pytest.mark.parametrize(("rows", "width", "count"), [(4000, 384, 64), (33, 2000, 3), (5, 3, 1)])
def test_no_score_is_further_off_than_the_bound(dtype, kind, rows, width, count):
    """Nor is the bound idle: the scores in 16 bits use more than a hundredth of it."""
    chunk, queries = unit(features(rows, width, kind)), unit(features(count, width, kind, seed=1))
    shortlist = Shortlist(chunk, 1, dtype)
    scores = torch.empty(shortlist.blocks, count, shortlist.columns, dtype=dtype)
    shortlist._score(queries, None, scores)
    scores = scores.permute(1, 0, 2).flatten(1)[:, :rows].double()
    exact = queries.double() @ (chunk.double() - shortlist.mean.double()).T
    off = (scores - exact).abs() - torch.finfo(dtype).eps / 2 * exact.abs()
    error = shortlist.error_of(queries).double()
    assert (off < error[:, None]).all()
    if dtype != torch.float32 and rows > 1000:
        assert off.amax() > 0.01 * error.amax()


def test_the_memory_map_of_a_bank_is_a_bank(tmp_path):
    bank, queries = features(500, 24, "groups"), features(9, 24, "groups", seed=1)
    np.save(tmp_path / "bank.npy", bank.half().numpy())
    mapped = np.load(tmp_path / "bank.npy", mmap_mode="c")
    found = nearest(mapped, queries, k=20)
    assert all(map(torch.equal, found, nearest(bank.half(), queries, k=20)))


def test_features_that_are_not_finite_are_refused():
    bank = features(30, 8, "sphere")
    bank[3, 2] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        nearest(bank, bank[:2], k=3)
    with pytest.raises(ValueError, match="not finite"):
        nearest(bank[:3], bank[3:4], k=3)


def test_zeros_are_near_nothing():
    bank = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    cosines, rows = nearest(bank, torch.tensor([[2.0, 0.0], [0.0, 0.0]]), k=3)
    assert cosines.tolist() == [[1, 0, -1], [0, 0, 0]]
    assert rows.tolist() == [[1, 0, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("cosines", "texts"),
    [
        ([], []),
        ([0.5, 0.25, -0.125], ["0.5000", "0.2500", "-0.1250"]),
        ([0.99961, 0.99962], ["0.99961", "0.99962"]),
        ([0.999961, 0.999962, 0.3], ["0.999961", "0.999962", "0.300000"]),
        ([0.99999996, 1.0000001, 1.0], ["1.0000", "1.0000", "1.0000"]),  # rounding of a cosine of 1
    ],
)
def test_cosines_have_the_digits_that_tell_them_apart(cosines, texts):
    assert format_cosines(cosines) == texts

"""Weighted k-NN beside the 2021 protocol's loop: queries a second, with the same neighbours.

    python -m benchmarks.knn --repeats 5

A bank of 100,000 × 384 and 5,000 queries of 1,000 classes, k = 200. `reference` is the published loop: a
hundredth of the queries at a time, all products in float32, their top k, a one-hot vector for each neighbour.
`FAISS flat` is its index alone, without the vote, and `product and topk` the same blocks by PyTorch alone.
Before it is timed ours is compared with float64.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import Row, Table, Work, arguments, compare, report
from dino_vit.eval.neighbours import NO_CLASS, nearest, unit, weighted_knn

IMAGES, QUERIES = 100_000, 5_000
WIDTH, CLASSES, K, TEMPERATURE = 384, 1000, 200, 0.07
COMPARED = 100  # queries


class Case(NamedTuple):
    """Features with labels to learn from, and features to classify."""

    bank: Tensor
    labels: Tensor
    queries: Tensor


def make_case(images: int, queries: int) -> Case:
    """Return classes that overlap, as those of real features do, in a cone, as they lie."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, WIDTH, generator=generator) + 1
    labels = torch.randint(CLASSES, (images,), generator=generator)
    asked = torch.randint(CLASSES, (queries,), generator=generator)
    bank, wanted = (
        unit(centers[of] + 1.5 * torch.randn(len(of), WIDTH, generator=generator)) for of in (labels, asked)
    )
    return Case(bank, labels, wanted)


def reference_loop(case: Case) -> Tensor:
    """Return the classes of each query, best first, as the published evaluation finds them."""
    bank, ranked = case.bank.t(), []
    size = max(1, len(case.queries) // 100)
    for start in range(0, len(case.queries), size):
        queries = case.queries[start : start + size]
        similarities, rows = torch.mm(queries, bank).topk(K, largest=True, sorted=True)
        candidates = case.labels.view(1, -1).expand(len(queries), -1)
        classes = torch.gather(candidates, 1, rows)
        one_hot = torch.zeros(len(queries) * K, CLASSES)
        one_hot.scatter_(1, classes.view(-1, 1), 1)
        weights = similarities.div(TEMPERATURE).exp()
        votes = (one_hot.view(len(queries), K, CLASSES) * weights.view(len(queries), K, 1)).sum(1)
        ranked.append(votes.sort(1, descending=True).indices)
    return torch.cat(ranked)


def ours(case: Case) -> Tensor:
    """Return the best five classes of each query."""
    return weighted_knn(case.bank, case.labels, case.queries, k=(K,))[K]


def faiss_search(case: Case) -> dict[str, Work]:
    """Return the search by FAISS's flat index of inner products, if it is installed."""
    try:
        import faiss
    except ImportError:
        print("FAISS is not installed: no column of it", file=sys.stderr)
        return {}
    index: faiss.Index = faiss.IndexFlatIP(WIDTH)
    faiss.omp_set_num_threads(torch.get_num_threads())
    index.add(case.bank.numpy())
    queries = case.queries.numpy()
    return {"FAISS flat": lambda: index.search(queries, K)}


def product_and_topk(case: Case) -> None:
    """Find the same neighbours by PyTorch, 1,024 queries at a time."""
    for queries in torch.split(case.queries, 1024):
        (queries @ case.bank.T).topk(K)


def check(case: Case) -> str:
    """Compare with products in float64, and the answers with the other's; say how many agree."""
    queries = case.queries[:COMPARED]
    cosines, rows = nearest(case.bank, queries, k=K)
    exact = queries.double() @ case.bank.double().t()
    assert (cosines - exact.gather(1, rows)).abs().max() < 1e-6
    kth = exact.topk(K).values[:, -1:]
    missed = (exact > kth + 1e-6).scatter(1, rows, value=False)
    assert not missed.any(), "a neighbour was missed"
    some = case._replace(queries=queries)
    answers = ours(some)
    others = reference_loop(some)[:, : answers.shape[1]]
    same = ((answers == others) | (answers == NO_CLASS)).all(1).sum()
    return f"The five best classes are the reference's for {int(same)} of {len(queries)} queries."


def measure(images: int, queries: int, repeats: int) -> tuple[Row, str]:
    """Measure one size."""
    case = make_case(images, queries)
    said = check(case)
    works: dict[str, Work] = {"dino_vit": lambda: ours(case), "reference": lambda: reference_loop(case)}
    works |= {**faiss_search(case), "product and topk": lambda: product_and_topk(case)}
    name = f"{images:,} × {WIDTH}, {queries:,} queries"
    row = compare(name, works, items=queries, repeats=repeats)
    times = row.speed["dino_vit"] / row.speed["reference"]
    return row, f"{name}: {times:.2f} times the reference's speed. {said}"


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure with so many threads."""
    torch.set_num_threads(threads)
    row, said = measure(IMAGES, QUERIES, repeats)
    return [Table(f"k-NN, k = {K}, CPU, threads: {threads}", "queries a second", [row], said)]


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)

"""Typical images: compared with a naive twin, and every beginning of the order covers the clusters."""

import pytest
import torch
from torch.nn import functional as F

from dino_vit.eval.neighbours import unit
from dino_vit.eval.typical import (
    COARSEST,
    NEIGHBOURS,
    PASSES,
    densities,
    k_means,
    order_to_label,
    spread_rows,
)


@pytest.fixture(scope="module")
def groups():
    """Features of 40 groups, the later ones larger, and the group of each row."""
    generator = torch.Generator().manual_seed(3)
    group = torch.arange(40).repeat_interleave(torch.arange(40) // 2 + 4)
    centres = F.normalize(torch.randn(40, 16, generator=generator))
    return unit(centres[group] + 0.04 * torch.randn(len(group), 16, generator=generator)), group


def order_naively(features, labelled, seed):
    """The same order by loops over rows, with whole distances."""
    rows = [list(map(float, row)) for row in features]

    def squared(one, other):
        return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))

    density = []
    for n, row in enumerate(rows):
        near = sorted(squared(row, other) for m, other in enumerate(rows) if m != n)[:NEIGHBOURS]
        density.append(-sum(near))
    starts = spread_rows(features, len(rows) // 2, seed)
    order, count = [], COARSEST
    while count <= len(starts):
        centres = [rows[start] for start in starts[:count]]
        for again in range(PASSES + 1):
            clusters = [min(range(count), key=lambda c: squared(row, centres[c])) for row in rows]
            for cluster in range(count) if again < PASSES else ():
                members = [row for row, its in zip(rows, clusters, strict=True) if its == cluster]
                if members:
                    centres[cluster] = [sum(column) / len(members) for column in zip(*members, strict=True)]
        covered = {clusters[n] for n in [*labelled, *order]}
        for cluster in sorted({*clusters} - covered, key=lambda c: (-clusters.count(c), c)):
            members = (n for n in range(len(rows)) if clusters[n] == cluster)
            order.append(max(members, key=density.__getitem__))
        count *= 2
    return order


def test_the_order_is_that_of_a_naive_twin(groups):
    features = groups[0][::10]
    for seed, labelled in ((0, []), (1, [3, 30])):
        mask = torch.zeros(len(features), dtype=torch.bool)
        mask[labelled] = True
        order = order_to_label(features, densities(features), mask, seed)
        assert order == order_naively(features, labelled, seed)


def test_any_beginning_covers_more_groups_than_random_rows(groups):
    features, group = groups
    none = torch.zeros(len(features), dtype=torch.bool)
    order = order_to_label(features, densities(features), none, seed=0)
    assert len(set(order)) == len(order)
    generator = torch.Generator().manual_seed(0)
    for count in (10, 20, 40):
        draws = [torch.randperm(len(group), generator=generator)[:count] for _ in range(20)]
        found = sorted(len(set(group[draw].tolist())) for draw in draws)
        assert len(set(group[order[:count]].tolist())) > found[14], "three of four draws"
    labelled = none.clone()
    labelled[order[:10]] = True
    others = order_to_label(features, densities(features), labelled, seed=0)
    assert not {*others} & {*order[:10]}, "what is labelled covers its clusters"


def test_rows_are_drawn_by_their_distance_and_equal_ones_once(groups):
    features, group = groups
    assert len(set(group[spread_rows(features, 30, seed=0)].tolist())) >= 27
    assert spread_rows(features, 30, seed=0) == spread_rows(features, 60, seed=0)[:30]
    assert spread_rows(features, 30, seed=0) != spread_rows(features, 30, seed=1)
    two = torch.eye(2).repeat(20, 1)
    assert {row % 2 for row in spread_rows(two, 2, seed=0)} == {0, 1}
    clusters = k_means(two, two[spread_rows(two, 5, seed=0)])
    assert len(clusters.unique()) == 2, "a centre that nothing is left for stays empty"

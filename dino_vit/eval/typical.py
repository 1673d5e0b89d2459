"""Which images to label first: typical ones of clusters (TypiClust, Hacohen et al., 2022), in an order.

Features are rows (n, d) of unit length.
"""

import torch
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.eval.neighbours import nearest

COARSEST, FINEST = 10, 640  # clusters of the first level, and at most
NEIGHBOURS = 20  # that tell how dense the features are around an image
PASSES = 10  # of k-means


def densities(features: Tensor) -> Tensor:
    """Return the mean cosine of each row with its nearest neighbours (n,)."""
    return nearest(features, features, k=NEIGHBOURS, self_offset=0)[0].mean(1)


def order_to_label(features: Tensor, density: Tensor, labelled: Tensor, seed: int) -> list[int]:
    """Return typical rows in an order of which any beginning covers about as many clusters as it has rows.

    Each level has twice the clusters of the one before. Clusters of a level in which no row is labelled (n,)
    or chosen yet give their densest row, the largest cluster first.
    """
    starts = spread_rows(features, min(FINEST, len(features) // 2), seed)
    covering, order, count = labelled.clone(), list[int](), COARSEST
    while count <= len(starts):
        clusters = k_means(features, features[starts[:count]])
        sizes = torch.bincount(clusters, minlength=count)
        sizes[clusters[covering]] = 0
        for cluster in sizes.argsort(descending=True, stable=True)[: int(sizes.count_nonzero())]:
            members = (clusters == cluster).nonzero()[:, 0]
            order.append(int(members[density[members].argmax()]))
        covering[order] = True
        count *= 2
    return order


def spread_rows(features: Tensor, count: int, seed: int) -> list[int]:
    """Draw rows far from each other: each with a probability like its squared distance (k-means++)."""
    rows, distances = list[int](), torch.ones(len(features), dtype=torch.double)
    for draw in random_uniform(seed, RngPurpose.CLUSTERS, torch.arange(count).numpy()).tolist():
        totals = distances.cumsum(0)
        row = int(torch.searchsorted(totals, draw * totals[-1], right=True).clamp_max(len(features) - 1))
        rows.append(row)
        distance = 1 - features @ features[row]  # half of the squared one
        distances = torch.minimum(distances, distance.double().clamp_min(0))
    return rows


def k_means(features: Tensor, centres: Tensor) -> Tensor:
    """Return the cluster of each row (n,), by the passes of Lloyd; a centre without rows stays."""
    for _ in range(PASSES):
        clusters = _closest(features, centres)
        counts = torch.bincount(clusters, minlength=len(centres))[:, None]
        sums = torch.zeros_like(centres).index_add_(0, clusters, features)
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return _closest(features, centres)


def _closest(features: Tensor, centres: Tensor) -> Tensor:
    return (features @ centres.T - centres.square().sum(1) / 2).argmax(1)

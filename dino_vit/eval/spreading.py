"""Labels that spread among similar images: from each to its nearest, from these on (Zhou et al., 2004).

n images, of which m are labelled; c classes
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.text import plural, progress
from dino_vit.eval.cross_validation import FOLDS, SPREADING, Candidate, Trials
from dino_vit.eval.neighbours import nearest
from dino_vit.eval.pooled import PooledFeatures
from dino_vit.features.readings import LEVELLED, Reading
from dino_vit.models.classifiers import VOTE_TEMPERATURE

MOST = 200_000  # images; the search among more takes too long
NEIGHBOURS, ALPHA, ROUNDS = 10, 0.95, 100
_UNSEEN = 1e-3  # share that a class without any counts as, so that no score is infinite


def similarity_graph(features: Tensor) -> Tensor:
    """Return the sparse matrix (n, n) by which labels spread: D^-1/2 W D^-1/2, of sums D of the rows of W.

    W says of an image and one of its nearest how similar they are, with the weight of a neighbour's vote.
    """
    cosines, rows = nearest(features, features, k=NEIGHBOURS, self_offset=0)
    weights = ((cosines - 1) / VOTE_TEMPERATURE).exp().flatten()
    each = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
    nearby = rows.flatten()
    places = torch.stack([torch.cat([each, nearby]), torch.cat([nearby, each])])
    size = len(features), len(features)
    graph = torch.sparse_coo_tensor(places, weights.repeat(2), size, check_invariants=True).coalesce()
    rows, nearby = graph.indices()
    scale = torch.zeros_like(features[:, 0]).index_add_(0, rows, graph.values()).rsqrt()
    values = graph.values() * scale[rows] * scale[nearby]
    return torch.sparse_coo_tensor(graph.indices(), values, size, is_coalesced=True, check_invariants=True)


def spread(graph: Tensor, rows: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Return scores (n, c) of all images, by the classes (m,) of those in some rows."""
    given = torch.zeros(len(graph), classes, device=graph.device)
    given[rows] = F.one_hot(targets, classes).to(given)
    found = given
    for _ in range(ROUNDS):
        found = ALPHA * (graph @ found) + (1 - ALPHA) * given
    return (F.normalize(found, p=1) + _UNSEEN / classes).log()


@dataclass(frozen=True)
class Spreading:
    """The graph of some images, and what is known of the labels of some of them."""

    reading: Reading
    graph: Tensor
    pool: PooledFeatures

    @classmethod
    def among(cls, pool: PooledFeatures) -> "Spreading | None":
        """Return how labels spread among images of one class each; None if these are too many."""
        if pool.learned.task != "multiclass" or len(pool.readings) < 2:
            return None
        if len(pool.features) > MOST:
            text = "labels do not spread among %s: they are more than %s"
            log.info(text, plural(len(pool.features), "image"), f"{MOST:,}")
            return None
        reading = Reading("cls+cells" if "cells" in pool.spec.parts else "cls", LEVELLED)
        read, blocks = pool.reader(reading), torch.split(pool.select(reading.tokens), 2**13)
        return cls(reading, similarity_graph(torch.cat([read(block) for block in blocks])), pool)

    def label(self, learned: Tensor | slice = slice(None)) -> Tensor:
        """Return the scores (n, c) of all images by some of the labelled ones."""
        targets = torch.from_numpy(self.pool.learned.targets).to(self.graph.device)[learned]
        return spread(self.graph, self.pool.rows[learned], targets, len(self.pool.learned.classes))

    def cross_validate(self, like: Trials) -> Trials:
        """Return what labels say of the images in the other folds that other candidates were tried on."""
        scores, folds = torch.zeros_like(like.scores[0]), self.pool.folds
        rows = self.pool.rows[like.rows]
        with progress("Labels that spread, folds", FOLDS) as advance:
            for fold in torch.unique(folds) if like.tested.any() else ():
                held = like.folds == fold
                scores[held] = self.label(folds != fold)[rows[held]]
                advance(1)
        return replace(like, tried=[Candidate(SPREADING, NEIGHBOURS, self.reading)], scores=[scores])

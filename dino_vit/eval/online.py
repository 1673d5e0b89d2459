"""What a run learns of itself as it trains: k-NN accuracy where there are labels, effective rank always."""

import logging
import math
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from dino_vit.core.distributed import all_gather, rank, world_size
from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.data.sources.open import Source
from dino_vit.eval.features.extraction import Features, extract_features, pixel_features
from dino_vit.eval.knn.voting import weighted_knn
from dino_vit.eval.rankme import rankme
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import Preparation

log = logging.getLogger("dino_vit")

NEIGHBOURS = 20
# Raw pixels are compared at no more than this: beyond it they cost memory and classify no better.
_PIXEL_SIDE = 32


class OnlineEvaluation:
    """Evaluate a backbone on the same few thousand images of a source each time, leaving no trace in the run.

    The images are a function of the seed. Each is classified by its nearest neighbours among the others:
    nothing is classified by itself, and all images serve as queries for the price of one forward pass each.
    In a process group each process computes the features of its share, and all get the same figures.
    """

    def __init__(
        self,
        *,
        source: Source,
        preparation: Preparation,
        seed: int,
        images: int = 5000,
        labels: bool = True,
        batch_size: int = 256,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.source, self.preparation = source, preparation
        self.batch_size, self.autocast = batch_size, autocast
        self.said = False  # that images cannot be read: once is enough
        bits = random_bits(seed, RngPurpose.EVALUATION, np.arange(len(source)))
        order: list[int] = np.argsort(bits, kind="stable").tolist()
        labelled = list(islice((i for i in order if labels and source.label(i) is not None), images))
        self.has_labels = len({source.label(index) for index in labelled}) > 1
        self.indices = labelled if self.has_labels else order[:images]

    def __call__(self, backbone: VisionTransformer) -> dict[str, float]:
        """Return `knn`, top-1 in per cent, unless labels are missing or all the same, and `rankme`."""
        features = self._features(backbone)
        finite = bool(features.values.isfinite().all())  # of others there is nothing to say
        figures = {"rankme": rankme(features.values) if finite else math.nan}
        if self.has_labels:
            figures["knn"] = self._accuracy(features) if finite else math.nan
        return figures

    def raw_pixels(self) -> float | None:
        """Return `knn` of the pixels themselves, what features must be better than; None without labels.

        The calling process works alone; the others need not call.
        """
        if not self.has_labels:
            return None
        height, width = self.preparation.size
        shrink = min(1.0, _PIXEL_SIDE / max(height, width))
        size = max(1, round(height * shrink)), max(1, round(width * shrink))
        small = replace(self.preparation, size=size)
        return self._accuracy(pixel_features(self.source, self.indices, preparation=small))

    def _features(self, backbone: VisionTransformer) -> Features:
        """Compute the features of this process's share and return those of all processes."""
        start, end = (len(self.indices) * part // world_size() for part in (rank(), rank() + 1))
        share = extract_features(
            backbone,
            self.source,
            self.indices[start:end],
            preparation=self.preparation,
            batch_size=self.batch_size,
            autocast=self.autocast,
        )
        if share.unreadable and not self.said:
            self.said = True
            count, first = len(share.unreadable), share.unreadable[0]
            log.warning("online evaluation: leaves out %d images that cannot be read, first %s", count, first)
        return Features(all_gather(share.values), all_gather(share.indices), share.unreadable)

    def _accuracy(self, features: Features) -> float:
        """Return the share of images, in per cent, whose label their neighbours vote for."""
        values, count = features.values, len(features.values)
        if count < 2:
            return math.nan
        labels = torch.tensor([self.source.label(i) for i in features.indices.tolist()], device=values.device)
        k = min(NEIGHBOURS, count - 1)
        ranked = weighted_knn(values, labels, values, k=[k], own=0)[k]
        return 100 * float((ranked[:, 0] == labels).float().mean())

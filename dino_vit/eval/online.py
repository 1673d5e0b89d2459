"""Evaluation during training: k-NN accuracy where there are labels, effective rank always."""

import math
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.distributed import all_gather, share
from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.data.sources.open import Source
from dino_vit.eval.features.extraction import Features, extract_features, pixel_features
from dino_vit.eval.knn import weighted_knn
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import Preparation

NEIGHBOURS = 20
_PIXEL_SIDE = 32  # raw pixels of larger images cost memory and classify no better


def rankme(features: Tensor) -> float:
    """Return the effective rank, exp(entropy of the singular values over their sum), from 1 to the width."""
    singular = torch.linalg.svdvals(features.cpu().double())  # some accelerators lack float64
    shares = singular / singular.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.special.entr(shares).sum().exp())


def random_indices(source: Source, seed: int) -> list[int]:
    """Return the indices of a source in a random order."""
    bits = random_bits(seed, RngPurpose.EVALUATION, np.arange(len(source)))
    return np.argsort(bits, kind="stable").tolist()


class OnlineEvaluation:
    """Evaluate a backbone on the same few thousand images of a source each time, without side effects.

    The images are a function of the seed. Each is classified by its nearest neighbours among the others, so
    that all images serve as queries for one forward pass each. In a process group each process computes the
    features of its share, and all get the same figures.
    """

    def __init__(
        self,
        *,
        source: Source,
        preparation: Preparation,
        seed: int,
        images: int = 5000,
        batch_size: int = 256,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.source, self.preparation = source, preparation
        self.batch_size, self.autocast = batch_size, autocast
        self.warned = False  # of unreadable images
        order = random_indices(source, seed)
        labelled = list(islice((i for i in order if source.label(i) is not None), images))
        self.has_labels = len({source.label(index) for index in labelled}) > 1
        self.indices = labelled if self.has_labels else order[:images]

    def __call__(self, backbone: VisionTransformer) -> dict[str, float]:
        """Return `knn`, top-1 in per cent, unless labels are missing or all the same, and `rankme`."""
        features = self._features(backbone)
        finite = bool(features.values.isfinite().all())
        figures = {"rankme": rankme(features.values) if finite else math.nan}
        if self.has_labels:
            figures["knn"] = self._accuracy(features) if finite else math.nan
        return figures

    def raw_pixels(self) -> float | None:
        """Return `knn` of the pixels themselves, a baseline for features; None without labels.

        Computed by the calling process alone.
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
        mine = extract_features(
            backbone,
            self.source,
            share(self.indices),
            preparation=self.preparation,
            batch_size=self.batch_size,
            autocast=self.autocast,
        )
        if mine.unreadable and not self.warned:
            self.warned = True
            count, first = len(mine.unreadable), mine.unreadable[0]
            log.warning("online evaluation leaves out unreadable images: %d, first %s", count, first)
        return Features(all_gather(mine.values), all_gather(mine.indices), mine.unreadable)

    def _accuracy(self, features: Features) -> float:
        """Return the per cent of images that their neighbours classify correctly."""
        values, count = features.values, len(features.values)
        if count < 2:  # most images became unreadable
            return math.nan
        labels = torch.tensor([self.source.label(i) for i in features.indices.tolist()], device=values.device)
        k = min(NEIGHBOURS, count - 1)
        ranked = weighted_knn(values, labels, values, k=[k], own=0)[k]
        return 100 * float((ranked[:, 0] == labels).float().mean())

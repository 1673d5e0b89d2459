"""Evaluation during training by masks: the mIoU of patches, classified by their neighbours in other images.

A few patches of the centre crops of a few hundred images bound memory and time. One half is learned from, in
blocks, as in `dense`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_vit.config.commands import IGNORED
from dino_vit.core import log
from dino_vit.core.blocks import choose_half
from dino_vit.core.distributed import (
    agree,
    all_gather,
    in_all_processes,
    rank_slice,
    share_work,
    world_size,
)
from dino_vit.core.text import plural, public
from dino_vit.data.image_set import ImageSet, spread
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.masks import PUBLISHED, open_watched, published_like
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.figures import Measured, summed
from dino_vit.eval.maps.windows import count_pixels, mean_iou, patch_classes
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.online import NEIGHBOURS, OnlineEvaluation
from dino_vit.eval.reading import in_batches
from dino_vit.models.backbone import Backbone, FeatureSpec
from dino_vit.reports.readings import Z

IMAGES, PATCHES, BATCH = 400, 50, 16  # in all, of an image, images in memory at a time
SPEC = FeatureSpec(tokens="patches")


class OnlineSegmentation:
    """Evaluate the patches of a backbone on the same images each time; all processes get the same figures."""

    def __init__(self, source: ImageSet, evaluation: OnlineEvaluation, backbone: Backbone) -> None:
        self.source, self.evaluation = source, evaluation
        self.grid = backbone.grid_of(*evaluation.transform.size)
        self.patches = spread(math.prod(self.grid), PATCHES)
        indices = np.array(spread(len(source), IMAGES))
        judged = choose_half(source.name, indices.tolist())
        self.learned, self.judged = (self._classes_of(indices[rows].tolist()) for rows in (~judged, judged))
        classes, targets = (torch.cat([*part.values()]) for part in (self.learned, self.judged))
        classes = classes[classes < IGNORED]
        if len(torch.unique(classes)) < 2 or (targets == IGNORED).all():
            text = "the patches to learn from need two classes, and those to judge by one"
            raise ValueError(f"{text}; the value {IGNORED} is none")
        guess = classes.mode().values.expand_as(targets)
        constant = 100 * self._measure(guess, [*self.judged.values()]).mean
        self.guesses: dict[str, Any] = {"constant_miou": constant, "mask_images": len(self.judged)}

    def __call__(self, backbone: Backbone) -> dict[str, Any]:
        """Return the mIoU and its standard error, in per cent."""
        bank, learned = self._features(backbone, self.learned)
        queries, judged = self._features(backbone, self.judged)
        if not (learned and judged and bank.isfinite().all() and queries.isfinite().all()):
            return {"miou": math.nan}
        classes = torch.cat(learned)
        bank, classes = bank[(classes < IGNORED).to(bank.device)], classes[classes < IGNORED]
        k = min(NEIGHBOURS, len(bank))
        predicted = weighted_knn(bank, classes, queries, k=[k])[k][:, 0].cpu()
        figure = self._measure(predicted, judged).figure
        return {"miou": figure.value, "miou_error": (figure.high - figure.low) / (2 * Z)}

    def _classes_of(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Return the classes of patches by image; name what is left out.

        Each process reads some of the masks, so that all leave out the same.
        """
        with in_all_processes():
            read = share_work(self._read_classes, indices)
        for _, classes in read:
            if isinstance(classes, str):
                log.warning("left out: %s", classes)
        by_image = {index: classes for index, classes in read if isinstance(classes, Tensor)}
        if not by_image:
            raise ValueError("there are too few masks that can be read")
        return by_image

    def _read_classes(self, indices: Sequence[int]) -> list[tuple[int, Tensor | str]]:
        """Return images with the classes of their patches, or why their masks cannot be read."""
        read = list[tuple[int, Tensor | str]]()
        for index in indices:
            try:
                mask = self.evaluation.transform.place_mask(self.source.mask(index))
            except UnreadableImage as error:
                read.append((index, str(error)))
            else:
                patches = patch_classes(mask[None], self.grid, len(self.source.classes)).flatten()
                read.append((index, patches[self.patches].long()))
        return read

    def _features(self, backbone: Backbone, classes: dict[int, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the features (n, D) of patches, and their classes image by image."""
        transform, autocast = self.evaluation.transform, self.evaluation.autocast
        frozen = FrozenBackbone(model=backbone, transform=transform, autocast=autocast)
        batches = list(in_batches(rank_slice([*classes]), BATCH))
        # As many passes in every process: for each, all of them gather sharded weights.
        batches += [[]] * (math.ceil(len(classes) / (world_size() * BATCH)) - len(batches))
        parts = [
            (batch.indices, batch.values[:, self.patches].flatten(0, 1))
            for batch in frozen.features(self.source, batches, SPEC)
        ]
        images, features = (all_gather(torch.cat(part)) for part in zip(*parts, strict=True))
        return features, [classes[image] for image in images.tolist()]

    def _measure(self, predicted: Tensor, classes: Sequence[Tensor]) -> Measured:
        by_image = zip(torch.split(predicted, len(self.patches)), classes, strict=True)
        counts = torch.stack([count_pixels(*image, len(self.source.classes)) for image in by_image])
        images, metric = np.arange(len(counts)), summed(mean_iou)
        return Measured(title="mIoU", images=images, parts=counts.unbind(1), metric=metric)


def open_segmentation(
    spec: str, evaluation: OnlineEvaluation, backbone: Backbone
) -> tuple[OnlineSegmentation | None, list[str]]:
    """Return the evaluation by the masks of a source, if it has some, and what is to be said of it."""

    def open_masked() -> ImageSet | None:
        return open_watched(spec, evaluation.source) if backbone.has_patches else None

    try:
        masked = agree("masks", open_masked, lambda masked: masked.describe() if masked else "none")
        if masked is None:
            return None, learned_masks(spec)
        segmentation = OnlineSegmentation(masked, evaluation, backbone)
    except ValueError as error:
        return None, [f"the run is not evaluated by masks: {error}"]
    judged, learned = plural(len(segmentation.judged), "image"), plural(len(segmentation.learned), "other")
    by = f"patches of {judged} are classified by those of {learned}"
    return segmentation, [f"the run is evaluated by masks: {by}"]


def learned_masks(spec: str) -> list[str]:
    """Say that a run whose source is the whole folder of a published set learns from its masks as well."""
    if not (name := published_like(spec)):
        return []
    published, folder = PUBLISHED[name], public(spec).rstrip("/")
    images = f"{folder}/{published.images.partition('/')[0]}"
    return [
        f"{folder} looks like {published.title}: the run learns from the pictures in {published.masks} too; "
        f"give {images} to leave them out"
    ]

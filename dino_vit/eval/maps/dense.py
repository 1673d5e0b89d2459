"""Judge the patches of a frozen backbone by masks: learn the classes of pixels of some, test other images."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dino_vit.config.commands import DenseConfig
from dino_vit.core.blocks import choose_half
from dino_vit.core.distributed import agree
from dino_vit.core.text import Result, format_table, plural, public
from dino_vit.data.image_set import ImageSet
from dino_vit.data.sources.masks import PUBLISHED, open_masks
from dino_vit.eval.features import FrozenBackbone, frozen_backbone, warn_of_unreadable
from dino_vit.eval.figures import Figure, Measured, summed
from dino_vit.eval.maps.segmentation import (
    JUDGES,
    choose_steps,
    judge,
    patch_bank,
    pixel_accuracy,
    train_head,
)
from dino_vit.eval.results import asked_output, evaluation
from dino_vit.eval.sets import refuse_same_images
from dino_vit.models.backbone import FeatureSpec


class PixelFigures(NamedTuple):
    """How well pixels are classified, in per cent."""

    mean_iou: Figure
    pixel_accuracy: Figure
    iou: dict[str, float]  # by class


@dataclass(frozen=True, kw_only=True)
class DenseResult(Result):
    """How well patches tell the class of each pixel."""

    knn: PixelFigures
    linear: PixelFigures
    measured: list[Measured] = field(repr=False)  # mIoU of both judges, with each image's part
    path: Path | None  # of the JSON file, if one was written


def run(config: DenseConfig) -> DenseResult:
    """Learn from the patches of some images and judge the pixels of others; with an output, write JSON."""
    return evaluate(config, frozen_backbone(config))


def evaluate(config: DenseConfig, frozen: FrozenBackbone) -> DenseResult:
    """Do the same with a backbone that is loaded already."""
    spec = FeatureSpec(tokens="patches", blocks=config.blocks)
    if not frozen.model.has_patches:
        path = frozen.describe_weights()["source"]
        raise ValueError(f"{path} has no patches: its features are made after pooling")
    frozen.check_all_equal()
    output = asked_output(config, frozen.model.provenance.source)
    train, train_indices, queries, indices = agree("images with masks", lambda: _open(config), _describe)
    bank = patch_bank(frozen, train, train_indices, spec, patches=config.patches)
    steps = config.steps or choose_steps(len(bank.images))
    head = train_head(frozen, train, bank, spec, steps)
    measured = judge(frozen, queries, indices, bank, head, spec, k=config.k)
    warn_of_unreadable(train, train_indices, bank.images)
    warn_of_unreadable(queries, indices, measured[0].images)
    images, classes, true = len(measured[0].images), queries.classes, measured[0].parts[2].sum(0)
    if not true.sum():
        raise ValueError(f"{public(config.source)}: no pixel of a mask that could be read has a class")
    figures = {name: pixel_figures(each, classes) for name, each in zip(JUDGES, measured, strict=True)}
    largest, percent = classes[int(true.argmax())], float(100 * true.max() / true.sum())
    results = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": images,
        "bank": len(bank.features),
        "bank_images": len(bank.images),
        "steps": steps,
        "largest_class": {"name": largest, "percent": percent},
        **{name: pixels._asdict() for name, pixels in figures.items()},
    }
    evaluation("dense", output, "linear mIoU", figures["linear"].mean_iou, results)
    rows = [[title, *map(str, figures[name][:2])] for name, title in JUDGES.items()]
    text = (
        f"pixels of {plural(images, 'image')}; learned from {plural(len(bank.images), 'other')}: k-NN from "
        f"{len(bank.features):,} patches, the linear head in {plural(steps, 'step')}\n\n"
        f"{format_table(['', 'mIoU %', 'pixels %'], rows)}\n"
        f"{largest}, the largest class, has {percent:.1f} % of the pixels"
    )
    text += f"\n\n{output}" if output else ""
    return DenseResult(**figures, measured=measured, path=output, text=text)


def _open(config: DenseConfig) -> tuple[ImageSet, Sequence[int], ImageSet, Sequence[int]]:
    """Return the images to learn from and those to judge."""
    values: dict[str, Any] = {"class_names": config.class_names, "ignore_value": config.ignore_value}
    queries = open_masks(config.source, config.masks, **values)
    published = config.masks if config.masks in PUBLISHED else None
    train_spec = config.train or (config.source if published else None)
    if train_spec is None:
        if len(queries) < 2:
            raise ValueError(
                f"{public(config.source)} has one image with a mask, which leaves none to evaluate on"
            )
        judged = choose_half(queries.name, range(len(queries)))
        return queries, np.flatnonzero(~judged).tolist(), queries, np.flatnonzero(judged).tolist()
    train = open_masks(train_spec, config.train_masks or published, training=True, **values)
    refuse_same_images(config.source, queries, train_spec, train)
    if list(train.classes) != list(queries.classes):
        raise ValueError(f"{public(train_spec)} has different classes from {public(config.source)}")
    return train, range(len(train)), queries, range(len(queries))


def _describe(opened: tuple[ImageSet, Sequence[int], ImageSet, Sequence[int]]) -> str:
    train, train_indices, queries, indices = opened
    learned, judged = train.describe(), queries.describe()
    return f"{len(indices):,} of {judged} to judge, {len(train_indices):,} of {learned} to learn from"


def pixel_figures(measured: Measured, classes: Sequence[str]) -> PixelFigures:
    """Return the figures of the pixels that were counted for mIoU."""
    right, predicted, true = (part.sum(0) for part in measured.parts)
    union = predicted + true - right
    iou = 100 * right / union.clamp(min=1)
    return PixelFigures(
        mean_iou=measured.figure,
        pixel_accuracy=replace(measured, metric=summed(pixel_accuracy)).figure,
        iou={name: float(iou[i]) for i, name in enumerate(classes) if union[i] > 0},
    )

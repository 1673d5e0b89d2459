"""Evaluate the patches of a frozen backbone by masks: their neighbours, a linear layer, the attention."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from dino_vit.commands import Result, format_table
from dino_vit.config.settings import Count, Few, FewOrZero, NonEmpty, Positive, Problem, setting
from dino_vit.core.distributed import all_gather, is_main_process, share
from dino_vit.data.sources.masks import IGNORED, MaskedSource, open_masks
from dino_vit.eval.accuracy import results_path, write_results
from dino_vit.eval.confidence import Interval, Measured, measured_share
from dino_vit.eval.features.frozen import BackboneConfig, FrozenBackbone, frozen_backbone
from dino_vit.eval.maps.dense import (
    Overlaps,
    best_head_overlap,
    iou_of_sums,
    mean_iou,
    mean_over_images,
    pixel_accuracy,
)
from dino_vit.eval.maps.patches import PixelClassifier, patch_bank, read_patches
from dino_vit.eval.maps.pictures import Panel, as_picture, colour_classes, write_sheet

JUDGES = {"k-NN of patches": "knn", "linear layer": "linear"}
Value = Annotated[int, Field(ge=0, le=255)]  # of a pixel of a mask


class DenseConfig(BackboneConfig):
    """Classify the pixels of images by their patches, on features of a frozen backbone."""

    masks: str | None = setting(None, "folder of PNG masks named as the images; null: masks/ beside them")
    train_masks: str | None = setting(None, "the same of train")
    class_names: str | None = setting(None, "text file with the name of each class, a line each")
    ignore_value: Value = setting(IGNORED, "value of pixels that belong to no class")
    background: Value | None = setting(None, "class that is no object, for the measure of attention")
    train: str | None = setting(None, "images with masks to learn from; null: every other one of source")
    k: Few = setting(20, "neighbours of a patch")
    temperature: Positive = setting(0.07, "a neighbour's vote is exp(cosine / temperature)")
    patches: Count = setting(50_000, "patches to learn from, at most; as many of each image")
    cs: NonEmpty[Positive] = setting((0.01, 1.0, 100.0), "inverse penalties of the linear layer to try")
    pictures: FewOrZero = setting(8, "images to draw, beside their masks and the predictions")
    output: str | None = setting(
        None,
        "JSON file, with the picture beside; null: dense.json in eval/ of the run or beside the weights",
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield a setting that would have no effect."""
        if self.train_masks and not self.train:
            yield Problem("train_masks are those of train, which is not given", ("train_masks", "train"))


class Judged(NamedTuple):
    """What the judges found in the images of all processes."""

    indices: Tensor  # of the images, in the source
    overlaps: dict[str, Overlaps]
    attention: Tensor  # overlap of the best head with the object in each image
    rows: list[list[Tensor]]  # pictures of the first images


class PixelFigures(NamedTuple):
    """What a judge found, in per cent."""

    mean_iou: Interval
    pixel_accuracy: Interval
    iou: dict[str, float]  # by class

    def to_json(self) -> dict[str, Any]:
        """Return them as plain values."""
        intervals = {name: getattr(self, name)._asdict() for name in ("mean_iou", "pixel_accuracy")}
        return {**intervals, "iou": self.iou}


@dataclass(frozen=True, kw_only=True)
class DenseResult(Result):
    """How well patches tell the class of each pixel."""

    knn: PixelFigures
    linear: PixelFigures
    attention: Interval | None  # overlap of the best head with the object in per cent; None without objects
    measured: list[Measured] = field(repr=False)  # mIoU of both judges, and attention, with each image's part
    path: Path  # of the JSON file
    picture: Path | None  # of the first images beside their masks and the predictions
    details: dict[str, Any] = field(repr=False)  # all that the JSON file holds


def run(config: DenseConfig) -> DenseResult:
    """Learn from the patches of some images, judge the pixels of others, write JSON and a picture."""
    frozen = frozen_backbone(config)
    train, train_indices, queries, indices = _open(config)
    bank = patch_bank(frozen, train, train_indices, patches=config.patches)
    classifier = PixelClassifier(bank, k=config.k, temperature=config.temperature, cs=config.cs)
    judged = _judge(config, frozen, queries, indices, classifier)
    path = results_path("dense", weights=config.weights, output=config.output)
    attention = mean_over_images(judged.attention)
    classes = queries.classes
    true = judged.overlaps["knn"].true.sum(0)
    if not true.sum():
        raise ValueError(f"{config.source}: no pixel of a mask that could be read has a class")
    figures = {name: _figures(overlaps, classes) for name, overlaps in judged.overlaps.items()}
    details = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": len(judged.attention),
        "bank": len(bank.features),
        "c": classifier.c,
        "classes": [name for name, pixels in zip(classes, true.tolist(), strict=True) if pixels],
        "largest_class": {
            "name": classes[int(true.argmax())],
            "percent": float(100 * true.max() / true.sum()),
        },
        "attention": attention and attention._asdict(),
        **{name: one.to_json() for name, one in figures.items()},
    }
    picture = path.with_name(f"{path.stem}.png" if path.suffix == ".json" else f"{path.name}.png")
    written = [path, *([picture] if judged.rows else [])]
    if is_main_process():
        write_results(path, details)
        if judged.rows:
            titles = ["image", "mask", *JUDGES]
            write_sheet([[Panel(one) for one in row] for row in judged.rows], picture, titles=titles)
    return DenseResult(
        **figures,
        attention=attention,
        measured=_measured(judged),
        path=path,
        picture=picture if judged.rows else None,
        details=details,
        text="\n\n".join([_table(figures, attention, details), "\n".join(map(str, written))]),
    )


def _open(config: DenseConfig) -> tuple[MaskedSource, Sequence[int], MaskedSource, Sequence[int]]:
    """Return the images to learn from and those to judge."""

    values: dict[str, Any] = {"class_names": config.class_names, "ignore_value": config.ignore_value}
    queries = open_masks(config.source, config.masks, **values)
    if config.background is not None and config.background >= len(queries.classes):
        text = f"background={config.background} is no class of {config.source}: they go from 0 to"
        raise ValueError(f"{text} {len(queries.classes) - 1}")
    if config.train is None:
        if len(queries) < 2:
            raise ValueError(f"{config.source} has one image with a mask, which leaves none to judge")
        return queries, range(0, len(queries), 2), queries, range(1, len(queries), 2)
    train = open_masks(config.train, config.train_masks, **values)
    if list(train.classes) != list(queries.classes):
        raise ValueError(f"{config.train} has other classes than {config.source}")
    return train, range(len(train)), queries, range(len(queries))


def _judge(
    config: DenseConfig,
    frozen: FrozenBackbone,
    source: MaskedSource,
    indices: Sequence[int],
    classifier: PixelClassifier,
) -> Judged:
    """Return what the judges and the attention come to, and rows of pictures of the first images."""
    classes = len(source.classes)
    none = Overlaps(*(torch.zeros(0, classes, dtype=torch.long, device=frozen.device) for _ in range(3)))
    counted = {name: [none] for name in JUDGES.values()}  # a process may have no image
    shares = [torch.zeros(0, device=frozen.device)]
    judged = [torch.zeros(0, dtype=torch.long, device=frozen.device)]
    rows: list[list[Tensor]] = []
    for batch in read_patches(frozen, source, share(indices), "images to judge"):
        height, width = batch.masks.shape[1:]
        predicted = classifier.predict(batch.features, (height, width))
        for name, kinds in predicted.items():
            counted[name].append(Overlaps.of(kinds, batch.masks, classes))
        shares.append(best_head_overlap(batch.attention, batch.masks, config.background))
        judged.append(torch.as_tensor(batch.indices, device=frozen.device))
        for row, index in list(enumerate(batch.indices))[: max(0, config.pictures - len(rows))]:
            maps = [batch.masks[row], *(kinds[row] for kinds in predicted.values())]
            image = as_picture(frozen.preparation.read(source, index))
            rows.append([image, *(colour_classes(one.cpu(), image) for one in maps)])
    joined = {
        name: Overlaps(*(all_gather(torch.cat(parts)) for parts in zip(*of_judge, strict=True)))
        for name, of_judge in counted.items()
    }
    return Judged(all_gather(torch.cat(judged)), joined, all_gather(torch.cat(shares)), rows)


def _measured(judged: Judged) -> list[Measured]:
    """Return the figures with what each image contributes."""
    images, kept = judged.indices.cpu().numpy(), ~judged.attention.isnan()
    found = [
        Measured(title=f"mIoU, {title}", images=images, parts=judged.overlaps[name], figure=iou_of_sums)
        for title, name in JUDGES.items()
    ]
    if kept.any():
        found.append(measured_share("attention", images[kept.cpu().numpy()], judged.attention[kept]))
    return found


def _figures(overlaps: Overlaps, classes: Sequence[str]) -> PixelFigures:
    right, predicted, true = (part.sum(0) for part in overlaps)
    iou = 100 * right / (predicted + true - right).clamp(min=1)
    of_classes = {name: float(iou[i]) for i, name in enumerate(classes) if true[i] > 0}
    return PixelFigures(mean_iou(overlaps), pixel_accuracy(overlaps), of_classes)


def _table(
    figures: Mapping[str, PixelFigures], attention: Interval | None, details: Mapping[str, Any]
) -> str:
    rows = [
        [title, str(figures[name].mean_iou), str(figures[name].pixel_accuracy)]
        for title, name in JUDGES.items()
    ]
    largest = details["largest_class"]
    head = f"pixels of {details['images']:,} images, learned from {details['bank']:,} patches of others"
    note = f"{largest['name']}, the largest class, has {largest['percent']:.1f} % of the pixels"
    heads = f"attention: the best head overlaps the object by {attention} %" if attention else ""
    return f"{head}\n\n{format_table(['', 'mIoU %', 'pixels %'], rows)}\n{note}\n{heads}"

"""Evaluate the patches of a frozen backbone by masks: their neighbours, a linear layer, the attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from dino_vit.commands import Result, format_table
from dino_vit.config.settings import Count, Few, FewOrZero, NonEmpty, Positive, Problem, setting
from dino_vit.core.distributed import is_main_process
from dino_vit.data.sources.masks import IGNORED, MaskedSource, open_masks
from dino_vit.eval.accuracy import Interval, Measured, results_path, write_results
from dino_vit.eval.frozen import BackboneConfig, frozen_backbone
from dino_vit.eval.maps.dense import JUDGES, PixelClassifier, PixelFigures, judge, patch_bank
from dino_vit.eval.maps.pictures import write_sheet

Value = Annotated[int, Field(ge=0, le=255)]  # of a pixel of a mask


class DenseConfig(BackboneConfig):
    """Classify the pixels of images by their patches, on features of a frozen backbone."""

    examples: ClassVar = ("dense synthetic:scenes:1000 weights=runs/pretrain",)
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


@dataclass(frozen=True, kw_only=True)
class DenseResult(Result):
    """How well patches tell the class of each pixel."""

    knn: PixelFigures
    linear: PixelFigures
    attention: Interval | None  # overlap of the best head with the object in per cent; None without objects
    measured: list[Measured] = field(repr=False)  # mIoU of both judges, and attention, with each image's part
    path: Path  # of the JSON file
    picture: Path | None  # of the first images beside their masks and the predictions


def run(config: DenseConfig) -> DenseResult:
    """Learn from the patches of some images, judge the pixels of others, write JSON and a picture."""
    frozen = frozen_backbone(config)
    train, train_indices, queries, indices = _open(config)
    bank = patch_bank(frozen, train, train_indices, patches=config.patches)
    classifier = PixelClassifier(bank, k=config.k, temperature=config.temperature, cs=config.cs)
    options: dict[str, Any] = {"background": config.background, "pictures": config.pictures}
    judged = judge(frozen, queries, indices, classifier, **options)
    classes, true = queries.classes, judged.counts["knn"][:, 2].sum(0)
    if not true.sum():
        raise ValueError(f"{config.source}: no pixel of a mask that could be read has a class")
    figures, measured = {name: judged.figures(name, classes) for name in JUDGES}, judged.measured()
    attention = measured[-1].interval if measured[-1].title == "attention" else None
    largest, percent = classes[int(true.argmax())], float(100 * true.max() / true.sum())
    path = results_path("dense", weights=config.weights, output=config.output)
    picture = path.with_suffix(".png") if judged.rows else None
    lines = [
        f"pixels of {len(judged.indices):,} images, learned from {len(bank.features):,} patches of others\n",
        format_table(
            ["", "mIoU %", "pixels %"],
            [[title, *map(str, figures[name][:2])] for name, title in JUDGES.items()],
        ),
        f"{largest}, the largest class, has {percent:.1f} % of the pixels",
        *([f"attention: the best head overlaps the object by {attention} %"] if attention else []),
        f"\n{path}",
        *([str(picture)] if picture else []),
    ]
    if is_main_process():
        results = {
            "weights": frozen.describe_weights(),
            "settings": config.model_dump(mode="json"),
            "images": len(judged.indices),
            "bank": len(bank.features),
            "c": classifier.c,
            "classes": [name for name, pixels in zip(classes, true.tolist(), strict=True) if pixels],
            "largest_class": {"name": largest, "percent": percent},
            "attention": attention and attention._asdict(),
            **{
                name: {"mean_iou": iou._asdict(), "pixel_accuracy": pixels._asdict(), "iou": by_class}
                for name, (iou, pixels, by_class) in figures.items()
            },
        }
        write_results(path, results)
        if picture:
            panels = [[(image, "") for image in row] for row in judged.rows]
            write_sheet(panels, picture, titles=["image", "mask", *JUDGES.values()])
    return DenseResult(
        **figures,
        attention=attention,
        measured=measured,
        path=path,
        picture=picture,
        text="\n".join(lines),
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

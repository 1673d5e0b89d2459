"""How a classifier does with few training images, and on corrupted images: what k-NN and linear ones share.

Features are computed once. Of few images only the bank changes; corrupted are only the images that are
classified, never those that a classifier is trained on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dino_vit.config.settings import Count, Few, setting
from dino_vit.core import log
from dino_vit.core.progress import plural
from dino_vit.core.storage import replacing
from dino_vit.data.images.pixels import RGB
from dino_vit.data.sources.source import spread
from dino_vit.eval.accuracy import Accuracy, accuracy
from dino_vit.eval.classification.datasets import (
    LabelledFeatures,
    LabelledSubset,
    SupervisedConfig,
    labelled_features,
)
from dino_vit.eval.classification.knn import few_shot_rows
from dino_vit.eval.confidence import measured_share
from dino_vit.eval.disturbances.corruptions import CORRUPTIONS, SEVERITIES, Corruption, corruptions
from dino_vit.eval.disturbances.source import DisturbedSource
from dino_vit.eval.features.extraction import CLS, FeatureSpec
from dino_vit.eval.features.frozen import FrozenBackbone

Share = Annotated[float, Field(gt=0, lt=1)]


class RobustnessConfig(SupervisedConfig):
    """Classify with few training images, and classify corrupted images."""

    shots: tuple[Count, ...] = setting((), "also classify from only so many images per class")
    shares: tuple[Share, ...] = setting(
        (), "also from such shares of the training images, as many per class, such as 0.01 and 0.1"
    )
    repeats: Few = setting(5, "random choices of the images for each of shots and shares")
    corruptions: bool | tuple[Corruption, ...] = setting(
        False, "also classify corrupted images: true, or a list of the 15 kinds of ImageNet-C"
    )
    corrupted_images: Count | None = setting(1000, "corrupt at most so many, spread over all; null: all")


class FewImages(NamedTuple):
    """How few images a classifier is trained on."""

    given: str  # the setting, as it was written
    shots: int  # of each class
    share: float | None
    images: int  # of all classes: those that have fewer give all they have

    def __str__(self) -> str:
        return f"{self.shots} per class" + ("" if self.share is None else f" ({100 * self.share:g} %)")


def few_shot_banks(
    config: RobustnessConfig, bank: LabelledFeatures
) -> Iterator[tuple[FewImages, list[NDArray[np.int64]]]]:
    """Yield the rows of each repeat for all shots, then for all shares.

    A share is as many images of each class, as in the published lists: 1 % of ImageNet is 13 per class.
    """
    targets = bank.targets.cpu().numpy()
    counts = np.unique(targets, return_counts=True)[1]
    asked: list[tuple[str, int, float | None]] = [(f"shots={shots}", shots, None) for shots in config.shots]
    for part in config.shares:
        shots = round(part * len(bank) / len(counts))
        if not shots:
            log.warning("shares=%g is less than half an image of each class: one of each is taken", part)
        asked.append((f"shares={part:g}", max(1, shots), part))
    for given, shots, of_all in asked:
        if few := int((counts < shots).sum()):
            text = "%s: %s of %d with fewer than %d images: all of theirs are taken"
            log.warning(text, given, plural(few, "class", "classes"), len(counts), shots)
        yield (
            FewImages(given, shots, of_all, int(np.minimum(counts, shots).sum())),
            [
                few_shot_rows(targets, bank.indices, shots=shots, seed=config.seed, repeat=repeat)
                for repeat in range(config.repeats)
            ],
        )


def few_shot_result(
    few: FewImages, setting_: Mapping[str, float], top1: Sequence[Accuracy]
) -> dict[str, Any]:
    """Return the accuracies of all repeats, their mean and their deviation."""
    percents = [one.percent for one in top1]
    return {
        "shots": few.shots,
        "share": few.share,
        "images": few.images,
        **setting_,
        "mean": mean(percents),
        "standard_deviation": stdev(percents) if len(percents) > 1 else None,
        "top1": [one._asdict() for one in top1],
    }


def check_corruptions(config: RobustnessConfig, frozen: FrozenBackbone) -> None:
    """Raise if images are to be corrupted that cannot be."""
    if config.corruptions and frozen.preparation.pixels != RGB:
        raise ValueError("corruptions are defined for RGB images of 8 bits, which these weights do not take")


def corrupted_rows(config: RobustnessConfig, images: LabelledFeatures) -> NDArray[np.int64]:
    """Return the rows of the images that are corrupted."""
    limit = len(images) if config.corrupted_images is None else config.corrupted_images
    return np.array(spread(len(images), limit), np.int64)


def corruption_results(
    config: RobustnessConfig,
    frozen: FrozenBackbone,
    clean: LabelledFeatures,
    images: LabelledSubset,
    classify: Callable[[LabelledFeatures, str], Tensor],
    spec: FeatureSpec = CLS,
) -> dict[str, Any]:
    """Return the accuracies on images as they are, and by kind and severity of corruption.

    `classify` returns the class of each image by its features, with a classifier made from clean ones.
    The mean error is the plain mean over kinds and severities, not divided by that of AlexNet.
    """

    def right(asked: LabelledFeatures, title: str) -> Tensor:
        return classify(asked, title).cpu() == asked.targets.cpu()

    kinds = CORRUPTIONS if isinstance(config.corruptions, bool) else tuple(dict.fromkeys(config.corruptions))
    whole = replace(frozen, preparation=replace(frozen.preparation, fit="whole"))
    correct = []
    for each in corruptions(kinds):
        source = DisturbedSource(images.source, each, seed=config.seed, preparation=frozen.preparation)
        subset = LabelledSubset(source, clean.indices, clean.targets.cpu().numpy())
        found = labelled_features(whole, subset, spec, f"features, {each}")
        if len(found) != len(clean):
            raise ValueError(f"{len(clean) - len(found)} images can no longer be read; see the warning above")
        correct.append(right(found, f"neighbours, {each}"))
    by_kind = torch.stack(correct).view(len(kinds), len(SEVERITIES), len(clean))
    counts = by_kind.sum(dim=2).tolist()

    def interval(rights: Tensor) -> dict[str, float]:
        shares = rights.double().mean(dim=0)
        return measured_share("", clean.indices, shares).interval._asdict()

    return {
        "images": len(clean),
        "clean": accuracy(int(right(clean, "neighbours, clean").sum()), len(clean))._asdict(),
        "mean_error": interval(~by_kind.flatten(0, 1)),
        "kinds": {
            kind: {
                "mean": interval(of_kind),
                "severities": [accuracy(count, len(clean))._asdict() for count in of_severities],
            }
            for kind, of_kind, of_severities in zip(kinds, by_kind, counts, strict=True)
        },
    }


def write_plot(
    few_shot: Sequence[Mapping[str, Any]], corrupted: Mapping[str, Any] | None, path: Path
) -> None:
    """Draw the accuracy by number of images, and a map of those by kind and severity of corruption."""
    from matplotlib.figure import Figure

    wide = 6.2 if corrupted else 0
    figure = Figure(figsize=((5 if few_shot else 0) + wide, 5), layout="constrained")
    axes = list(figure.subplots(1, bool(few_shot) + bool(corrupted), squeeze=False)[0])
    if few_shot:
        axis = axes.pop(0)
        (name,) = {"k", "C"} & few_shot[0].keys()
        # Each number of images has a C of its own; each k is a line.
        lines = sorted({one["k"] for one in few_shot}) if name == "k" else [None]
        for value in lines:
            points = sorted(
                (one for one in few_shot if value in (None, one[name])), key=lambda one: one["shots"]
            )
            axis.errorbar(
                [one["shots"] for one in points],
                [one["mean"] for one in points],
                [one["standard_deviation"] or 0 for one in points],
                marker="o",
                capsize=3,
                label="logistic regression" if value is None else f"k = {value}",
            )
        shots = sorted({one["shots"] for one in few_shot})
        axis.set(xscale="log", xlabel="images per class", ylabel="top-1 %", title="Few images")
        axis.set_xticks(shots, [str(each) for each in shots], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    if corrupted:
        _draw_corruptions(axes[0], corrupted)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=130, format="png")


def _draw_corruptions(axis: Any, corrupted: Mapping[str, Any]) -> None:
    clean = corrupted["clean"]["percent"]
    rows = [[clean, *(one["percent"] for one in each["severities"])] for each in corrupted["kinds"].values()]
    axis.imshow(rows, cmap="viridis", vmin=0, vmax=max(map(max, rows)) or 1, aspect="auto")
    axis.set_xticks(range(6), ["clean", *map(str, SEVERITIES)])
    axis.set_yticks(range(len(rows)), [kind.replace("_", " ") for kind in corrupted["kinds"]])
    middle = max(map(max, rows)) / 2
    for y, row in enumerate(rows):
        for x, percent in enumerate(row):
            colour = "black" if percent > middle else "white"
            axis.text(x, y, f"{percent:.1f}", ha="center", va="center", color=colour, fontsize=8)
    axis.set(xlabel="severity", title="Top-1 % under corruptions")

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

from dino_vit.config.settings import Count, Few, Problem, setting
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

    shots: tuple[Count, ...] = setting((), "also train on only this many images per class, such as 1 and 5")
    shares: tuple[Share, ...] = setting(
        (), "also train on only these shares of the images, as many of each class, such as 0.01 and 0.1"
    )
    repeats: Few = setting(5, "random choices of the images for each of shots and shares")
    corruptions: bool | tuple[Corruption, ...] = setting(
        False, "also classify corrupted images: true, or a list of the 15 kinds of ImageNet-C"
    )
    corrupted_images: Count | None = setting(1000, "most images to corrupt, from all over; null: all")

    def contradictions(self) -> Iterator[Problem]:
        """Yield settings that would have no effect."""
        for name, needs in (("repeats", ("shots", "shares")), ("corrupted_images", ("corruptions",))):
            default = type(self).model_fields[name].default
            if getattr(self, name) != default and not any(getattr(self, one) for one in needs):
                yield Problem(f"{name} has no effect without {' or '.join(needs)}", (name, *needs))


class FewImages(NamedTuple):
    """How few images a classifier is trained on."""

    shots: int  # of each class
    share: float | None  # of all images, if that was given
    images: int  # of all classes; one with fewer than `shots` gives all it has

    def __str__(self) -> str:
        share = "" if self.share is None else f" ({100 * self.share:g} %)"
        return f"{plural(self.shots, 'image')} per class{share}"


def few_shot_banks(
    config: RobustnessConfig, bank: LabelledFeatures
) -> Iterator[tuple[FewImages, list[NDArray[np.int64]]]]:
    """Yield the rows of each repeat for all shots, then for all shares.

    A share is as many images of each class, as in the published lists: 1 % of ImageNet is 13 per class.
    """
    targets = bank.targets.cpu().numpy()
    counts = np.unique(targets, return_counts=True)[1]
    of_shares = [(max(1, round(part * len(bank) / len(counts))), part) for part in config.shares]
    for shots, share in [*((shots, None) for shots in config.shots), *of_shares]:
        few = FewImages(shots, share, int(np.minimum(counts, shots).sum()))
        if short := int((counts < shots).sum()):
            text = "%s: %s of %d with fewer, all of whose images are taken"
            log.warning(text, few, plural(short, "class", "classes"), len(counts))
        if share and few.images > 1.5 * share * len(bank):
            log.warning("%s: one of each class makes %d of %d images", few, few.images, len(bank))
        yield (
            few,
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
        axis, lines = axes.pop(0), dict[str, list[Mapping[str, Any]]]()
        for one in sorted(few_shot, key=lambda one: one["shots"]):
            label = f"k = {one['k']}" if "k" in one else "logistic regression"
            lines.setdefault(label, []).append(one)
        for label, points in lines.items():
            shots, means = ([one[name] for one in points] for name in ("shots", "mean"))
            deviations = [one["standard_deviation"] or 0 for one in points]
            axis.errorbar(shots, means, deviations, marker="o", capsize=3, label=label)
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

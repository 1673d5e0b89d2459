"""Evaluation during training: accuracies or mAP by labels, always the rank and what colours explain."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.sections import BASELINES
from dino_vit.config.settings import Title
from dino_vit.core import Size
from dino_vit.core.distributed import agree, all_gather, rank_slice, world_size
from dino_vit.core.storage import digest
from dino_vit.core.text import plural
from dino_vit.data.image_set import ImageSet, random_indices
from dino_vit.eval.holdout import choose_folds
from dino_vit.eval.neighbours import neighbour_means, weighted_knn
from dino_vit.eval.sets import divide, labelled_subset
from dino_vit.eval.statistics import TITLES, largest_class, measure
from dino_vit.features.batches import missing_indices, warn_of_unreadable
from dino_vit.features.frozen import FrozenBackbone, build_baseline
from dino_vit.features.readings import FITTED_IMAGES, fit_levelling, levelled_spec
from dino_vit.models.backbone import CLS, Backbone, FeatureSpec
from dino_vit.views.eval_transform import EvalTransform

NEIGHBOURS = 20
_VAL_SHARE = 5  # one in so many images is judged, if the source has splits
# Which images were classified correctly: their bits, in hexadecimal.
Answers = Annotated[str, Field(pattern=r"^[0-9a-f]+$")]
_BASELINE_IMAGES = 1000  # that baselines are levelled by: by all, 3,072 pixels would take ten seconds
_RIDGE = 0.01  # penalty of a ridge regression, per image, on columns of variance 1


@dataclass(frozen=True)
class OnlineFigures:
    """What an evaluation measured; accuracies are in per cent, by the labels top-1 or mAP.

    `levelled_knn` is of the CLS token and the means of 3 × 3 cells of patches, each levelled
    (`features/readings.py`) by the images that vote. `probe` is a ridge regression from the CLS token and the
    mean of the cells to the labels, trained on the images that vote in k-NN and tested on its queries;
    without splits on one half of each class, in blocks, and tested on the other, in turn.
    """

    rankme: float | None = None  # of the CLS token
    knn: float | None = None  # of the CLS token
    levelled_knn: float | None = None
    probe: float | None = None
    colour: float | None = None  # share of the variance of CLS tokens that the image's colours explain
    knn_answers: Answers | None = None
    levelled_knn_answers: Answers | None = None
    probe_answers: Answers | None = None
    # Standard errors in points, where a figure is mAP, which no image is right or wrong by.
    knn_error: float | None = None
    levelled_knn_error: float | None = None
    probe_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """What needs no training, in per cent, and what accuracies are; figures are missing without labels."""

    metric: Title = "top-1"  # what all accuracies are
    pixels: float | None = None  # k-NN by the baselines, as they are or levelled, whichever is better
    edges: float | None = None
    colours: float | None = None  # a probe of the mean and std of each channel
    largest_class: float | None = None  # always guessed
    chance: float | None = None  # of several labels: always guessing their mean
    queries: int | None = None  # images that accuracies are of
    leave_one_out: bool | None = None  # whether images are classified by each other, for lack of splits


def rankme(features: Tensor) -> float:
    """Return the effective rank, exp(entropy of the singular values over their sum), from 1 to the width."""
    singular = torch.linalg.svdvals(features.cpu().double())  # some accelerators lack float64
    shares = singular / singular.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.special.entr(shares).sum().exp())


def colours(images: Tensor) -> Tensor:
    """Return the mean and std of each channel of images (B, C, H, W): (B, 2 C)."""
    std, mean = torch.std_mean(images.float(), dim=(2, 3))
    return torch.cat([mean, std], dim=1)


def ridge_predictions(values: Tensor, targets: Tensor, train: Tensor) -> Tensor:
    """Predict the targets (n, t) of the images outside `train` by a ridge regression on values (n, d)."""
    std, mean = torch.std_mean(values[train], dim=0, correction=0)
    x, y = (values - mean) / std.clamp(min=1e-6), targets[train]
    center, offset = x[train].mean(dim=0), y.mean(dim=0)
    gram, moments = (x[train] - center).T @ (x[train] - center), (x[train] - center).T @ (y - offset)
    penalty = _RIDGE * int(train.sum()) * torch.eye(len(gram), dtype=x.dtype)
    weight = torch.linalg.solve(gram + penalty, moments).T
    return x[~train] @ weight.T + (offset - weight @ center)


def cross_predictions(values: Tensor, targets: Tensor, first_half: Tensor) -> Tensor:
    """Predict the targets of each half by a ridge regression on the other half."""
    predictions = torch.empty_like(targets)
    for train in (first_half, ~first_half):
        predictions[~train] = ridge_predictions(values, targets, train)
    return predictions


def explained(features: Tensor, values: Tensor, first_half: Tensor) -> float:
    """Return the share of the variance of unit features that a regression on values explains."""
    targets = F.normalize(features)
    errors = targets - cross_predictions(values, targets, first_half)
    variance = (targets - targets.mean(dim=0)).square().sum()
    return 1 - float(errors.square().sum() / variance.clamp(min=1e-12))


@dataclass(frozen=True, kw_only=True)
class _WithColours(FeatureSpec):
    """The same tokens, and after them the colours of the image, which cost no second reading."""

    channels: int

    def shape(self, model: Backbone, size: Size) -> tuple[int, ...]:
        return (super().shape(model, size)[0] + 2 * self.channels,)

    def extract(self, model: Backbone, images: Tensor) -> Tensor:
        return torch.cat([super().extract(model, images), colours(images)], dim=1)


class OnlineEvaluation:
    """Evaluate a backbone on the same few thousand images of a source each time, without side effects.

    The images are a function of the seed. Each is classified by its nearest neighbours among the others, so
    that all images serve as queries for one forward pass each; if the source has splits, those of val or test
    are classified by those of train. In a process group each process computes the
    features of its share, and all get the same figures.
    """

    def __init__(
        self,
        *,
        source: ImageSet,
        transform: EvalTransform,
        seed: int,
        images: int = 5000,
        batch_size: int = 256,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.source, self.transform = source, transform
        self.batch_size, self.autocast = batch_size, autocast
        self.warned = False  # that some images cannot be read
        order = random_indices(source, seed)
        train, val = divide(labelled_subset("", source.subset(order)))
        chosen, self.votes = [val.first(images)], 0  # so many, the first, vote; 0: all vote on each other
        if train is not val:
            val = val.first(images // _VAL_SHARE)
            chosen = [train.first(images - len(val)), val]
            self.votes = len(chosen[0])
        rows = np.concatenate([each.indices for each in chosen])
        targets = np.concatenate([each.targets for each in chosen])
        self.has_labels = bool((targets != targets[:1]).any())
        self.indices = [order[row] for row in rows] if self.has_labels else order[:images]
        self.images = source.subset(self.indices)
        self.task, self.targets = val.task, torch.from_numpy(targets)
        agree("images to evaluate", lambda: self, OnlineEvaluation._describe)

    def _describe(self) -> str:
        facts = {"indices": torch.tensor(self.indices), "targets": self.targets}
        labels = self.task if self.has_labels else "no labels"
        return f"{plural(len(self.indices), 'image')}, {labels} ({digest(facts, {})[:16]})"

    def __call__(self, backbone: Backbone) -> OnlineFigures:
        """Evaluate the CLS token and, where there are labels, its reading with the cells."""
        spec = levelled_spec(backbone) if self.has_labels else CLS
        channels = self.transform.pixels.channels
        values, rows = self._features(backbone, _WithColours(tokens=spec.tokens, channels=channels))
        is_split = not self.votes or 0 < int((rows < self.votes).sum()) < len(rows)
        if len(rows) < 2 or not is_split or not values.isfinite().all():  # most images became unreadable
            return OnlineFigures(math.nan, math.nan if self.has_labels else None)

        tokens, image_colours = values[:, : -2 * channels], values[:, -2 * channels :].cpu()
        cls = tokens[:, : backbone.width]
        halves = torch.arange(len(rows)) % 2 == 0  # of images in a random order
        figures = OnlineFigures(rankme(cls), colour=explained(cls.cpu(), image_colours, halves))
        if not self.has_labels:
            return figures
        places = rearrange(tokens, "n (p d) -> n p d", d=backbone.width)
        averaged = torch.cat([cls, *([places[:, 1:].mean(dim=1)] if backbone.has_patches else [])], dim=1)
        return replace(
            figures,
            **self._judge(self._neighbours(cls, rows), rows, "knn"),
            **self._judge(self._neighbours(tokens, rows, spec.widths(backbone)), rows, "levelled_knn"),
            **self._judge(self._probe(averaged, rows), rows, "probe"),
        )

    def guesses(self) -> Guesses | None:
        """Return how well labels can be told without a network, computed by the calling process alone."""
        if not self.has_labels:
            return None
        targets = self.targets[self.votes :]
        if self.task == "multiclass":
            names = self.source.labels.names
            largest, chance = largest_class(targets.numpy(), names)[1], 100 / len(names)
        else:
            guess, rows = targets.mean(dim=0).expand_as(targets), torch.arange(len(self.targets))
            largest, chance = None, max(0.0, self._judge(guess, rows)["percent"])
        return Guesses(
            metric=TITLES[self.task],
            **self._baselines(),
            largest_class=largest,
            chance=chance,
            queries=len(targets),
            leave_one_out=not self.votes,
        )

    def _baselines(self) -> dict[str, float]:
        """Return the accuracies of neighbours by each baseline, and that of a probe of colours."""
        figures, pixels = dict[str, float](), self.transform.pixels
        for name in BASELINES:
            model = build_baseline(name, self.source, pixels=pixels)
            frozen = FrozenBackbone(model=model, transform=model.transform)
            features = frozen.extract(self.images, range(len(self.images)))
            rows = features.indices
            answers = (
                self._neighbours(features.values, rows, widths, _BASELINE_IMAGES)
                for widths in ([], [model.width])
            )
            figures[name] = max(self._judge(each, rows)["percent"] for each in answers)
            if name == "pixels":
                images = features.values.view(-1, pixels.channels, *model.image_size)
                figures["colours"] = self._judge(self._probe(colours(images), rows), rows)["percent"]
        return figures

    def _features(self, backbone: Backbone, spec: FeatureSpec) -> tuple[Tensor, Tensor]:
        """Return the features of all processes, each of which computes its share, and of which images."""
        frozen = FrozenBackbone(
            model=backbone, transform=self.transform, batch_size=self.batch_size, autocast=self.autocast
        )
        # As many in every process: for each, all of them gather sharded weights.
        images = self.images
        passes = math.ceil(len(images) / (world_size() * self.batch_size))
        mine = frozen.extract(images, rank_slice(range(len(images))), spec, passes)
        rows = all_gather(mine.indices)
        if len(rows) < len(images) and not self.warned:
            self.warned = True
            warn_of_unreadable(images, self.transform, missing_indices(images, rows))
        return all_gather(mine.values), rows

    def _neighbours(
        self, features: Tensor, rows: Tensor, widths: Sequence[int] = (), images: int = FITTED_IMAGES
    ) -> Tensor:
        """Predict labels by the neighbours; parts of these widths are levelled by at most so many images."""
        judged = (rows >= self.votes).nonzero()[:, 0]
        votes = (rows < self.votes).nonzero()[:, 0] if self.votes else judged
        device, labels = features.device, self.targets[rows[votes]].to(features.device)
        if widths:
            features = fit_levelling(features[votes.to(device)], widths, images=images)(features)
        bank, queries = features[votes.to(device)], features[judged.to(device)]
        offset, k = (None, len(bank)) if self.votes else (0, len(bank) - 1)
        vote = weighted_knn if self.task == "multiclass" else neighbour_means
        (answers,) = vote(bank, labels, queries, k=[min(NEIGHBOURS, k)], self_offset=offset).values()
        return answers[:, 0] if self.task == "multiclass" else answers

    def _probe(self, features: Tensor, rows: Tensor) -> Tensor:
        """Predict labels by a ridge regression to them."""
        targets, features = self.targets[rows], features.cpu()
        if self.task == "multiclass":
            classes, numbers = torch.unique(targets, return_inverse=True)
            targets = F.one_hot(numbers, len(classes)).float()
        if self.votes:
            outputs = ridge_predictions(features, targets, rows < self.votes)
        else:
            outputs = cross_predictions(features, targets, self._halves(rows))
        return classes[outputs.argmax(dim=1)] if self.task == "multiclass" else outputs

    def _halves(self, rows: Tensor) -> Tensor:
        """Return which images are in the first of two halves, each with a block of every class."""
        places = [self.indices[row] for row in rows.tolist()]  # in the order of their names
        series = self.targets[rows].tolist() if self.task == "multiclass" else [0] * len(rows)
        return torch.from_numpy(choose_folds(series, 2, seed=0, sort_key=places.__getitem__) == 0)

    def _judge(self, answers: Tensor, rows: Tensor, name: str = "percent") -> dict[str, Any]:
        """Return the figure of classes of images, or of outputs for several labels, under a name.

        With it come the images that were right, or for mAP the standard error.
        """
        rows, answers = rows[rows >= self.votes], answers.cpu()
        targets = self.targets[rows]
        if self.task == "multiclass":
            right = answers == targets
            bits = sum(1 << row for row in rows[right].tolist())  # that of an image is its place
            return {name: 100 * float(right.float().mean()), f"{name}_answers": f"{bits:x}"}
        measured = measure(self.task, rows.numpy(), answers, targets)[0]
        error = 100 * float(measured.draw(100).nanmean(1).std())
        return {name: 100 * measured.mean, f"{name}_error": error}

"""Choose a classifier by cross-validation on a few labelled images, and calibrate its confidences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.config.commands import LOGISTIC_IMAGES, STANDARD_CS
from dino_vit.config.settings import Task
from dino_vit.core.text import progress
from dino_vit.data.image_set import evenly_spaced
from dino_vit.eval.logistic import train_logistic
from dino_vit.eval.neighbours import nearest
from dino_vit.eval.sets import LabelledFeatures
from dino_vit.eval.statistics import Figure, accuracy, average_precision, measure
from dino_vit.models.classifiers import (
    BLOCK,
    LinearHeads,
    LinearScores,
    NeighbourScores,
    Scores,
    on_standardised,
    score_in_blocks,
    vote,
)

FOLDS = 5
NEIGHBOURS = (1, 3, 5, 10, 20, 50)
TEMPERATURES = torch.logspace(-1.3, 1.3, 105, dtype=torch.double)
JUDGED_SCORES = 10_000_000  # of each candidate in cross-validation, at most
_ABSENT = -30.0  # score of a class that no image learned from has


class Candidate(NamedTuple):
    """A classifier to try: its kind, and its C or number of neighbours."""

    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.kind} ({'k' if self.kind == 'k-NN' else 'C'} = {self.value:.3g})"


@dataclass(frozen=True)
class Trials:
    """What candidates say of labelled images, each by what it learned from the other folds."""

    tried: Sequence[Candidate]
    scores: Sequence[Tensor]  # (n, c) of each candidate
    targets: Tensor  # (n,) or (n, c)
    task: Task
    folds: Tensor  # (n,)
    tested: Tensor  # (n,) whether other folds have the class of an image
    rows: Sequence[int]  # of the images among those that were learned from

    @cached_property
    def hits(self) -> Tensor:
        """Whether each candidate predicts the class, or all labels, of each image: (candidates, n)."""
        if self.task == "multiclass":
            return torch.stack([scores.argmax(dim=1) == self.targets for scores in self.scores])
        return torch.stack([((scores > 0) == (self.targets > 0.5)).all(dim=1) for scores in self.scores])

    @cached_property
    def losses(self) -> Tensor:
        return torch.stack([losses_of(scores, self.targets, self.task) for scores in self.scores])

    def best(self, rows: Tensor) -> int:
        """Return the candidate with the best figure on some images; ties go to the lowest loss."""
        figures, losses = self.figures(rows), self.losses[:, rows].mean(dim=1).tolist()
        return max(range(len(self.tried)), key=lambda number: (figures[number], -losses[number]))

    def figures(self, rows: Tensor) -> list[float]:
        """Return the accuracy, or mAP, of each candidate, from 0 to 1."""
        if self.task == "multiclass":
            return self.hits[:, rows].double().mean(dim=1).tolist()
        targets = self.targets[rows].double()
        once = torch.ones(1, len(targets), dtype=torch.double, device=targets.device)
        precisions = (average_precision(once, scores[rows].double(), targets) for scores in self.scores)
        return [float(each.nanmean()) for each in precisions]

    @cached_property
    def chosen(self) -> Tensor:
        """For each image, the candidate that is the best on the other folds, (n,).

        An image is judged by it: the best of many on all images is in part the luckiest on them.
        """
        chosen = torch.zeros_like(self.folds)
        for fold in torch.unique(self.folds).tolist():
            chosen[self.folds == fold] = self.best(self.tested & (self.folds != fold))
        return chosen

    @property
    def right(self) -> Tensor:
        """Whether the candidate that is chosen on the other folds is right about each image, (n,)."""
        return self.hits.gather(0, self.chosen[None])[0]

    @cached_property
    def figure(self) -> Figure | None:
        """The accuracy, or mAP, of what is chosen so; None if no image can be tested."""
        if not self.tested.any():
            return None
        if self.task == "multiclass":
            return accuracy(int(self.right[self.tested].sum()), int(self.tested.sum()))
        # By ranks, as scores of different candidates do not compare.
        ranks = [_ranks(scores) for scores in self.scores]
        scores = torch.stack([ranks[number][row] for row, number in enumerate(self.chosen.tolist())])
        return measure(self.task, np.arange(len(scores)), scores, self.targets)[0].figure


def of_kind(trials: Trials, *, neighbours: bool) -> Trials:
    """Return the trials of k-NN alone, or those of the regressions."""
    chosen = [number for number, each in enumerate(trials.tried) if (each.kind == "k-NN") == neighbours]
    tried, scores = [trials.tried[number] for number in chosen], [trials.scores[number] for number in chosen]
    return replace(trials, tried=tried, scores=scores)


def _ranks(scores: Tensor) -> Tensor:
    """Return how many scores of the same label are lower than each, (n, c)."""
    columns = scores.T.contiguous()
    return torch.searchsorted(columns.sort(dim=1).values, columns).T.to(scores.dtype)


def candidates(task: Task, images: int, *, neighbours_only: bool = False) -> list[Candidate]:
    """Return what is tried, the simplest of each kind first."""
    least = images - math.ceil(images / FOLDS)  # that are learned from
    found = [Candidate("k-NN", k) for k in sorted(NEIGHBOURS, reverse=True) if k <= max(1, least)]
    if neighbours_only:
        return found
    if images > LOGISTIC_IMAGES:  # regressions would take longer than all else
        return found
    return [Candidate("logistic regression", c) for c in STANDARD_CS] + found


def train_candidate(candidate: Candidate, learned: LabelledFeatures) -> Scores:
    """Return the scores of a candidate, learned from some images; k-NN makes unit vectors of theirs."""
    if candidate.kind == "k-NN":
        for block in torch.split(learned.features, BLOCK):  # in place: they may be most of the memory
            block.copy_(F.normalize(block))
        k, classes = int(candidate.value), len(learned.classes)
        return NeighbourScores(learned.features, learned.targets, k=k, classes=classes)
    return train_regressions([candidate.value], learned)[0]


def score_all(
    tried: Sequence[Candidate], images: LabelledFeatures, learned: Tensor, queries: Tensor
) -> dict[Candidate, Tensor]:
    """Return what each candidate says of features, learned from some rows; one search is for all k."""
    scores, classes = dict[Candidate, Tensor](), len(images.classes)
    if cs := sorted(each.value for each in tried if each.kind != "k-NN"):
        regressions = train_regressions(cs, images[learned.cpu().numpy()])
        for c, regression in zip(cs, regressions, strict=True):
            scores[Candidate("logistic regression", c)] = score_in_blocks(regression, queries)
    if ks := [int(each.value) for each in tried if each.kind == "k-NN"]:
        cosines, rows = nearest(images.features, queries, k=max(ks), among=learned)
        blocks = [*zip(torch.split(cosines, BLOCK), torch.split(rows, BLOCK), strict=True)]
        for k in ks:
            votes = [vote(near[:, :k], images.targets[row[:, :k]], classes) for near, row in blocks]
            scores[Candidate("k-NN", k)] = torch.cat(votes)
    return scores


def train_regressions(cs: Sequence[float], learned: LabelledFeatures) -> list[LinearScores]:
    """Return a logistic regression for each C, the smallest first, on standardised features."""
    classes, targets = len(learned.classes), learned.targets
    present = torch.unique(targets) if learned.task == "multiclass" else torch.arange(classes)
    if learned.task == "multiclass":
        targets = torch.searchsorted(present, targets)

    def regressions(features: Tensor) -> list[LinearHeads]:
        return [train_logistic(features, targets, cs=cs, classes=len(present))]

    if len(present) == 1 and learned.task == "multiclass":  # of a fold: there is nothing to tell apart
        bias = learned.features.new_full((classes,), _ABSENT)
        bias[present] = 0
        return [LinearScores(bias.new_zeros(classes, learned.features.shape[1]), bias)] * len(cs)
    exact = torch.float64 if learned.features.device.type == "cpu" else torch.float32
    (heads,) = on_standardised(regressions, learned.features.to(exact))
    found = []
    for weight, bias in zip(heads.weight, heads.bias, strict=True):
        whole = weight.new_zeros(classes, weight.shape[1]), bias.new_full((classes,), _ABSENT)
        whole[0][present], whole[1][present] = weight, bias
        found.append(LinearScores(*whole))
    return found


def cross_validate(
    learned: LabelledFeatures, folds: Tensor, tried: Sequence[Candidate], title: str
) -> Trials:
    """Return what each candidate says of images, of very many for some, by those of the other folds."""
    classes = len(learned.classes)
    chosen = evenly_spaced(len(learned), max(1000, JUDGED_SCORES // classes))
    judged = torch.tensor(chosen, device=folds.device)
    scores = {each: learned.features.new_zeros(len(judged), classes) for each in tried}
    with progress(title, FOLDS) as advance:
        for fold in torch.unique(folds):
            held = (folds[judged] == fold).nonzero()[:, 0]
            others = (folds != fold).nonzero()[:, 0]
            found = score_all(tried, learned, others, learned.features[judged[held]])
            for each, by_candidate in found.items():
                scores[each][held] = by_candidate
            advance(1)
    tested, targets = tested_images(learned, folds)[judged], learned.targets[judged]
    return Trials(tried, [*scores.values()], targets, learned.task, folds[judged], tested, chosen)


def tested_images(learned: LabelledFeatures, folds: Tensor) -> Tensor:
    """Return whether other folds have the class of an image, (n,): otherwise nobody could tell it."""
    if learned.task == "multilabel":
        return torch.ones_like(folds, dtype=torch.bool)
    unseen = folds.new_full((len(learned.classes),), FOLDS)
    lowest = unseen.scatter_reduce(0, learned.targets, folds, "amin")
    highest = (unseen - FOLDS).scatter_reduce(0, learned.targets, folds, "amax")
    return (lowest < highest)[learned.targets]


def losses_of(scores: Tensor, targets: Tensor, task: Task, temperature: float = 1.0) -> Tensor:
    """Return the cross-entropy of each image, (n,)."""
    scores = scores.double() / temperature
    if task == "multilabel":
        losses = F.binary_cross_entropy_with_logits(scores, targets.double(), reduction="none")
        return losses.mean(dim=1)
    return F.cross_entropy(scores, targets, reduction="none")


def calibrate(scores: Tensor, targets: Tensor, task: Task) -> float:
    """Return the temperature that gives probabilities the lowest loss."""
    if not len(scores):
        return 1.0
    losses = [float(losses_of(scores, targets, task, each).mean()) for each in TEMPERATURES.tolist()]
    return float(TEMPERATURES[int(np.argmin(losses))])

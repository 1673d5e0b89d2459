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

from dino_vit.config.settings import Task
from dino_vit.core.text import progress
from dino_vit.data.image_set import evenly_spaced
from dino_vit.eval.logistic import train_logistic
from dino_vit.eval.neighbours import nearest
from dino_vit.eval.sets import LabelledFeatures
from dino_vit.eval.statistics import Figure, accuracy, average_precision, measure
from dino_vit.features.readings import Reading
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
from dino_vit.weights.classifier import activate

FOLDS = 10
CS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # what is larger is slow, and no better with few labels
NEIGHBOURS = (1, 3, 5, 10, 20, 50)
LOGISTIC_IMAGES = 100_000  # of more, regressions would take longer than all else
JUDGED_SCORES = 10_000_000  # of each candidate in cross-validation, at most
CALIBRATED = 1000  # images for the one temperature of a candidate
_ABSENT = -1e4  # score of a class that no image learned from has, at any temperature
_LARGEST = 1000  # temperature, in mean differences of scores; at higher ones float32 would make labels equal


REGRESSION, VOTE, SPREADING = "logistic regression", "k-NN", "label spreading"  # kinds of candidates


class Candidate(NamedTuple):
    """A classifier to try: its kind, its C or number of neighbours, and what is read of images."""

    kind: str
    value: float
    reading: Reading | None = None

    @property
    def how(self) -> str:
        """The classifier alone."""
        return f"{self.kind} ({'C' if self.kind == REGRESSION else 'k'} = {self.value:.3g})"

    def __str__(self) -> str:
        return f"{self.how} of {self.reading}" if self.reading else self.how


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
    judges: Tensor | None = None  # (n,) which images may judge; None: all

    @cached_property
    def judged(self) -> Tensor:
        """Which images the figures are of: all that may judge, (n,)."""
        return torch.ones_like(self.tested) if self.judges is None else self.judges

    @property
    def tested_judges(self) -> Tensor:
        """Which images that may judge can also be tested, (n,)."""
        return self.judged & self.tested

    @cached_property
    def hits(self) -> Tensor:
        """Whether each candidate predicts the class, or all labels, of each image: (candidates, n).

        A class that cannot be tested is never predicted, as one that no labelled image has.
        """
        if self.task == "multiclass":
            told = torch.stack([scores.argmax(dim=1) for scores in self.scores])
            return (told == self.targets) & self.tested
        return torch.stack([((scores > 0) == (self.targets > 0.5)).all(dim=1) for scores in self.scores])

    def best(self, rows: Tensor) -> int:
        """Return the candidate whose calibrated probabilities have the lowest loss on some images.

        Many candidates are right as often. Of no images nothing can be told, and the nearest one decides.
        """
        if not rows.any():
            return next(n for n, (kind, value, _) in enumerate(self.tried) if (kind, value) == (VOTE, 1))
        rows = rows.nonzero()[:, 0]
        some = rows[evenly_spaced(len(rows), CALIBRATED)]
        scores = torch.stack([each[some] for each in self.scores])
        temperatures = calibrate(scores, self.targets[some], self.task)
        calibrated = (each[rows].double() / t for each, t in zip(self.scores, temperatures, strict=True))
        losses = [losses_of(each, self.targets[rows], self.task).mean() for each in calibrated]
        return int(torch.stack(losses).argmin())

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
        if not self.tested_judges.any():
            return None
        if self.task == "multiclass":
            return widened(accuracy(int(self.right[self.judged].sum()), int(self.judged.sum())))
        # By ranks, as scores of different candidates do not compare.
        ranks = [_ranks(scores) for scores in self.scores]
        scores = torch.stack([ranks[number][row] for row, number in enumerate(self.chosen.tolist())])
        scores, targets = scores[self.judged], self.targets[self.judged]
        return widened(measure(self.task, np.arange(len(scores)), scores, targets)[0].figure)


def widened(figure: Figure) -> Figure:
    """Return a figure with the interval of one by folds, which are alike in what they learn from.

    After Nadeau and Bengio (2003): each fold adds to the variance what it judges by over what it learns from.
    """
    wider = math.sqrt(1 + FOLDS / (FOLDS - 1))
    low, high = (figure.value + wider * (bound - figure.value) for bound in (figure.low, figure.high))
    return replace(figure, low=max(low, 0.0), high=min(high, 100.0))


def of_kinds(trials: Trials, *kinds: str) -> Trials:
    """Return the trials of some kinds of candidates."""
    chosen = [number for number, each in enumerate(trials.tried) if each.kind in kinds]
    tried, scores = [trials.tried[number] for number in chosen], [trials.scores[number] for number in chosen]
    return replace(trials, tried=tried, scores=scores)


def join_trials(trials: Sequence[Trials]) -> Trials:
    """Return the trials of different candidates on the same images as one."""
    tried = [candidate for each in trials for candidate in each.tried]
    return replace(trials[0], tried=tried, scores=[scores for each in trials for scores in each.scores])


def _ranks(scores: Tensor) -> Tensor:
    """Return how many scores of the same label are lower than each, (n, c)."""
    columns = scores.T.contiguous()
    return torch.searchsorted(columns.sort(dim=1).values, columns).T.to(scores.dtype)


def candidates(
    folds: Tensor, reading: Reading | None = None, *, neighbours_only: bool = False
) -> list[Candidate]:
    """Return what is tried of a reading, the simplest of each kind first."""
    least = len(folds) - int(torch.bincount(folds).max())  # that are learned from
    found = [Candidate(VOTE, k, reading) for k in sorted(NEIGHBOURS, reverse=True) if k <= max(1, least)]
    if neighbours_only or len(folds) > LOGISTIC_IMAGES:
        return found
    return [Candidate(REGRESSION, c, reading) for c in CS] + found


def train_candidate(candidate: Candidate, learned: LabelledFeatures) -> Scores:
    """Return the scores of a candidate, learned from some images; k-NN makes unit vectors of theirs."""
    if candidate.kind == VOTE:
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
    if regressions := [each for each in tried if each.kind == REGRESSION]:
        found = train_regressions([each.value for each in regressions], images[learned.cpu().numpy()])
        for candidate, regression in zip(regressions, found, strict=True):
            scores[candidate] = score_in_blocks(regression, queries)
    if votes := [each for each in tried if each.kind == VOTE]:
        most = int(max(each.value for each in votes))
        cosines, rows = nearest(images.features, queries, k=most, among=learned)
        blocks = [*zip(torch.split(cosines, BLOCK), torch.split(rows, BLOCK), strict=True)]
        for candidate in votes:
            k = int(candidate.value)
            parts = [vote(near[:, :k], images.targets[row[:, :k]], classes) for near, row in blocks]
            scores[candidate] = torch.cat(parts)
    return scores


def train_regressions(cs: Sequence[float], learned: LabelledFeatures) -> list[LinearScores]:
    """Return a logistic regression for each C, the smallest first, on features of mean variance 1."""
    classes, targets = len(learned.classes), learned.targets
    present = torch.unique(targets) if learned.task == "multiclass" else torch.arange(classes)
    if learned.task == "multiclass":
        targets = torch.searchsorted(present, targets)

    def regressions(features: Tensor) -> list[LinearHeads]:
        return [train_logistic(features, targets, cs=cs, classes=len(present))]

    exact = torch.float64 if learned.features.device.type == "cpu" else torch.float32
    (heads,) = on_standardised(regressions, learned.features.to(exact), by_column=False)
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
    tested, targets = tested_images(learned, folds)[judged], learned.targets[judged]
    trials = Trials(tried, [*scores.values()], targets, learned.task, folds[judged], tested, chosen)
    if not tested.any():
        return trials
    with progress(title, FOLDS) as advance:
        for fold in torch.unique(folds):
            held = (folds[judged] == fold).nonzero()[:, 0]
            others = (folds != fold).nonzero()[:, 0]
            found = score_all(tried, learned, others, learned.features[judged[held]])
            for each, by_candidate in found.items():
                scores[each][held] = by_candidate
            advance(1)
    return trials


def tested_images(learned: LabelledFeatures, folds: Tensor) -> Tensor:
    """Return whether other folds have the class of an image, (n,): otherwise nobody could tell it."""
    kinds = learned.targets if learned.task == "multiclass" else torch.zeros_like(folds)
    seen = torch.zeros(int(kinds.max()) + 1, FOLDS, dtype=torch.bool, device=folds.device)
    seen[kinds, folds] = True
    return (seen.sum(dim=1) > 1)[kinds]


def losses_of(scores: Tensor, targets: Tensor, task: Task) -> Tensor:
    """Return the cross-entropy of each image, (n,)."""
    if task == "multilabel":
        losses = F.binary_cross_entropy_with_logits(scores, targets.double(), reduction="none")
        return losses.mean(dim=1)
    return F.cross_entropy(scores, targets, reduction="none")


def calibrate(scores: Tensor, targets: Tensor, task: Task, margin: float = 0.0) -> Tensor:
    """Return the temperature that gives probabilities of scores (..., n, c) the lowest cross-entropy.

    That is convex in 1 / temperature, so its slope says on which side the optimum lies. With a margin it is
    the temperature at which the slope is so many standard errors, over images, past its 0.
    """
    scores = scores.double()
    smooth = smoothed(scores, targets, task)
    sizes = scores.abs() if task == "multilabel" else -scores.topk(2).values.diff()
    high = (_LARGEST * sizes.mean(dim=(-2, -1))).clamp(min=1e-30).log()
    low = high - 24
    for _ in range(24):
        middle = (low + high) / 2
        outputs = activate(scores, task, middle.exp()[..., None, None])
        slopes = ((outputs - smooth) * scores).sum(dim=-1)
        sharp = slopes.sum(dim=-1) > -margin * slopes.square().sum(dim=-1).sqrt()
        low, high = torch.where(sharp, middle, low), torch.where(sharp, high, middle)
    return high.exp()


def smoothed(scores: Tensor, targets: Tensor, task: Task) -> Tensor:
    """Return targets (..., n, c) that are not certain, after Platt (1999), as there will be more images.

    A label that n images have is there with probability (n + 1) / (n + 2); a class with that of all n images
    together, and else it is the next by the scores.
    """
    if task == "multilabel":
        with_label = targets.double().sum(dim=0)
        return torch.where(targets > 0.5, 1 - 1 / (with_label + 2), 1 / (len(targets) - with_label + 2))
    wrong, given = 1 / (len(targets) + 2), targets[:, None].expand(*scores.shape[:-1], 1)
    second = scores.scatter(-1, given, -torch.inf).argmax(dim=-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, given, 1 - wrong).scatter(-1, second, wrong)

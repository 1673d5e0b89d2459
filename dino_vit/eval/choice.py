"""Choose a classifier by cross-validation on a few labelled images, and calibrate its confidences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.config.commands import LOGISTIC_IMAGES, STANDARD_CS
from dino_vit.config.sections import BASELINES
from dino_vit.config.settings import Task
from dino_vit.core.text import brief, plural, progress
from dino_vit.data.image_set import evenly_spaced
from dino_vit.eval.features import FrozenBackbone, baseline_like
from dino_vit.eval.figures import Figure, accuracy, average_precision, measure, trivial_baselines
from dino_vit.eval.neighbours import class_scores, nearest
from dino_vit.eval.probes import LinearHeads, on_standardised, train_logistic
from dino_vit.eval.sets import LabelledFeatures, LabelledSubset, labelled_features
from dino_vit.models.backbone import CLS, FeatureSpec
from dino_vit.weights.classifier import (
    BLOCK,
    Classifier,
    ClassifierFacts,
    LinearScores,
    NeighbourScores,
    Scores,
    score_in_blocks,
    vote,
)

FOLDS = 5
NEIGHBOURS = (1, 3, 5, 10, 20, 50)
TEMPERATURES = torch.logspace(-1.3, 1.3, 105, dtype=torch.double)
JUDGED_SCORES = 10_000_000  # of each candidate in cross-validation, at most
PERMUTATIONS = 199  # of the labels, for a p-value
PERMUTATION_IMAGES, PERMUTATION_SCORES = 2000, 400_000  # classified in each, at most, and their scores
SIGNIFICANT = 0.025
BASELINE_IMAGES = 10_000  # with more, neighbours by pixels take longer than all else
_ABSENT = -30.0  # score of a class that no image learned from has
_ALIKE = "if these images are like the labelled ones"


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
        """The candidate that is the best on the folds without an image (n,).

        To judge by: the best of many on all images is in part the luckiest on them.
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


def train(candidate: Candidate, learned: LabelledFeatures) -> Scores:
    """Return the scores of a candidate, learned from some images."""
    if candidate.kind == "k-NN":
        k, classes = int(candidate.value), len(learned.classes)
        return NeighbourScores(learned.features, learned.targets, k=k, classes=classes)
    return train_regressions([candidate.value], learned)[0]


def score_all(
    tried: Sequence[Candidate], learned: LabelledFeatures, queries: Tensor
) -> dict[Candidate, Tensor]:
    """Return what each candidate says of images that it has not learned from; one search is for all k."""
    scores, classes = dict[Candidate, Tensor](), len(learned.classes)
    if cs := sorted(each.value for each in tried if each.kind != "k-NN"):
        for c, regression in zip(cs, train_regressions(cs, learned), strict=True):
            scores[Candidate("logistic regression", c)] = score_in_blocks(regression, queries)
    if ks := [int(each.value) for each in tried if each.kind == "k-NN"]:
        cosines, rows = nearest(learned.features, queries, k=max(ks))
        blocks = [*zip(cosines.split(BLOCK), rows.split(BLOCK), strict=True)]
        for k in ks:
            votes = [vote(near[:, :k], learned.targets[row[:, :k]], classes) for near, row in blocks]
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
            others = learned[(folds != fold).nonzero()[:, 0].cpu().numpy()]
            found = score_all(tried, others, learned.features[judged[held]])
            for each, by_candidate in found.items():
                scores[each][held] = by_candidate
            advance(1)
    tested = tested_images(learned, folds)[judged]
    return Trials(tried, [*scores.values()], learned.targets[judged], learned.task, folds[judged], tested)


def tested_images(learned: LabelledFeatures, folds: Tensor) -> Tensor:
    """Return whether other folds have the class of an image, (n,): otherwise nobody could tell it."""
    if learned.task == "multilabel":
        return torch.ones_like(folds, dtype=torch.bool)
    unseen = folds.new_full((len(learned.classes),), FOLDS)
    lowest = unseen.scatter_reduce(0, learned.targets, folds, "amin")
    highest = (unseen - FOLDS).scatter_reduce(0, learned.targets, folds, "amax")
    return (lowest < highest)[learned.targets]


def chance_of(train: LabelledFeatures, folds: Tensor) -> float | None:
    """Return the permutation p-value of the best k-NN accuracy; None if no result could be significant.

    The interval of an accuracy does not say it: noise is above it too often, as of many candidates the best
    was taken, and images that learn from each other are right together. Labels are permuted within folds.
    """
    members = [(folds == fold).nonzero()[:, 0] for fold in torch.unique(folds)]
    if _permutations([train.targets[each] for each in members]) < 2 / SIGNIFICANT:
        return None  # the labels themselves, and those of two classes exchanged, are too large a part of them
    most, classes = len(train) - max(map(len, members)), len(train.classes)
    ks = [int(each.value) for each in candidates(train.task, len(train), neighbours_only=True)]
    ks = [k for k in ks if k <= most]
    judged = torch.zeros_like(folds, dtype=torch.bool)
    judged[evenly_spaced(len(train), min(PERMUTATION_IMAGES, max(100, PERMUTATION_SCORES // classes)))] = True
    cosines, neighbours, queries = list[Tensor](), list[Tensor](), list[Tensor]()
    for held in members:
        learned = torch.cat([each for each in members if each is not held])
        queries.append(held[judged[held]])
        fold_cosines, rows = nearest(train.features[learned], train.features[queries[-1]], k=max(ks))
        cosines.append(fold_cosines)
        neighbours.append(learned[rows])
    near, voters, query = torch.cat(cosines), torch.cat(neighbours), torch.cat(queries)

    def most_right(targets: Tensor) -> int:
        scores = class_scores(near, targets[voters], k=ks, classes=classes)
        return max(int((each.argmax(dim=1) == targets[query]).sum()) for each in scores.values())

    generator, as_right, right = torch.Generator().manual_seed(0), 1, most_right(train.targets)
    with progress("Permuting the labels", PERMUTATIONS) as advance:
        for _ in range(PERMUTATIONS):
            permuted = train.targets.clone()
            for each in members:
                order = torch.randperm(len(each), generator=generator).to(each.device)
                permuted[each] = permuted[each[order]]
            as_right += most_right(permuted) >= right
            advance(1)
    return as_right / (PERMUTATIONS + 1)


def _permutations(folds: Sequence[Tensor]) -> float:
    """Return in how many ways labels can be permuted within folds; infinite if they are very many."""
    counts = [torch.unique(targets, return_counts=True)[1].tolist() for targets in folds]
    ways = sum(math.lgamma(sum(each) + 1) - sum(math.lgamma(n + 1) for n in each) for each in counts)
    return math.exp(ways) if ways < 100 else math.inf


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


def describe(
    learned: LabelledFeatures, trials: Trials, baselines: Mapping[str, Figure], chance: float | None
) -> list[str]:
    """Say how good the labels will be: in a plain sentence, then by figures."""
    figure = trials.figure
    if figure is None:
        return ["How good these labels are cannot be said, as no class has two labelled images: label more"]
    tested = trials.targets[trials.tested]
    others = [f"{name} {each.value:.1f} %" for name, each in baselines.items()]
    if learned.task == "multiclass":
        guess = trivial_baselines(tested.cpu().numpy(), learned.classes)["largest_class"]
        name, percent = brief(guess["name"]), guess["percent"]
        others.append(f"always guessing {name} {percent:.1f} %")
        what, metric = plural(len(torch.unique(tested)), "class", "classes"), "accuracy"
        plain = f"About {figure.value:.0f} of 100 labels will be right, {_ALIKE}"
        if chance is None:
            labelled = plural(len(learned), "labelled image")
            plain = f"{labelled} are too few to say how many labels will be right: label more images"
        elif chance > SIGNIFICANT or figure.value <= percent:
            plain = f"These labels may be no better than always guessing {name}: label more images"
    else:
        what, metric = plural(len(learned.classes), "label"), "mAP (how well each label ranks the images)"
        right = 100 * float(trials.right.double().mean())
        plain = f"About {right:.0f} of 100 images will get exactly their labels, {_ALIKE}"
    interval = f"{figure.value:.1f} % (95 % interval {figure.low:.1f} to {figure.high:.1f})"
    images = f"{plural(len(tested), 'labelled image')} of {what}"
    figures = f"cross-validated {metric} {interval} on {images}"
    return [plain, "; ".join([figures, *([", ".join(others)] if others else [])])]


def untested_classes(learned: LabelledFeatures, folds: Tensor) -> list[str]:
    """Return the classes with one labelled image, which the other folds never have."""
    untested = learned.targets[~tested_images(learned, folds)]
    return [learned.classes[target] for target in untested.unique().tolist()]


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier, what it learned from, and what is said of it."""

    classifier: Classifier
    learned: LabelledFeatures | None  # None: it was read from a file
    names: list[str]  # of the images that it learned from
    details: dict[str, Any]
    lines: list[str]


def learn(frozen: FrozenBackbone, labelled: LabelledSubset) -> TrainedClassifier:
    """Choose and fit a classifier."""
    spec = FeatureSpec(tokens="cls+mean" if frozen.model.has_patches else "cls")
    learned = labelled_features(frozen, labelled, spec, "features of the labelled images")
    task, classes = learned.task, learned.classes
    if len(learned) < 2:
        raise ValueError("there is one labelled image; two or more are needed")
    folds = folds_of(labelled, learned)
    trials = cross_validate(learned, folds, candidates(task, len(learned)), "Cross-validation, folds")
    baselines = _try_baselines(frozen, labelled) if len(learned) <= BASELINE_IMAGES else {}
    best = trials.best(trials.tested)
    candidate, by_neighbours = trials.tried[best], trials.tried[best].kind == "k-NN"
    temperature = calibrate(trials.scores[best][trials.tested], trials.targets[trials.tested], task)
    scores = train(candidate, learned)
    chance = chance_of(learned, folds) if task == "multiclass" else None
    lines, untested = describe(learned, trials, baselines, chance), untested_classes(learned, folds)
    facts = ClassifierFacts(
        kind="neighbours" if by_neighbours else "linear",
        task=task,
        classes=classes,
        tokens=spec.tokens,
        blocks=spec.blocks,
        temperature=temperature,
        k=min(int(candidate.value), len(learned)) if by_neighbours else None,
        tested=tuple(lines),
    )
    if untested:
        text = (
            f"Nothing can be said of {plural(len(untested), 'class', 'classes')} with a single labelled image"
        )
        lines.append(f"{text}: {brief(', '.join(untested), 200)}")
    percents = [100 * share for share in trials.figures(trials.tested)] if trials.figure else []
    details = {
        "labelled": len(learned),
        "classes": len(classes),
        "classifier": str(candidate),
        "cross_validated": trials.figure,
        "baselines": baselines,
        "chance_p": chance,
        "tried": dict(zip(map(str, trials.tried), percents, strict=False)),  # none can be tested
        "temperature": temperature,
        "untested": untested,
    }
    names = [labelled.source.name(index) for index in learned.indices.tolist()]
    model: Any = frozen.model
    classifier = Classifier(model, scores, facts).to(frozen.device).eval()
    return TrainedClassifier(classifier, learned, names, details, lines)


def _try_baselines(frozen: FrozenBackbone, labelled: LabelledSubset) -> dict[str, Figure]:
    """Cross-validate k-NN on the baselines that are not the backbone itself."""
    figures = {}
    for name in BASELINES:
        if name != frozen.model.architecture.get("name"):
            features = labelled_features(baseline_like(frozen, name, labelled.images), labelled, CLS, name)
            tried = candidates(features.task, len(features), neighbours_only=True)
            folds = folds_of(labelled, features)
            figures[name] = cross_validate(features, folds, tried, f"{name.capitalize()}, folds").figure
    return {name: figure for name, figure in figures.items() if figure}


def folds_of(labelled: LabelledSubset, images: LabelledFeatures) -> Tensor:
    """Return the folds of those images of a subset that could be read."""
    readable = labelled.part(np.isin(labelled.indices, images.indices), labelled.name)
    return torch.from_numpy(readable.folds(FOLDS, seed=0)).to(images.features.device)

"""Choose a classifier by cross-validation on a few labelled images, and calibrate its confidences."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.config.commands import LOGISTIC_IMAGES, STANDARD_CS
from dino_vit.config.settings import Task
from dino_vit.core.text import brief, plural, progress
from dino_vit.eval.classification.predicted import score
from dino_vit.eval.classification.probes import (
    LinearHeads,
    on_standardised,
    train_logistic,
)
from dino_vit.eval.comparison.baselines import RAW_PIXELS, raw_pixels_of
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.figures import TITLES, Figure, accuracy, trivial_baselines
from dino_vit.eval.sets import LabelledFeatures, LabelledSubset, labelled_features
from dino_vit.models.backbone import CLS, FeatureSpec
from dino_vit.weights.classifier import (
    Classifier,
    ClassifierFacts,
    LinearScores,
    NeighbourScores,
    Scores,
    activate,
    score_in_blocks,
)

FOLDS = 5
NEIGHBOURS = (1, 3, 5, 10, 20, 50)
TEMPERATURES = torch.logspace(-1.3, 1.3, 105, dtype=torch.double)
BINS, IN_BIN = 10, 50  # of confidences, with as many images in each: fewer bins of few images
PIXEL_IMAGES = 10_000  # with more, neighbours by raw pixels take longer than all else
RARE = 2  # a class of fewer labelled images is never tested
_ABSENT = -30.0  # score of a class that no image learned from has


class Candidate(NamedTuple):
    """A classifier to try: its kind, and its C or number of neighbours."""

    kind: str
    value: float

    def __str__(self) -> str:
        return f"{self.kind} ({'k' if self.kind == 'k-NN' else 'C'} = {self.value:.3g})"


@dataclass(frozen=True)
class Tested:
    """How well a candidate does on images that it has not learned from."""

    candidate: Candidate
    figure: Figure  # accuracy or mAP
    loss: float
    scores: Tensor  # (n, c) of all images, each from the fold that left it out
    rows: Tensor  # of images whose class was learned from in their fold


def candidates(task: Task, images: int, *, neighbours_only: bool = False) -> list[Candidate]:
    """Return what is tried, the simplest of each kind first."""
    least = images - math.ceil(images / FOLDS)  # that are learned from
    found = [Candidate("k-NN", k) for k in sorted(NEIGHBOURS, reverse=True) if k <= max(1, least)]
    if neighbours_only:
        return found
    if images > LOGISTIC_IMAGES:  # regressions would take longer than all else
        return found
    return [Candidate("logistic regression", c) for c in STANDARD_CS] + found


def fit(tried: Sequence[Candidate], train: LabelledFeatures) -> Iterator[Scores]:
    """Yield the scores of each candidate, learned from some images."""
    regressions = [each.value for each in tried if each.kind != "k-NN"]
    if regressions:
        yield from _fit_regressions(regressions, train)
    values = train.targets
    if train.task == "multiclass":
        values = F.one_hot(train.targets, len(train.classes))
    for candidate in tried:
        if candidate.kind == "k-NN":
            yield NeighbourScores(train.features, values, k=int(candidate.value), task=train.task)


def _fit_regressions(values: Sequence[float], train: LabelledFeatures) -> list[LinearScores]:
    """Return logistic regressions for each C, on standardised features."""
    classes, targets = len(train.classes), train.targets
    present = torch.unique(targets) if train.task == "multiclass" else torch.arange(classes)
    if train.task == "multiclass":
        targets = torch.searchsorted(present, targets)

    def regressions(features: Tensor) -> list[LinearHeads]:
        return [train_logistic(features, targets, cs=sorted(values), classes=len(present))]

    if len(present) == 1 and train.task == "multiclass":  # of a fold: there is nothing to tell apart
        bias = train.features.new_full((classes,), _ABSENT)
        bias[present] = 0
        return [LinearScores(bias.new_zeros(classes, train.features.shape[1]), bias)] * len(values)
    exact = torch.float64 if train.features.device.type == "cpu" else torch.float32
    (heads,) = on_standardised(regressions, train.features.to(exact))
    found = []
    for weight, bias in zip(heads.weight, heads.bias, strict=True):
        whole = weight.new_zeros(classes, weight.shape[1]), bias.new_full((classes,), _ABSENT)
        whole[0][present], whole[1][present] = weight, bias
        found.append(LinearScores(*whole))
    return found


def folds_of(train: LabelledFeatures) -> NDArray[np.int64]:
    """Return the fold of each image: stretches of neighbours, of each class in all folds alike.

    Neighbouring images may be of one moment, so that one would give away the other.
    """
    targets = train.targets.cpu().numpy() if train.task == "multiclass" else np.zeros(len(train), np.int64)
    order, counts = np.argsort(targets, kind="stable"), np.bincount(targets)
    starts = np.cumsum(counts) - counts
    ranks = np.empty(len(train), np.int64)
    ranks[order] = np.arange(len(train)) - starts[targets[order]]
    # Classes of a few images begin with different folds, or the first would have all of them.
    return (ranks * FOLDS // counts[targets] + targets) % FOLDS


def cross_validate(train: LabelledFeatures, tried: Sequence[Candidate], title: str) -> list[Tested]:
    """Return how well each candidate does in cross-validation."""
    folds, device = folds_of(train), train.features.device
    outputs = [torch.zeros(len(train), len(train.classes), device=device) for _ in tried]
    known = torch.ones(len(train), dtype=torch.bool, device=device)
    with progress(title, FOLDS) as advance:
        for fold in np.unique(folds):
            learned, held = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
            part = train[learned]
            if train.task == "multiclass":
                known[held] = torch.isin(train.targets[held], part.targets)
            for output, scores in zip(outputs, fit(tried, part), strict=True):
                output[held] = score_in_blocks(scores, train.features[held])
            advance(1)
    rows = known.nonzero()[:, 0]
    return [_test(train, each, scores, rows) for each, scores in zip(tried, outputs, strict=True)]


def _test(train: LabelledFeatures, candidate: Candidate, scores: Tensor, rows: Tensor) -> Tested:
    figure: Figure
    if train.task == "multiclass":
        figure = accuracy(int((scores.argmax(dim=1) == train.targets).sum()), len(train))
    else:
        figure = score(train, activate(scores, train.task, 1.0))[0].figure
    return Tested(candidate, figure, loss_of(scores[rows], train.targets[rows], train.task), scores, rows)


def loss_of(scores: Tensor, targets: Tensor, task: Task, temperature: float = 1.0) -> float:
    """Return the mean cross-entropy of probabilities."""
    scores = scores.double() / temperature
    if task == "multilabel":
        return float(F.binary_cross_entropy_with_logits(scores, targets.double()))
    return float(F.cross_entropy(scores, targets))


def best_of(tested: Sequence[Tested]) -> Tested:
    """Return the candidate with the best figure; of some alike by it, the one with the lowest loss."""
    return max(tested, key=lambda each: (each.figure.value, -each.loss))


def calibrate(tested: Tested, targets: Tensor, task: Task) -> float:
    """Return the temperature that gives probabilities the lowest loss."""
    if not len(tested.rows):
        return 1.0
    scores, targets = tested.scores[tested.rows], targets[tested.rows]
    losses = [loss_of(scores, targets, task, temperature) for temperature in TEMPERATURES.tolist()]
    return float(TEMPERATURES[int(np.argmin(losses))])


def calibration_error(scores: Tensor, targets: Tensor, task: Task, temperature: float) -> float:
    """Return by how many points confidences differ from the share that is right, on average over bins."""
    probabilities = activate(scores.double(), task, temperature)
    if task == "multilabel":
        confidence = torch.maximum(probabilities, 1 - probabilities).flatten()
        right = ((probabilities > 0.5) == (targets > 0.5)).double().flatten()
    else:
        confidence, guess = probabilities.max(dim=1)
        right = (guess == targets).double()
    order, count = confidence.argsort(), max(1, min(BINS, len(confidence) // IN_BIN))
    bins = zip(confidence[order].tensor_split(count), right[order].tensor_split(count), strict=True)
    gaps = [len(sure) * abs(float(sure.mean() - hits.mean())) for sure, hits in bins if len(sure)]
    return 100 * sum(gaps) / len(confidence)


def describe(
    learned: LabelledFeatures,
    tested: Sequence[Tested],
    best: Tested,
    pixels: Tested | None,
    temperature: float,
) -> tuple[list[str], dict[str, Any]]:
    """Return what is said of the classifier, and the same for a results file."""
    task, title = learned.task, {"multiclass": "accuracy"}.get(learned.task, TITLES[learned.task])
    lines = [
        f"learned from {plural(len(learned), 'labelled image')} of {len(learned.classes)} "
        + {"multiclass": "classes", "multilabel": "labels"}[task]
    ]
    others = [each for each in tested if (each.candidate.kind == "k-NN") != (best.candidate.kind == "k-NN")]
    beside = []
    if others:
        other = best_of(others)
        beside.append(f"{other.candidate} {other.figure.value:.1f}")
    if pixels:
        beside.append(f"raw pixels {pixels.figure.value:.1f}")
    guess = None
    if task == "multiclass":
        trivial = trivial_baselines(learned.targets.cpu().numpy(), learned.classes)["largest_class"]
        guess = trivial["percent"]
        beside.append(f"always guessing {brief(trivial['name'])} {guess:.1f}")
    lines.append(f"cross-validated {title} {best.figure} % by {best.candidate}; {', '.join(beside)}")
    if guess is not None and best.figure.low <= guess:
        lines.append("That may be chance, as the interval holds what guessing scores: label more images")
    if pixels and best.figure.value <= pixels.figure.value:
        lines.append(
            "These features are no better than raw pixels: train longer, or use published weights, "
            "such as hf:facebook/dinov2-small"
        )
    details: dict[str, Any] = {
        "labelled": len(learned),
        "classes": len(learned.classes),
        "classifier": str(best.candidate),
        "cross_validated": best.figure,
        "raw_pixels": pixels and pixels.figure,
        "tried": {str(each.candidate): each.figure.value for each in tested},
    }
    measured = best.scores, learned.targets, task
    before, after = calibration_error(*measured, 1.0), calibration_error(*measured, temperature)
    details |= {"temperature": temperature, "calibration_error": {"before": before, "after": after}}
    lines.append(
        f"confidences differ from the share that is right by {after:.1f} points on average "
        f"({before:.1f} before calibration)"
    )
    return [*lines, *_rare_classes(learned)], details


def _rare_classes(learned: LabelledFeatures) -> list[str]:
    """Name the classes that no part of the cross-validation can test, if there are some."""
    if learned.task != "multiclass":
        return []
    counts = torch.bincount(learned.targets.cpu(), minlength=len(learned.classes)).tolist()
    few = [name for name, count in zip(learned.classes, counts, strict=True) if count < RARE]
    text = f"{plural(len(few), 'class', 'classes')} with one labelled image"
    return [f"{text}, so never tested and rarely predicted: {brief(', '.join(few), 200)}"] if few else []


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
    tested = cross_validate(learned, candidates(task, len(learned)), "Cross-validation, folds")
    best = best_of(tested)
    pixels = None
    if len(learned) <= PIXEL_IMAGES:
        by_pixels = labelled_features(raw_pixels_of(labelled.images, frozen), labelled, CLS, RAW_PIXELS)
        tried = candidates(task, len(by_pixels), neighbours_only=True)
        pixels = best_of(cross_validate(by_pixels, tried, "Raw pixels, folds"))
    temperature = calibrate(best, learned.targets, task)
    (scores,) = fit([best.candidate], learned)
    lines, details = describe(learned, tested, best, pixels, temperature)
    facts = ClassifierFacts(
        kind="neighbours" if best.candidate.kind == "k-NN" else "linear",
        task=task,
        classes=classes,
        tokens=spec.tokens,
        blocks=spec.blocks,
        temperature=temperature,
        k=min(int(best.candidate.value), len(learned)) if best.candidate.kind == "k-NN" else None,
        tested=lines[1],
    )
    names = [labelled.source.name(index) for index in learned.indices.tolist()]
    model: Any = frozen.model
    classifier = Classifier(model, scores, facts).to(frozen.device).eval()
    return TrainedClassifier(classifier, learned, names, details, lines)

"""Train the classifier of `predict`: say how good it is, and which of the given labels look wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dino_vit.config.sections import BASELINES
from dino_vit.core.text import brief, plural
from dino_vit.eval.cross_validation import (
    FOLDS,
    Trials,
    calibrate,
    candidates,
    cross_validate,
    tested_images,
    train_candidate,
)
from dino_vit.eval.features import FrozenBackbone, baseline_like
from dino_vit.eval.figures import Figure, trivial_baselines
from dino_vit.eval.sets import LabelledFeatures, LabelledSubset, labelled_features
from dino_vit.models.backbone import CLS, FeatureSpec
from dino_vit.weights.classifier import Classifier, ClassifierFacts

BASELINE_IMAGES = 10_000  # with more, neighbours by pixels take longer than all else
FEW = 10  # labelled images that are too few to say how good a classifier is
DOUBTFUL = 0.8  # how much more probable another label is than one that looks wrong
_ALIKE = "if these images are like the labelled ones"


def describe(
    learned: LabelledFeatures, trials: Trials, baselines: Mapping[str, Figure], untested: Sequence[str] = ()
) -> list[str]:
    """Say how good the labels will be: in a plain sentence, then by figures."""
    figure = trials.figure
    if figure is None:
        text = "How good these labels are cannot be said: label two or more images of a class"
        return [f"{text}, not taken one after the other"]
    tested = trials.targets[trials.tested]
    others = [f"k-NN of {name} {each.value:.1f} %" for name, each in baselines.items()]
    if learned.task == "multiclass":
        guess = trivial_baselines(tested.cpu().numpy(), learned.classes)["largest_class"]
        name, percent = brief(guess["name"]), guess["percent"]
        others.append(f"always guessing {name} {percent:.1f} %")
        what, metric = plural(len(torch.unique(tested)), "class", "classes"), "accuracy"
        plain = f"About {figure.value:.0f} of 100 labels will be right"
        if not trials.tested.all():  # of the other classes fewer will be
            plain += f" among the {what} that could be tested"
        plain += f", {_ALIKE}"
        if figure.low <= percent:
            plain = f"These labels may be no better than always guessing {name}: label more images"
    else:
        what, metric = plural(len(learned.classes), "label"), "mAP (how well each label ranks the images)"
        right = 100 * float(trials.right.double().mean())
        plain = f"About {right:.0f} of 100 images will get exactly their labels, {_ALIKE}"
    if len(tested) < FEW:
        labelled = plural(len(learned), "labelled image")
        plain = f"{labelled} are too few to say how many labels will be right: label more images"
    interval = f"{figure.value:.1f} % (95 % interval {figure.low:.1f} to {figure.high:.1f})"
    images = f"{plural(len(tested), 'labelled image')} of {what}"
    figures = f"cross-validated {metric} {interval} on {images}"
    lines = [plain, "; ".join([figures, *([", ".join(others)] if others else [])])]
    if untested:
        classes = plural(len(untested), "class", "classes")
        text = f"Nothing can be said of {classes} with a single labelled image, or consecutive ones"
        lines.append(f"{text}: {brief(', '.join(untested), 200)}")
    return lines


def untested_classes(learned: LabelledFeatures, folds: Tensor) -> list[str]:
    """Return the classes with one labelled image or run, which the other folds never have."""
    untested = learned.targets[~tested_images(learned, folds)]
    return [learned.classes[target] for target in torch.unique(untested).tolist()]


def doubtful_labels(
    learned: LabelledFeatures, trials: Trials, temperature: float | None, names: Sequence[str]
) -> dict[str, Any]:
    """Return the labels that look wrong as a table, the surest first: confident learning (Northcutt, 2021).

    Out of fold, another label is at least as probable as it is on average for the images that have it, and
    far more probable than the given one.
    """
    if learned.task != "multiclass" or temperature is None:
        return {}
    rows = trials.tested.nonzero()[:, 0]
    scores, targets = trials.scores[trials.best(trials.tested)][rows], trials.targets[rows]
    outputs = (scores.double() / temperature).softmax(dim=1)
    given = outputs.gather(1, targets[:, None])
    usual = outputs.new_zeros(outputs.shape[1]).scatter_reduce(
        0, targets, given[:, 0], "mean", include_self=False
    )
    probable = outputs.masked_fill(outputs < usual, 0).scatter(1, targets[:, None], 0).max(dim=1)
    margins = probable.values - given[:, 0]
    order = margins.argsort(descending=True, stable=True)
    chosen = order[margins[order] > DOUBTFUL]
    if not len(chosen):
        return {}

    def labels(numbers: Tensor) -> list[str]:
        return [learned.classes[number] for number in numbers[chosen].tolist()]

    return {
        "name": [names[trials.rows[row]] for row in rows[chosen].tolist()],
        "label": labels(targets),
        "probability": given[chosen, 0].cpu().numpy().round(4),
        "other": labels(probable.indices),
        "other_probability": probable.values[chosen].cpu().numpy().round(4),
    }


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier, what it learned from, and what is said of it."""

    classifier: Classifier
    learned: LabelledFeatures | None  # None: it was read from a file
    names: list[str]  # of the images that it learned from
    details: dict[str, Any]
    lines: list[str]
    doubts: dict[str, Any]  # labels that look wrong, as columns


def train_classifier(frozen: FrozenBackbone, labelled: LabelledSubset) -> TrainedClassifier:
    """Choose and fit a classifier."""
    spec = FeatureSpec(tokens="cls+mean" if frozen.model.has_patches else "cls")
    learned = labelled_features(frozen, labelled, spec, "features of the labelled images")
    task = learned.task
    if len(learned) < 2:
        raise ValueError("there is one labelled image; two or more are needed")
    folds = folds_of(labelled, learned)
    trials = cross_validate(learned, folds, candidates(folds), "Cross-validation, folds")
    baselines = _try_baselines(frozen, labelled) if len(learned) <= BASELINE_IMAGES else {}
    best = trials.best(trials.tested)
    candidate = trials.tried[best]
    scores, targets = trials.scores[best][trials.tested], trials.targets[trials.tested]
    temperature = float(calibrate(scores, targets, task)) if len(targets) >= FEW else None
    untested = untested_classes(learned, folds)
    lines = describe(learned, trials, baselines, untested)
    percents = [round(100 * share, 4) for share in trials.figures(trials.tested)] if trials.figure else []
    details = {
        "labelled": len(learned),
        "classes": len(learned.classes),
        "classifier": str(candidate),
        "cross_validated": trials.figure,
        "baselines": baselines,
        "tried": dict(zip(map(str, trials.tried), percents, strict=False)),  # none can be tested
        "temperature": None if temperature is None else float(f"{temperature:.4g}"),
        "untested": untested,
    }
    names = [labelled.source.name(index) for index in learned.indices.tolist()]
    facts: dict[str, Any] = {"kind": "linear", "task": task, "classes": learned.classes}
    facts |= {"tokens": spec.tokens, "blocks": spec.blocks}
    facts |= {"temperature": temperature, "tested": tuple(lines)}
    if candidate.kind == "k-NN":
        facts |= {"kind": "neighbours", "k": min(int(candidate.value), len(learned))}
    model: Any = frozen.model
    classifier = Classifier(model, train_candidate(candidate, learned), ClassifierFacts(**facts))
    classifier = classifier.to(frozen.device).eval()
    doubts = doubtful_labels(learned, trials, temperature, names)
    return TrainedClassifier(classifier, learned, names, details, lines, doubts)


def _try_baselines(frozen: FrozenBackbone, labelled: LabelledSubset) -> dict[str, Figure]:
    """Cross-validate k-NN on the baselines that are not the backbone itself."""
    figures = {}
    for name in BASELINES:
        if name != frozen.model.architecture.get("name"):
            features = labelled_features(baseline_like(frozen, name, labelled.images), labelled, CLS, name)
            folds = folds_of(labelled, features)
            tried = candidates(folds, neighbours_only=True)
            figures[name] = cross_validate(features, folds, tried, f"{name.capitalize()}, folds").figure
    return {name: figure for name, figure in figures.items() if figure}


def folds_of(labelled: LabelledSubset, images: LabelledFeatures) -> Tensor:
    """Return the folds of those images of a subset that could be read."""
    readable = labelled.part(np.isin(labelled.indices, images.indices), labelled.name)
    return torch.from_numpy(readable.folds(FOLDS, seed=0, whole_runs=True)).to(images.features.device)

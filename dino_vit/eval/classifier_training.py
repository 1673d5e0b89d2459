"""Train the classifier of `predict`, and say how good its labels will be."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dino_vit.config.sections import BASELINES
from dino_vit.core.text import brief, plural
from dino_vit.eval.cross_validation import (
    FOLDS,
    SPREADING,
    VOTE,
    Candidate,
    Trials,
    calibrate,
    candidates,
    cross_validate,
    join_trials,
    of_kinds,
    train_candidate,
)
from dino_vit.eval.origins import Origins, describe_judges, join_groups, may_judge
from dino_vit.eval.pooled import PooledFeatures
from dino_vit.eval.sets import LabelledFeatures
from dino_vit.eval.spreading import Spreading
from dino_vit.eval.statistics import Figure, trivial_baselines
from dino_vit.eval.wrong_labels import Doubts, find_wrong_labels
from dino_vit.features.readings import Reading
from dino_vit.weights.backbones import LoadedBackbone
from dino_vit.weights.classifier import ClassifierFacts, ImageClassifier, activate, confidences_of

BASELINE_IMAGES = 10_000  # with more, neighbours by pixels take longer than all else
FEW_OF_CLASS = 5  # labelled images of a class that are too few to learn it well
FEW = 10  # labelled images that are too few to say how good a classifier is
SURE = 0.8  # confidence


def describe_training(
    learned: LabelledFeatures,
    trials: Trials,
    baselines: Mapping[str, Figure],
    temperature: float | None = 1.0,
    untested: Sequence[str] = (),
    judges: str = "if these images are like the labelled ones",
) -> list[str]:
    """Say how good the labels will be: in plain sentences, then by figures."""
    figure = trials.figure
    if figure is None:
        text = "How good these labels are cannot be said: label"
        if trials.tested.any():
            return [f"{text} images that were not picked by their guesses, as the random ones of `label`"]
        return [f"{text} two or more images of a class, not taken one after the other"]
    tested = trials.targets[trials.judged]
    by_neighbours = {"k-NN": of_kinds(trials, VOTE).figure}
    by_neighbours |= {f"of {name}": each for name, each in baselines.items()}
    others = [f"{name} {each.value:.1f} %" for name, each in by_neighbours.items() if each]
    if learned.task == "multiclass":
        guess = trivial_baselines(tested.cpu().numpy(), learned.classes)["largest_class"]
        others.append(f"always guessing {brief(guess['name'])} {guess['percent']:.1f} %")
        what, metric = plural(len(torch.unique(tested)), "class", "classes"), "accuracy"
        plain = _how_many_are_right(learned, figure, tested, guess, judges)
    else:
        what, metric = plural(len(learned.classes), "label"), "mAP (how well each label ranks the images)"
        right = 100 * float(trials.right[trials.judged].double().mean())
        plain = f"About {right:.0f} of 100 images will get exactly their labels, {judges}"
    if len(tested) < FEW:
        labelled = plural(len(learned), "labelled image")
        plain = f"{labelled} are too few to say how many labels will be right: label more images"
    interval = f"{figure.value:.1f} % (95 % interval {figure.low:.1f} to {figure.high:.1f})"
    of_all = "" if len(tested) == len(learned) else f" of {len(learned):,}"
    images = f"{len(tested):,}{of_all} labelled images of {what}"
    figures = f"Cross-validated {metric} {interval} on {images}; {', '.join(others)}"
    return [plain, *_sure_ones(trials, temperature), *_weak_classes(learned, trials, untested), figures]


def _how_many_are_right(
    learned: LabelledFeatures, figure: Figure, tested: Tensor, guess: Mapping[str, Any], judges: str
) -> str:
    """Say how many labels will be right, if they are better than a guess."""
    if figure.low <= guess["percent"]:
        right = f"{figure.value:.0f} of 100 were right in cross-validation"
        text = f"These labels may be no better than always guessing {brief(guess['name'])}"
        return f"{text}: {right}, of {len(tested):,} images; label more images"
    count, total = len(torch.unique(tested)), len(torch.unique(learned.targets))
    among = f" among the {plural(count, 'class', 'classes')} that could be tested" if count < total else ""
    return f"About {figure.value:.0f} of 100 labels will be right{among}, {judges}"


def _sure_ones(trials: Trials, temperature: float | None) -> Iterator[str]:
    """Say how many of the labels that are sure are right."""
    if temperature is None:
        return
    best, rows = trials.best(trials.tested), trials.judged
    outputs = activate(trials.scores[best][rows], trials.task, temperature)
    sure = confidences_of(outputs, trials.task) >= SURE
    count, total = int(trials.hits[best][rows][sure].sum()), int(sure.sum())
    share = f"{count:,} of {total:,} were right in cross-validation" if total else "none could be tested"
    yield f"Of labels with a confidence of {100 * SURE:.0f} % or more, {share}"


def _weak_classes(learned: LabelledFeatures, trials: Trials, untested: Sequence[str]) -> Iterator[str]:
    """Name the classes with few labels, those that cannot be tested, and those that are mostly wrong."""
    targets, size, rows = learned.targets, len(learned.classes), trials.judged
    counts = targets.bincount(minlength=size) if targets.ndim == 1 else targets.sum(dim=0).long()
    named = dict(zip(learned.classes, counts.tolist(), strict=True))
    few = sorted((count, name) for name, count in named.items() if count < FEW_OF_CLASS)
    groups = {f"with fewer than {FEW_OF_CLASS} labels": [f"{name}: {count:,}" for count, name in few]}
    if learned.task == "multiclass":
        tests = trials.targets[rows].bincount(minlength=size).tolist()
        right = trials.targets[rows & trials.right].bincount(minlength=size).tolist()
        scored = [
            each for each in zip(right, tests, learned.classes, strict=True) if named[each[2]] >= FEW_OF_CLASS
        ]
        # Photos taken one after the other are held out together, as those that were labelled at once.
        groups["that cannot be tested, as their photos were taken or labelled together"] = [
            name for *_, name in scored if name in untested
        ]
        weak = [f"{name}: {n:,} of {total:,} right" for n, total, name in sorted(scored) if 2 * n < total]
        groups["that cross-validation mostly gets wrong"] = weak
    parts = [
        f"of {plural(len(names), 'class', 'classes')} {what} ({brief(', '.join(names), 100)})"
        for what, names in groups.items()
        if names
    ]
    if parts:
        yield f"Label more images: {'; '.join(parts)}"


def untested_classes(learned: LabelledFeatures, trials: Trials) -> list[str]:
    """Return the classes that the folds cannot test: of one image, or of images in one fold."""
    if learned.task == "multilabel":
        return []
    tested = torch.unique(trials.targets[trials.tested]).tolist()
    return [learned.classes[n] for n in torch.unique(learned.targets).tolist() if n not in tested]


@dataclass(frozen=True)
class TrainedClassifier:
    """A classifier, what it learned from, and what is said of it."""

    classifier: ImageClassifier
    learned: LabelledFeatures | None  # as they are read; None: it was read from a file
    names: list[str]  # of the images that it learned from
    details: dict[str, Any]
    lines: list[str]
    doubts: Doubts
    spread: Tensor | None = None  # probabilities (n, c) of the images to label, if labels spread to them
    kept: str = ""  # what is said of a file with the classifier, which does without


class Choice(NamedTuple):
    """The best of some candidates, and what is said of it."""

    candidate: Candidate
    temperature: float | None
    lines: list[str]


def choose(
    learned: LabelledFeatures, trials: Trials, baselines: Mapping[str, Figure], origins: Origins
) -> Choice:
    """Return the best candidate, with how good its labels will be, and what it is."""
    best = trials.best(trials.tested)
    scores, targets = trials.scores[best][trials.judged], trials.targets[trials.judged]
    temperature = float(calibrate(scores, targets, trials.task)) if len(targets) >= FEW else None
    untested, judges = untested_classes(learned, trials), describe_judges(origins)
    lines = describe_training(learned, trials, baselines, temperature, untested, judges)
    candidate = trials.tried[best]
    return Choice(
        candidate, temperature, [*lines, f"Read by {candidate.reading}; labelled by {candidate.how}"]
    )


def train_classifier(pool: PooledFeatures, origins: Origins) -> TrainedClassifier:
    """Choose what is read of images and a classifier, and fit it; `origins` are those of the labels."""
    if len(pool.learned) < 2:
        raise ValueError("there is one labelled image; two or more are needed")
    learned, trying = pool.read(pool.readings[0]), _Trying(pool, origins)
    lasting = join_trials([trying.of(reading, "Cross-validation, folds") for reading in pool.readings])
    spreading = Spreading.among(pool)
    trials = join_trials([lasting, *([spreading.cross_validate(trying.folds, lasting)] if spreading else [])])
    baselines, better = dict[str, Figure](), None
    if len(learned) <= BASELINE_IMAGES:
        baselines, better = _try_baselines(trying, trials)
    choice = choose(learned, trials, baselines, origins)
    lines = choice.lines
    percents = [round(100 * share, 4) for share in trials.figures(trials.judged)] if trials.figure else []
    details = {
        "labelled": len(learned),
        "classes": len(learned.classes),
        "classifier": str(choice.candidate),
        "cross_validated": trials.figure,
        "baselines": baselines,
        "better_baseline": better,
        "tried": dict(zip(map(str, trials.tried), percents, strict=False)),  # none can be tested
        "temperature": None if choice.temperature is None else float(f"{choice.temperature:.4g}"),
        "untested": untested_classes(learned, trials),
    }
    spread, kept = None, ""
    if spreading and choice.candidate.kind == SPREADING:
        scores = spreading.label()[pool.others]
        spread = activate(scores, learned.task, choice.temperature)
        choice = choose(learned, lasting, baselines, origins)
        kept = f"; it labels by {choice.candidate}, as labels spread among these images only"
        if trials.figure and lasting.figure:
            kept += f": {lasting.figure.value:.1f} % in place of {trials.figure.value:.1f} %"
    classifier, learned = _fit(pool, choice)
    names = pool.learned.source.distinct_names(learned.indices.tolist())
    doubts = find_wrong_labels(lasting, learned.classes, names)
    return TrainedClassifier(classifier, learned, names, details, lines, doubts, spread, kept)


def _fit(pool: PooledFeatures, choice: Choice) -> tuple[ImageClassifier, LabelledFeatures]:
    """Train the chosen classifier on all labelled images; return it with these, as they are read."""
    candidate, reading = choice.candidate, choice.candidate.reading
    assert reading is not None
    learned, model = pool.read(reading), cast("LoadedBackbone", pool.frozen.model)
    facts: dict[str, Any] = {"kind": "linear", "task": learned.task, "classes": learned.classes}
    facts |= {"tokens": reading.tokens, "blocks": pool.spec.blocks, "levelled": bool(reading.whiten)}
    facts |= {"temperature": choice.temperature, "tested": tuple(choice.lines)}
    if candidate.kind == VOTE:
        facts |= {"kind": "neighbours", "k": min(int(candidate.value), len(learned))}
    scores, reader = train_candidate(candidate, learned), pool.reader(reading)
    classifier = ImageClassifier(model, scores, ClassifierFacts(**facts), reader)
    return classifier.to(pool.frozen.device).eval(), learned


class _Trying:
    """Cross-validation of what is read of labelled images, by the same folds and judges."""

    def __init__(self, pool: PooledFeatures, origins: Origins) -> None:
        device = pool.features.device
        folds = pool.learned.folds(FOLDS, seed=0, join=partial(join_groups, origins=origins))
        self.pool, self.folds = pool, torch.from_numpy(folds).to(device)
        self.judges = torch.from_numpy(may_judge(origins)).to(device)

    def of(self, reading: Reading, title: str, *, neighbours_only: bool = False) -> Trials:
        """Cross-validate the classifiers of a reading."""
        tried = candidates(self.folds, reading, neighbours_only=neighbours_only)
        found = cross_validate(self.pool.read(reading), self.folds, tried, title)
        return replace(found, judges=self.judges[found.rows])


def _try_baselines(trying: _Trying, trials: Trials) -> tuple[dict[str, Figure], str | None]:
    """Cross-validate k-NN on the baselines that are not the backbone itself, and name one that does better.

    All classifiers take long on them, so they are tried on one whose k-NN is as good as that of the backbone.
    """
    figures, own = dict[str, Figure](), trying.pool.frozen.model.architecture.get("name")
    for name in BASELINES:
        if name != own and name in trying.pool.spec.parts:
            found = trying.of(Reading(name), f"{name.capitalize()}, folds", neighbours_only=True)
            if found.figure:
                figures[name] = found.figure
    alone = of_kinds(trials, VOTE).figure
    if not figures or trials.figure is None or alone is None:
        return figures, None
    better = max(figures, key=lambda each: figures[each].value)
    if figures[better].value < alone.value:
        return figures, None
    rival = trying.of(Reading(better), f"{better.capitalize()}, folds").figure
    return figures, better if rival and rival.value >= trials.figure.value else None

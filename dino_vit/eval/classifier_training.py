"""Train the classifier of `predict`, and say how good its labels will be."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dino_vit.config.sections import BASELINES
from dino_vit.core.text import brief, plural
from dino_vit.eval.cross_validation import (
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
    widened,
)
from dino_vit.eval.origins import CHOSEN, Origins, describe_judges, may_judge, was_picked
from dino_vit.eval.pooled import PooledFeatures
from dino_vit.eval.sets import LabelledFeatures
from dino_vit.eval.spreading import Spreading
from dino_vit.eval.statistics import Figure, Z, accuracy, largest_class
from dino_vit.eval.wrong_labels import Doubts, find_wrong_labels
from dino_vit.features.readings import Reading
from dino_vit.weights.backbones import LoadedBackbone
from dino_vit.weights.classifier import ClassifierFacts, ImageClassifier, activate, confidences_of

BASELINE_IMAGES = 10_000  # with more, neighbours by pixels take longer than all else
FEW_OF_CLASS = 5  # labelled images of a class that are too few to learn it well
FEW = 10  # labelled images that are too few to say how good a classifier is
SURE = 0.8  # confidence
UNPICKED = "images that were not picked by their guesses, as the random ones of `label`"


def describe_training(
    learned: LabelledFeatures,
    trials: Trials,
    baselines: Mapping[str, Figure],
    temperature: float | None = 1.0,
    judges: str = "if these images are like the labelled ones",
) -> list[str]:
    """Say how good the labels will be: in plain sentences, then by figures."""
    figure = trials.figure
    if figure is None:
        text = "How good these guesses are cannot be said: label"
        if trials.tested.any():
            return [f"{text} {UNPICKED}"]
        return [f"{text} two or more images of a class, not taken one after the other"]
    judging, count = trials.targets[trials.judged], int(trials.tested_judges.sum())
    by_neighbours = {"k-NN": of_kinds(trials, VOTE).figure}
    by_neighbours |= {f"of {name}": each for name, each in baselines.items()}
    others = [f"{name} {each.value:.1f} %" for name, each in by_neighbours.items() if each]
    if learned.task == "multiclass":
        guess = largest_class(judging.cpu().numpy(), learned.classes)
        others.append(f"always guessing {brief(guess[0])} {guess[1]:.1f} %")
        what, metric = plural(len(torch.unique(judging)), "class", "classes"), "accuracy"
        wrong = "; classes that could not be tested count as wrong" * (count < len(judging))
        plain = _how_many_are_right(figure, guess, judges + wrong)
    else:
        what, metric = plural(len(learned.classes), "label"), "mAP (how well each label ranks the images)"
        right = 100 * float(trials.right[trials.judged].double().mean())
        plain = f"About {right:.0f} of 100 images will get exactly their labels, {judges}"
    if count < FEW:
        few = f"{count:,} of {plural(len(learned), 'labelled image')}"
        plain = f"Only {few} can test the classifier, too few to say how many guesses will be right: label "
        plain += "more images" if trials.judged.all() else UNPICKED
    interval = f"{figure.value:.1f} % (95 % interval {figure.low:.1f} to {figure.high:.1f})"
    of_all = "" if len(judging) == len(learned) else f" of {len(learned):,}"
    images = f"{len(judging):,}{of_all} labelled images of {what}"
    figures = f"Cross-validated {metric} {interval} on {images}; {', '.join(others)}"
    return [plain, *_sure_ones(trials, temperature), *_weak_classes(learned, trials), figures]


def _how_many_are_right(figure: Figure, guess: tuple[str, float], condition: str) -> str:
    """Say how many guesses will be right, if they are better than always the same one."""
    name, percent = guess
    if figure.low <= percent and not condition.startswith(CHOSEN):
        right = f"{figure.value:.0f} of 100 were right in cross-validation"
        text = f"These guesses may be no better than always guessing {brief(name)}"
        return f"{text}: {right}, of {figure.images:,} images; label more images"
    return f"About {figure.value:.0f} of 100 guesses will be right, {condition}"


def _sure_ones(trials: Trials, temperature: float | None) -> Iterator[str]:
    """Say how many of the guesses that are sure are right, between the limits of what a few tell."""
    if temperature is None:
        return
    best, rows = trials.best(trials.tested), trials.judged
    outputs = activate(trials.scores[best][rows], trials.task, temperature)
    sure = confidences_of(outputs, trials.task) >= SURE
    count, total = int(trials.hits[best][rows][sure].sum()), int(sure.sum())
    share, least = "none could be tested", f"a confidence of {100 * SURE:.0f} % or more"
    if total:
        figure = widened(accuracy(count, total))
        share = f"{figure.low:.0f} to {figure.high:.0f} of 100 will be right"
        share = "too few could be tested" if figure.high - figure.low > 50 else share
        share += f" ({count:,} of {total:,} were right in cross-validation)"
    yield f"Of guesses with {least}, {share}"


def _weak_classes(learned: LabelledFeatures, trials: Trials) -> Iterator[str]:
    """Name the classes with few labels, those that cannot be tested, and those that are mostly wrong."""
    targets, size, rows = learned.targets, len(learned.classes), trials.tested_judges
    counts = targets.bincount(minlength=size) if targets.ndim == 1 else targets.sum(dim=0).long()
    named = dict(zip(learned.classes, counts.tolist(), strict=True))
    few = sorted((count, name) for name, count in named.items() if count < FEW_OF_CLASS)
    groups = {f"with fewer than {FEW_OF_CLASS} labels": [f"{name}: {count:,}" for count, name in few]}
    if learned.task == "multiclass":
        tests = trials.targets[rows].bincount(minlength=size).tolist()
        right = trials.targets[rows & trials.right].bincount(minlength=size).tolist()
        by_class = zip(right, tests, learned.classes, strict=True)
        scored = [each for each in by_class if named[each[2]] >= FEW_OF_CLASS]
        # Photos taken one after the other are held out together, as those that were labelled at once.
        untested = {*untested_classes(learned, trials)} & {name for *_, name in scored}
        groups["that cannot be tested, as their photos were taken or labelled together"] = sorted(untested)
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

    classifier: ImageClassifier | None  # None: all images have labels
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
    best, temperature = trials.best(trials.tested), None
    if int(trials.tested_judges.sum()) >= FEW:
        fair = torch.from_numpy(~was_picked(origins)).to(trials.tested)[trials.rows] & trials.tested
        temperature = float(calibrate(trials.scores[best][fair], trials.targets[fair], trials.task, Z))
    candidate = trials.tried[best]
    lines = describe_training(learned, trials, baselines, temperature, describe_judges(origins))
    lines.append(f"Read by {candidate.reading}; labelled by {candidate.how}")
    return Choice(candidate, temperature, lines)


def learn_nothing(pool: PooledFeatures) -> TrainedClassifier:
    """Return what there is to say where all images have labels."""
    details = {"labelled": len(pool.learned), "classes": len(pool.learned.classes)}
    none = pool.features.new_zeros(0, len(pool.learned.classes))
    return TrainedClassifier(None, None, [], details, [], Doubts(), none)


def train_classifier(pool: PooledFeatures) -> TrainedClassifier:
    """Choose what is read of images and a classifier, and fit it."""
    if len(pool.learned) < 2:
        raise ValueError("there is one labelled image; two or more are needed")
    learned = pool.read(pool.readings[0])
    lasting = join_trials([try_reading(pool, each, "Cross-validation, folds") for each in pool.readings])
    spreading = Spreading.among(pool)
    trials = join_trials([lasting, *([spreading.cross_validate(lasting)] if spreading else [])])
    baselines = _try_baselines(pool) if len(learned) <= BASELINE_IMAGES else {}
    choice = choose(learned, trials, baselines, pool.origins)
    lines = choice.lines
    percents = [round(100 * share, 4) for share in trials.figures(trials.judged)] if trials.figure else []
    details = {
        "labelled": len(learned),
        "classes": len(learned.classes),
        "classifier": str(choice.candidate),
        "cross_validated": trials.figure,
        "baselines": baselines,
        "tried": dict(zip(map(str, trials.tried), percents, strict=False)),  # none can be tested
        "temperature": None if choice.temperature is None else float(f"{choice.temperature:.4g}"),
        "untested": untested_classes(learned, trials),
    }
    spread, kept = None, ""
    if spreading and choice.candidate.kind == SPREADING:
        scores = spreading.label()[pool.others]
        spread = activate(scores, learned.task, choice.temperature)
        choice = choose(learned, lasting, baselines, pool.origins)
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


def try_reading(
    pool: PooledFeatures, reading: Reading, title: str, *, neighbours_only: bool = False
) -> Trials:
    """Cross-validate the classifiers of a reading."""
    tried = candidates(pool.folds, reading, neighbours_only=neighbours_only)
    found = cross_validate(pool.read(reading), pool.folds, tried, title)
    return replace(found, judges=torch.from_numpy(may_judge(pool.origins)).to(pool.folds.device)[found.rows])


def _try_baselines(pool: PooledFeatures) -> dict[str, Figure]:
    """Cross-validate k-NN on the baselines that are not the backbone itself."""
    figures, own = dict[str, Figure](), pool.frozen.model.architecture.get("name")
    for name in BASELINES:
        if name != own and name in pool.spec.parts:
            title = f"{name.capitalize()}, folds"
            if figure := try_reading(pool, Reading(name), title, neighbours_only=True).figure:
                figures[name] = figure
    return figures

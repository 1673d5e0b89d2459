"""Label images by a few that have labels: a table with confidences, and the images to label next."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from pyarrow.csv import write_csv
from torch import Tensor

from dino_vit.config.commands import PredictConfig
from dino_vit.config.settings import Task
from dino_vit.core import log
from dino_vit.core.distributed import agree, is_main_process
from dino_vit.core.outputs import MARK, TO_LABEL, after_figures, claim, write_output
from dino_vit.core.text import Result, brief, plural, public
from dino_vit.data.image_set import ImageSet, count_shared
from dino_vit.data.sources.open import open_source
from dino_vit.eval.classification.choice import TrainedClassifier, learn
from dino_vit.eval.features import FrozenBackbone, cached_features, frozen_backbone
from dino_vit.eval.maps.pictures import Panel, draw_sheet, thumbnail
from dino_vit.eval.neighbours import nearest, unit
from dino_vit.eval.results import plain, write_results
from dino_vit.eval.sets import LabelledSubset, open_subset
from dino_vit.weights.classifier import (
    label_texts,
    read_classifier,
    read_classifier_facts,
    save_classifier,
)

SHOWN, ACROSS = 40, 8  # images to label next on a sheet, and in a row of it
WIDER = 4  # times as many unsure images are looked at as are chosen, so that they differ


@dataclass(frozen=True, kw_only=True)
class LabelPredictions(Result):
    """Labels for images, with how sure they are."""

    names: list[str] = field(repr=False)
    labels: list[str] = field(repr=False)  # as files of labels have them
    confidence: NDArray[np.float64] = field(repr=False)  # probability that a label is right
    outputs: NDArray[np.float32] = field(repr=False)  # (images, classes): probabilities
    classes: tuple[str, ...]
    to_label: list[str] = field(repr=False)  # names of images whose label would help most, the first most
    columns: dict[str, list[Any]] = field(repr=False)  # of the table, for pandas.DataFrame
    details: dict[str, Any] = field(repr=False)  # what the JSON file holds
    path: Path | None


def run(config: PredictConfig) -> LabelPredictions:
    """Label images; with an output, write the table and JSON."""
    frozen = frozen_backbone(config)
    output, files = _files(config)
    claim(*files)
    source, labelled, rows = agree("images", lambda: open_images(config), _describe)
    fitted = _read(config, frozen) if labelled is None else learn(frozen, labelled)
    features, kept = cached_features(
        frozen,
        source,
        spec=fitted.classifier.spec,
        indices=None if len(rows) == len(source) else rows.tolist(),
        title=f"features of {public(config.source)}",
    )
    queries = torch.from_numpy(features).to(frozen.device)
    facts = fitted.classifier.facts
    outputs = fitted.classifier.of_features(queries)
    names = [source.name(index) for index in kept.tolist()]
    columns, sureness = tabulate(names, outputs, queries, fitted)
    next_rows = choose_next(sureness, queries, config.unsure or SHOWN)
    confidence = np.array(columns["confidence"])
    lines = [*fitted.lines, _summary(columns, facts.task)]
    origin = {"settings": config.model_dump(mode="json"), "weights": frozen.describe_weights()}
    details = plain({**origin, **fitted.details, "images": len(names)})
    if output and is_main_process():
        with after_figures():
            table = _written(columns, output.suffix)
            write_output(output, table)  # before the digest that makes it ours
            tables = [table]
            lines.append(f"{output}: {plural(len(names), 'image')} with labels")
            if config.unsure:
                known = _known_labels(source, labelled)
                tables.append(_to_label(columns, next_rows, known))
                write_output(files[2], tables[-1])
                lines.append(f"{files[2]}: fill in the column label, then give it as labels=")
            digests = [hashlib.sha256(table).hexdigest() for table in tables]
            write_results(files[1], details | {"sha256": digests})
    if config.sheet and is_main_process():
        with after_figures():
            write_output(Path(config.sheet), _draw(source, kept, next_rows, columns, frozen))
            lines.append(f"{config.sheet}: the images whose label would help most")
    if config.head and is_main_process():
        with after_figures():
            save_classifier(fitted.classifier, Path(config.head), frozen.transform)
            lines.append(
                f"{config.head}: the classifier with its backbone, as weights of predict and of export"
            )
    return LabelPredictions(
        names=names,
        labels=columns["label"],
        confidence=confidence,
        outputs=outputs.cpu().numpy(),
        classes=fitted.classifier.classes,
        to_label=[names[row] for row in next_rows],
        columns=columns,
        details=details,
        path=output,
        text="\n".join(lines),
    )


def _files(config: PredictConfig) -> tuple[Path | None, list[Path]]:
    """Return the table, and all files to write: the table and its JSON first."""
    output = None if config.output is None else Path(config.output)
    files = []
    if output:
        files = [output, output.with_suffix(".json")]
        files += [output.with_name(f"{output.stem}{TO_LABEL}.csv")] if config.unsure else []
    return output, files + [Path(each) for each in (config.head, config.sheet) if each]


Images = tuple[ImageSet, LabelledSubset | None, NDArray[np.int64]]


def open_images(config: PredictConfig) -> Images:
    """Open the images: all, those to learn from, and which are to be labelled."""
    if config.train is None and config.labels is None and read_classifier_facts(config.weights):
        if config.task:
            raise ValueError("task= is of labels to learn from; the classifier in weights has its own")
        source = open_source(config.source)
        return source, None, np.arange(len(source))
    if config.train is None:
        source = open_source(config.source, config.labels)
        labelled = open_subset(config.source, source, config.task)
        rows = np.setdiff1d(np.arange(len(source)), labelled.indices)
        if not len(rows):
            text = f"all {plural(len(source), 'image')} of {public(config.source)} have labels"
            raise ValueError(f"{text}: give others, and these as train=")
    else:
        source, name = open_source(config.source), public(config.train)
        labelled = open_subset(config.train, open_source(config.train, config.labels), config.task)
        rows = np.arange(len(source))
        shared = count_shared(source, labelled.images)
        if shared == len(source):
            text = f"all {plural(shared, 'image')} of {public(config.source)} are among those of train={name}"
            raise ValueError(f"{text}: there is nothing left to label")
        if shared:
            log.warning("%d of the %d images to label are in train=%s too", shared, len(source), name)
    labelled.require_two_classes()
    return source, labelled, rows


def _describe(images: Images) -> str:
    source, labelled, rows = images
    learned = labelled.fingerprint if labelled else "a classifier"
    return f"{len(rows):,} of {source.fingerprint} by {learned}"


def _read(config: PredictConfig, frozen: FrozenBackbone) -> TrainedClassifier:
    """Return the classifier in the file of weights."""
    model: Any = frozen.model
    classifier = read_classifier(config.weights, model).to(frozen.device)
    facts = classifier.facts
    names = brief(", ".join(facts.classes), 100)
    lines = [f"{config.weights} knows {plural(len(facts.classes), 'class', 'classes')}: {names}"]
    if facts.tested:
        lines.append(facts.tested)
    return TrainedClassifier(classifier, None, [], {"classifier": facts.model_dump(mode="json")}, lines)


def tabulate(
    names: Sequence[str], outputs: Tensor, queries: Tensor, fitted: TrainedClassifier
) -> tuple[dict[str, list[Any]], Tensor]:
    """Return the columns of the table, and how sure each label is; the least sure would help most."""
    facts = fitted.classifier.facts

    def rounded(values: Tensor) -> list[float]:
        return [round(value, 4) for value in values.tolist()]

    columns: dict[str, list[Any]] = {
        "name": [*names],
        "label": label_texts(outputs, facts.classes, facts.task),
    }
    sureness = torch.zeros(len(names), device=outputs.device)
    if facts.task == "multiclass":
        top = outputs.topk(min(2, len(facts.classes)), dim=1)
        sureness = top.values[:, 0] - top.values[:, -1]
        columns["confidence"] = rounded(top.values[:, 0])
        columns["second"] = [facts.classes[number] for number in top.indices[:, -1].tolist()]
        columns["second_confidence"] = rounded(top.values[:, -1])
    else:
        apart = (outputs - 0.5).abs()
        sureness = apart.min(dim=1).values
        columns["confidence"] = rounded(0.5 + sureness)  # of the decision that is least sure
        columns["second"] = [facts.classes[number] for number in apart.argmin(dim=1).tolist()]
        columns["second_confidence"] = rounded(outputs.gather(1, apart.argmin(dim=1, keepdim=True))[:, 0])
    if fitted.learned is not None:
        cosines, rows = nearest(fitted.learned.features, queries, k=1)
        columns["nearest"] = [fitted.names[row] for row in rows[:, 0].tolist()]
        columns["similarity"] = rounded(cosines[:, 0])
    return columns, sureness


def choose_next(sureness: Tensor, features: Tensor, count: int) -> list[int]:
    """Return the images to label next: of the least sure ones, each as unlike those before it as can be."""
    wide = sureness.argsort(stable=True)[: WIDER * count]
    points = unit(features[wide])
    chosen, closest = [0], points @ points[0]
    while len(chosen) < min(count, len(wide)):
        closest[chosen] = torch.inf
        chosen.append(int(closest.argmin()))
        closest = torch.maximum(closest, points @ points[chosen[-1]])
    return wide[chosen].tolist()


def _summary(columns: dict[str, list[Any]], task: Task) -> str:
    """Say how many images have which label, and how sure that is."""
    count = plural(len(columns["name"]), "image")
    sure = np.array(columns["confidence"])
    text = f"{count} labelled: mean confidence {100 * sure.mean():.0f} %"
    text += f", {int((sure < 0.5).sum()):,} below 50 %" if task == "multiclass" else ""
    counts = [f"{name} {number:,}" for name, number in Counter(columns["label"]).most_common()]
    return f"{text}; {brief(', '.join(counts), 200)}"


def _written(columns: dict[str, list[Any]], suffix: str) -> bytes:
    """Return a table as CSV or Parquet."""
    file = BytesIO()
    if suffix == ".csv":
        write_csv(pa.table(columns), file)
    else:
        parquet.write_table(pa.table(columns, metadata={"file": MARK}), file)
    return file.getvalue()


def _known_labels(source: ImageSet, labelled: LabelledSubset | None) -> dict[str, str]:
    """Return the labels that were given, by name, but none that is the name of another image."""
    if labelled is None:
        return {}
    images, indices = labelled.source, labelled.indices.tolist()
    names = [images.name(index) for index in indices]
    texts = [images.classes[number] for index in indices if (number := images.label(index)) is not None]
    labels = dict(zip(names, texts, strict=True))
    if images is source:
        return labels
    origins = dict(zip(names, labelled.images.origins(), strict=True))
    for index, origin in enumerate(source.origins()):
        if origins.get(name := source.name(index), origin) != origin:
            labels.pop(name, None)
    return labels


def _to_label(columns: dict[str, list[Any]], rows: Sequence[int], known: dict[str, str]) -> bytes:
    """Return a CSV of images to label, and below them those that have labels, as one file of labels."""
    asked = {columns["name"][row]: columns["label"][row] for row in rows}
    others = {name: label for name, label in known.items() if name not in asked}
    table = {
        "name": [*asked, *others],
        "label": [*[""] * len(asked), *others.values()],
        "guess": [*asked.values(), *[""] * len(others)],
    }
    return _written(table, ".csv")


def _draw(
    source: ImageSet,
    kept: NDArray[np.int64],
    rows: Sequence[int],
    columns: dict[str, list[Any]],
    frozen: FrozenBackbone,
) -> bytes:
    """Draw images with what they are taken for."""
    panels = list[Panel]()
    for row in rows:
        sure = f"? {100 * columns['confidence'][row]:.0f} %"
        picture = thumbnail(source, int(kept[row]), frozen.transform.pixels)
        panels.append((picture, f"{columns['label'][row]}{sure}  {Path(columns['name'][row]).name}"))
    return draw_sheet([panels[start : start + ACROSS] for start in range(0, len(panels), ACROSS)])

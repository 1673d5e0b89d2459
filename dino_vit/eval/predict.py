"""Label images by a few that have labels: a table with confidences."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
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
from dino_vit.config.outputs import check_outputs
from dino_vit.config.settings import Task
from dino_vit.core import log
from dino_vit.core.distributed import agree, is_main_process
from dino_vit.core.invocation import after_figures
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import replacing
from dino_vit.core.text import Result, brief, plural, public
from dino_vit.data.label_files import SEPARATOR
from dino_vit.data.labels import NO_LABELS
from dino_vit.data.open import open_source
from dino_vit.eval.classifier_training import SURE, TrainedClassifier, train_classifier
from dino_vit.eval.neighbours import nearest
from dino_vit.eval.origins import read_origins
from dino_vit.eval.pooled import pool_features
from dino_vit.eval.results import to_jsonable, write_results
from dino_vit.eval.sets import (
    LabelledSubset,
    count_shared,
    images_to_label,
    open_subset,
)
from dino_vit.eval.wrong_labels import Doubts
from dino_vit.features.frozen import FrozenBackbone, frozen_backbones
from dino_vit.features.readings import joined_features
from dino_vit.weights.classifier import (
    ImageClassifier,
    confidences_of,
    labels_of,
    read_classifier,
    read_classifier_facts,
    save_classifier,
)
from dino_vit.weights.read_file import check_weights

Columns = dict[str, Any]  # lists of texts, arrays of numbers
_ROWS = 2**13  # of the table that are computed at a time


@dataclass(frozen=True, kw_only=True, repr=False)
class LabelPredictions(Result):
    """Labels for images, with how sure they are."""

    names: list[str]
    labels: list[str] | list[list[str]]  # of each image its class, or several
    confidence: NDArray[np.float64] | None  # probability that a label is right; None: too few labels to say
    classifier: ImageClassifier
    features: Tensor  # (images, d)
    spread: Tensor | None  # the probabilities, where labels spread
    columns: Columns  # of the table, for pandas.DataFrame
    details: dict[str, Any]  # what the JSON file holds
    path: Path | None

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, or the names of labels, by the columns of `outputs`."""
        return self.classifier.classes

    @cached_property
    def outputs(self) -> NDArray[np.float32]:
        """The probabilities (images, classes), computed when asked for: of many images they are large."""
        found = self.classifier.of_features(self.features) if self.spread is None else self.spread
        outputs: NDArray[np.float32] = found.cpu().numpy()
        return outputs


def run(config: PredictConfig) -> LabelPredictions:
    """Label images; with an output, write the table and JSON."""
    start_processes()
    files = _files(config)
    check_outputs(config, *files.values())
    check_weights(config.weights)
    learned, images = agree("images", lambda: open_images(config), _describe_images)
    names = images.source.distinct_names(images.indices.tolist())
    output = files.get("table")
    if output and output.suffix == ".csv" and images.task == "multilabel":
        _refuse_separators(images.classes, output)
    frozen = frozen_backbones(config)  # after what is cheaper to find fault with
    if learned is None:
        fitted = _read(config, frozen)
        spec, title = fitted.classifier.spec, f"features of {images.name}"
        values, indices = joined_features(frozen, images.source, spec=spec, title=title)
        queries = torch.from_numpy(values).to(frozen.device)
    else:
        pool = pool_features(config, frozen, learned, images)
        fitted = train_classifier(pool, read_origins(config.labels, pool.learned))
        queries, indices = pool.select(fitted.classifier.facts.tokens, pool.others), pool.indices
    facts, names = fitted.classifier.facts, [names[row] for row in np.searchsorted(images.indices, indices)]
    columns = {"name": names, **tabulate(queries, fitted)}
    lines = [*fitted.lines, *_better_baseline(config, fitted.details), *_doubts(fitted, files)]
    origin = {"settings": config.model_dump(mode="json"), "weights": frozen.describe_weights()}
    details = to_jsonable({**origin, **fitted.details, "images": len(names)})
    if output and is_main_process():
        with after_figures():
            _write(files, columns, details, fitted)
    lines += _summary(columns, facts.task, files, config.confident)
    if config.classifier and is_main_process():
        with after_figures():
            save_classifier(fitted.classifier, files["classifier"], frozen.transform)
            what = "the classifier with its backbone, as weights of predict and of export"
            lines.append(f"{config.classifier}: {what}{fitted.kept}")
    return LabelPredictions(
        names=names,
        labels=columns["label"],
        confidence=columns.get("confidence"),
        classifier=fitted.classifier,
        features=queries,
        spread=fitted.spread,
        columns=columns,
        details=details,
        path=output,
        text="\n".join(lines),
    )


def _refuse_separators(labels: Sequence[str], table: Path) -> None:
    """Raise for a label that would be read from a CSV as two."""
    if joined := next((name for name in labels if SEPARATOR in name), None):
        text = f"the label {brief(joined)!r} contains {SEPARATOR!r}, which separates labels in a CSV"
        raise ValueError(f"{text}; give output={table.with_suffix('.parquet')}")


def _files(config: PredictConfig) -> dict[str, Path]:
    """Return the files to write."""
    files = dict[str, Path]()
    if config.output is not None:
        table = Path(config.output)
        files = {"table": table, "about": table.with_suffix(".json")}
        files["doubtful"] = table.with_name(f"{table.stem}-doubtful.csv")
    if config.confident is not None:
        if config.output is None:
            raise ValueError("confident writes a table beside output, which is not given")
        files["sure"] = table.with_name(f"{table.stem}-sure{table.suffix}")
    return files | ({"classifier": Path(config.classifier)} if config.classifier else {})


def _write(
    files: Mapping[str, Path], columns: Columns, details: Mapping[str, Any], fitted: TrainedClassifier
) -> None:
    """Write the table, its sure rows, its JSON and the labels that look wrong."""
    _write_table(files["table"], columns)
    if "sure" in files:
        _write_table(files["sure"], _sure_rows(columns, details["settings"]["confident"]))
    write_results(files["about"], details)
    files["doubtful"].unlink(missing_ok=True)  # of an earlier call
    if fitted.doubts.columns:
        _write_table(files["doubtful"], fitted.doubts.columns)


def _sure_rows(columns: Columns, least: float) -> Columns:
    """Return the rows of a table with a confidence of at least so much."""
    unsure = np.zeros(len(columns["name"]))  # where the labels are too few to tell
    rows = np.flatnonzero(columns.get("confidence", unsure) >= least)
    return {
        title: values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows.tolist()]
        for title, values in columns.items()
    }


def _doubts(fitted: TrainedClassifier, files: Mapping[str, Path]) -> Iterator[str]:
    """Say whether given labels look wrong, where anybody looked."""
    if line := fitted.doubts.line:
        listed = bool(fitted.doubts.columns) and "doubtful" in files
        yield f"{line}; {files['doubtful']} lists them" if listed else line


def open_images(config: PredictConfig) -> tuple[LabelledSubset | None, LabelledSubset]:
    """Open the images to learn from, none where weights are a classifier, and those to label."""
    name = public(config.source)
    is_labelled = config.train is not None or config.labels not in (None, NO_LABELS)
    if not is_labelled and (facts := read_classifier_facts(config.weights)):
        if given := sorted({"several", "tokens", "blocks", "whiten"} & config.given):
            text = f"{' and '.join(given)} are of labels to learn from"
            raise ValueError(f"{text}; the classifier in weights has its own: leave them out")
        source = open_source(config.source, NO_LABELS)
        none = np.full(len(source), -1)
        return None, LabelledSubset(name, source, np.arange(len(source)), none, facts.classes, facts.task)
    if config.train is None:
        source = open_source(config.source, config.labels, several=config.several)
        learned = open_subset(name, source, config.weights)
        others, count = images_to_label(name, source, learned), plural(len(source), "image")
        if not len(others):
            raise ValueError(f"all {count} of {name} have labels: give others, and these as train=")
        log.info("%s have labels; the other %s get them", f"{len(learned):,} of {count}", f"{len(others):,}")
    else:
        learned = open_subset(config.train, open_source(config.train, config.labels, several=config.several))
        others = images_to_label(name, open_source(config.source, NO_LABELS), learned)
        shared = count_shared(others.source, learned.images)
        if shared == len(others):
            text = f"all {plural(shared, 'image')} of {name} are among those of train={learned.name}"
            raise ValueError(f"{text}: there is nothing left to label")
        if shared:
            log.warning("%d of the %d images to label are in train=%s too", shared, len(others), learned.name)
    learned.require_two_classes()
    return learned, others


def _describe_images(images: tuple[LabelledSubset | None, LabelledSubset]) -> str:
    learned, others = images
    by = "a classifier" if learned is None else learned.fingerprint
    return f"{len(others):,} of {others.fingerprint} by {by}"


def _read(config: PredictConfig, frozen: FrozenBackbone) -> TrainedClassifier:
    """Return the classifier in the file of weights."""
    model: Any = frozen.model
    classifier = read_classifier(config.weights, model).to(frozen.device)
    facts = classifier.facts
    names = brief(", ".join(facts.classes), 100)
    lines = [
        f"{config.weights} knows {plural(len(facts.classes), 'class', 'classes')}: {names}",
        *facts.tested,
    ]
    details = {"classifier": facts.model_dump(mode="json")}
    return TrainedClassifier(classifier, None, [], details, lines, Doubts())


def tabulate(queries: Tensor, fitted: TrainedClassifier) -> Columns:
    """Return the columns of the table for the features of many images, some at a time."""
    spread = [None] * len(queries) if fitted.spread is None else torch.split(fitted.spread, _ROWS)
    blocks = [_tabulate(*block, fitted) for block in zip(torch.split(queries, _ROWS), spread, strict=False)]
    return {
        title: np.concatenate([block[title] for block in blocks])
        if isinstance(first, np.ndarray)
        else [*chain.from_iterable(block[title] for block in blocks)]
        for title, first in blocks[0].items()
    }


def _tabulate(queries: Tensor, spread: Tensor | None, fitted: TrainedClassifier) -> Columns:
    classifier, facts = fitted.classifier, fitted.classifier.facts
    outputs = classifier.of_features(queries) if spread is None else spread

    def rounded(values: Tensor) -> NDArray[np.float64]:
        return np.array([round(value, 4) for value in values.tolist()])

    columns: Columns = {"label": [*labels_of(outputs, facts.classes, facts.task)]}
    columns["confidence"] = rounded(confidences_of(outputs, facts.task))
    if facts.task == "multiclass":
        top = outputs.topk(min(2, len(facts.classes)), dim=1)
        columns["second"] = [facts.classes[number] for number in top.indices[:, -1].tolist()]
        columns["second_confidence"] = rounded(top.values[:, -1])
    else:
        apart = (outputs - 0.5).abs()
        columns["second"] = [facts.classes[number] for number in apart.argmin(dim=1).tolist()]
        columns["second_confidence"] = rounded(outputs.gather(1, apart.argmin(dim=1, keepdim=True))[:, 0])
    if facts.temperature is None:  # too few labels to say how sure they are
        del columns["confidence"], columns["second_confidence"]
    if fitted.learned is not None:
        cosines, rows = nearest(fitted.learned.features, classifier.reading(queries), k=1)
        columns["nearest"] = [fitted.names[row] for row in rows[:, 0].tolist()]
        columns["similarity"] = rounded(cosines[:, 0])
    return columns


def _better_baseline(config: PredictConfig, details: Mapping[str, Any]) -> Iterator[str]:
    """Yield the command to label by a baseline that is as good as the features."""
    name = details.get("better_baseline")
    if name is None:
        return
    options = {"train": config.train, "labels": config.labels, "output": f"{name}.csv"}
    given = [f"{key}={public(str(value))}" for key, value in options.items() if value]
    given += ["several=true"] * config.several
    command = shlex.join(["dino-vit", "predict", public(config.source), name, *given])
    yield (
        f"{name}, which nothing has learned, are as good or better: {command}. For better features train "
        "longer, or use published weights, such as hf:facebook/dinov2-small"
    )


def _summary(columns: Columns, task: Task, files: Mapping[str, Path], least: float | None) -> Iterator[str]:
    """Say how many images have which label, how sure that is, and where."""
    text = f"{plural(len(columns['name']), 'image')} labelled"
    if (sure := columns.get("confidence")) is not None:
        text += f": mean confidence {100 * sure.mean():.0f} %"
        if task == "multiclass":
            text += f", {int((sure >= SURE).sum()):,} with {100 * SURE:.0f} % or more"
    counts = [f"{name}: {number:,}" for name, number in Counter(_cells(columns["label"])).most_common()]
    where = f"{files['table']}: " if "table" in files else ""
    yield f"{where}{text}; {brief(', '.join(counts), 200)}"
    if least is not None:
        if "confidence" not in columns:
            yield f"{files['sure']} is empty: the labels are too few to tell how sure they are"
            return
        count = plural(len(_sure_rows(columns, least)["name"]), "image")
        yield f"{files['sure']}: the {count} with a confidence of {100 * least:.0f} % or more"


def _write_table(path: Path, columns: Columns) -> None:
    """Write a table as CSV, or as Parquet, in which several labels are a list."""
    with replacing(path) as partial:
        if path.suffix == ".csv":
            write_csv(pa.table({**columns, "label": _cells(columns["label"])}), partial)
        else:
            parquet.write_table(pa.table(columns), partial)


def _cells(labels: Sequence[str] | Sequence[list[str]]) -> list[str]:
    """Return labels as `several=true` reads them from a cell of text."""
    return [each if isinstance(each, str) else SEPARATOR.join(each) or SEPARATOR for each in labels]

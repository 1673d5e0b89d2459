"""The table that `predict` writes: given and guessed labels of all images, in their order."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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

from dino_vit.config.settings import Task
from dino_vit.core.storage import replacing
from dino_vit.core.text import brief, plural
from dino_vit.data.label_files import GUESSED, SEPARATOR
from dino_vit.eval.classifier_training import SURE, TrainedClassifier
from dino_vit.eval.neighbours import nearest
from dino_vit.eval.origins import Origins
from dino_vit.eval.sets import LabelledSubset
from dino_vit.weights.classifier import confidences_of, labels_of

Columns = dict[str, Any]  # lists of texts, arrays of numbers
_ROWS = 2**13  # of the table that are computed at a time


def tabulate(queries: Tensor, fitted: TrainedClassifier) -> Columns:
    """Return the columns of the table for the features of many images, some at a time."""
    blocks = [_tabulate(block, fitted) for block in torch.split(queries, _ROWS)]
    return {
        title: np.concatenate([block[title] for block in blocks])
        if isinstance(first, np.ndarray)
        else [*chain.from_iterable(block[title] for block in blocks)]
        for title, first in blocks[0].items()
    }


def _tabulate(queries: Tensor, fitted: TrainedClassifier) -> Columns:
    facts, outputs = fitted.classifier.facts, fitted.classifier.of_features(queries)

    def rounded(values: Tensor) -> NDArray[np.float64]:
        return np.array([round(value, 4) for value in values.tolist()])

    columns: Columns = {"label": [*labels_of(outputs, facts.classes, facts.task)]}
    columns["origin"] = [GUESSED] * len(outputs)
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
        cosines, rows = nearest(fitted.learned.features, queries, k=1)
        columns["nearest"] = [fitted.names[row] for row in rows[:, 0].tolist()]
        columns["similarity"] = rounded(cosines[:, 0])
    return columns


def given_rows(learned: LabelledSubset, origins: Origins, names: Sequence[str]) -> Columns:
    """Return the labels that were given, with the names and indices of their images."""
    labels = map(learned.source.labels.names_of, learned.source.codes(learned.indices).tolist())
    return {
        "name": [names[index] for index in learned.indices],
        "label": [each if learned.task == "multilabel" else each[0] for each in labels],
        "origin": origins.tolist(),
        "index": learned.indices,
    }


def join_rows(guessed: Columns, indices: NDArray[np.int64], given: Columns) -> Columns:
    """Return the rows of guessed labels, and those of the given ones, in the order of the images."""
    others = given.get("index", np.empty(0, np.int64))
    order, nothing = np.argsort(np.concatenate([indices, others])), [None] * len(others)
    columns = Columns()
    for title, values in guessed.items():
        if isinstance(values, np.ndarray):
            columns[title] = np.concatenate([values, np.full(len(others), np.nan)])[order]
        else:
            joined = [*values, *given.get(title, nothing)]
            columns[title] = [joined[row] for row in order.tolist()]
    return columns


def sure_rows(columns: Columns, least: float) -> Columns:
    """Return the rows of given labels, and of those with a confidence of at least so much."""
    unsure = np.zeros(len(columns["name"]))  # where the labels are too few to tell
    is_given = np.array([origin != GUESSED for origin in columns["origin"]])
    rows = np.flatnonzero(is_given | (columns.get("confidence", unsure) >= least))
    return {
        title: values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows.tolist()]
        for title, values in columns.items()
    }


def summarise(
    columns: Columns, guessed: Columns, task: Task, files: Mapping[str, Path], least: float | None
) -> Iterator[str]:
    """Say how many images are guessed to have which label, how sure that is, and where."""
    text = f"{len(guessed['name']):,} of {plural(len(columns['name']), 'label')} guessed"
    if (sure := guessed.get("confidence")) is not None:
        text += f": mean confidence {100 * sure.mean():.0f} %"
        if task == "multiclass":
            text += f", {int((sure >= SURE).sum()):,} with {100 * SURE:.0f} % or more"
    counts = [f"{name}: {number:,}" for name, number in Counter(_cells(guessed["label"])).most_common()]
    where = f"{files['table']}: " if "table" in files else ""
    yield f"{where}{text}; {brief(', '.join(counts), 200)}"
    if least is not None:
        count = plural(len(sure_rows(columns, least)["name"]), "image")
        text = f"or a confidence of {100 * least:.0f} % or more"
        if sure is None:
            text = "as the labels are too few to tell how sure the others are"
        yield f"{files['sure']}: {count} with a given label, {text}"


def write_table(path: Path, columns: Columns) -> None:
    """Write a table as CSV, or as Parquet, in which several labels are a list."""
    with replacing(path) as partial:
        if path.suffix == ".csv":
            columns = {**columns, "label": _cells(columns["label"])}
        table = pa.table({title: pa.array(each, from_pandas=True) for title, each in columns.items()})
        write = write_csv if path.suffix == ".csv" else parquet.write_table
        write(table, partial)


def _cells(labels: Sequence[str] | Sequence[list[str]]) -> list[str]:
    """Return labels as `several=true` reads them from a cell of text."""
    return [each if isinstance(each, str) else SEPARATOR.join(each) or SEPARATOR for each in labels]

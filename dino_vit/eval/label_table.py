"""The table that `predict` writes: given and guessed labels of all images, in their order."""

from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import compute, parquet
from pyarrow.csv import write_csv
from torch import Tensor

from dino_vit.config.settings import Task
from dino_vit.core.storage import replacing
from dino_vit.core.text import brief, plural
from dino_vit.data.label_files import GUESSED, SEPARATOR, UNSURE
from dino_vit.eval.classifier_training import SURE, TrainedClassifier
from dino_vit.eval.neighbours import nearest
from dino_vit.eval.pooled import PooledFeatures
from dino_vit.weights.classifier import confidences_of, labels_of

_ROWS = 2**13  # of the table that are computed at a time


def tabulate(
    queries: Tensor, names: Sequence[str], fitted: TrainedClassifier, unsure: Container[str]
) -> pa.Table:
    """Return the table of guesses by features, some at a time; somebody was unsure of some names."""
    if fitted.classifier is None:
        return pa.table({"name": [], "label": []})
    spread = repeat(None) if fitted.spread is None else torch.split(fitted.spread, _ROWS)
    pairs = zip(torch.split(queries, _ROWS), spread, strict=False)
    blocks = [pa.table(_columns(block, outputs, fitted)) for block, outputs in pairs]
    table = pa.concat_tables(blocks).add_column(0, "name", [names])
    return table.add_column(2, "origin", [[UNSURE if name in unsure else GUESSED for name in names]])


def _columns(queries: Tensor, spread: Tensor | None, fitted: TrainedClassifier) -> dict[str, Any]:
    classifier = fitted.classifier
    assert classifier is not None
    facts = classifier.facts
    outputs = classifier.of_features(queries) if spread is None else spread

    def rounded(values: Tensor) -> NDArray[np.float64]:
        return np.array([round(value, 4) for value in values.tolist()])

    labels = _label_column(labels_of(outputs, facts.classes, facts.task), facts.task)
    columns: dict[str, Any] = {"label": labels, "guess": labels}
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
        columns["nearest"] = [fitted.names[row] for row in rows.flatten().tolist()]
        columns["similarity"] = rounded(cosines.flatten())
    return columns


def _label_column(labels: Sequence[str] | Sequence[list[str]], task: Task) -> pa.Array:
    return pa.array(labels, pa.string() if task == "multiclass" else pa.list_(pa.string()))


def with_given(guessed: pa.Table, pool: PooledFeatures) -> pa.Table:
    """Return the rows of guesses and those of the labels that were given, in the order of the images."""
    learned, source = pool.learned, pool.learned.source
    given = [*map(source.labels.names_of, source.codes(learned.indices).tolist())]
    labels = given if learned.task == "multilabel" else [label for (label,) in given]
    columns = {
        "name": [*map(source.name, learned.indices.tolist())],
        "label": _label_column(labels, learned.task),
        "origin": pool.origins.tolist(),
    }
    table = pa.concat_tables([guessed, pa.table(columns)], promote_options="default")
    return table.take(np.argsort(np.concatenate([pool.indices, learned.indices])))


def sure_rows(table: pa.Table, least: float) -> pa.Table:
    """Return the rows of given labels, and of those with a confidence of at least so much."""
    rows = compute.invert(compute.is_in(table["origin"], pa.array([GUESSED, UNSURE])))
    if "confidence" in table.column_names:
        rows = compute.or_kleene(rows, compute.greater_equal(table["confidence"], least))
    return table.filter(rows)


def summarise(
    table: pa.Table, guessed: pa.Table, task: Task, files: Mapping[str, Path], least: float | None
) -> Iterator[str]:
    """Say how many images are guessed to have which label, how sure that is, and where."""
    if not len(guessed):
        where = files.get("table", "the table")
        yield f"All {plural(len(table), 'image')} have labels: {where} holds them, nothing was guessed"
        return
    text = f"{len(guessed):,} of {plural(len(table), 'label')} guessed"
    if has_confidence := "confidence" in guessed.column_names:
        sure = guessed["confidence"].to_numpy()
        text += f": mean confidence {100 * sure.mean():.0f} %"
        if task == "multiclass":
            text += f", {int((sure >= SURE).sum()):,} with {100 * SURE:.0f} % or more"
    counts = [f"{name}: {number:,}" for name, number in Counter(_cells(guessed["label"])).most_common()]
    where = f"{files['table']}: " if "table" in files else ""
    yield f"{where}{text}; {brief(', '.join(counts), 200)}"
    if least is not None:
        count = plural(len(sure_rows(table, least)), "image")
        text = f"or a confidence of {100 * least:.0f} % or more"
        if not has_confidence:
            text = "as the labels are too few to tell how sure the others are"
        yield f"{files['sure']}: {count} with a given label, {text}"


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as CSV, or as Parquet, in which several labels are a list."""
    with replacing(path) as partial:
        if path.suffix == ".csv":
            for at, title in enumerate(table.column_names):
                if title in ("label", "guess"):
                    table = table.set_column(at, title, [_cells(table[title])])
            texts = [column for column in table.columns if pa.types.is_string(column.type)]
            with partial.open("wb") as file:
                if not all(compute.all(compute.string_is_ascii(text)).as_py() for text in texts):
                    file.write(BOM_UTF8)  # or a spreadsheet takes letters with accents for others
                write_csv(table, file)
        else:
            parquet.write_table(table, partial)


def _cells(labels: pa.ChunkedArray) -> list[str | None]:
    """Return labels as `several=true` reads them from a cell of text."""
    texts = labels.to_pylist()
    is_cell = (str, type(None))
    return [each if isinstance(each, is_cell) else SEPARATOR.join(each) or SEPARATOR for each in texts]

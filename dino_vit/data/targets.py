"""What labels say: the class of each image, several labels of it, or numbers.

A label is a text. Several labels of an image are joined by semicolons, as in `sea;sky`; `;` alone is none of
them. Numbers from several columns of a table are joined with their names, as in `age=3.5;height=1.2`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.config.commands import Task
from dino_vit.core.text import brief, plural
from dino_vit.data.sources.source import Source

SEPARATOR = ";"
_NAMES_SHOWN = 5


class Targets(NamedTuple):
    """What is to be predicted of images: by the task a class, whether each label is theirs, or numbers."""

    task: Task
    indices: NDArray[np.int64]  # (n,), of the images with a label in the source
    values: NDArray[Any]  # classes: int64 (n,); otherwise float32 (n, names), labels as 0 and 1
    names: tuple[str, ...]  # of the classes, the labels, or the columns of numbers

    def __str__(self) -> str:
        names = ", ".join(map(brief, self.names[:_NAMES_SHOWN])) + ", ..." * (len(self.names) > _NAMES_SHOWN)
        images = plural(len(self.indices), "image")
        if self.task == "multiclass":
            return f"one class for each of {images}, {plural(len(self.names), 'class', 'classes')}: {names}"
        if self.task == "regression":
            return f"numbers to predict for each of {images}: {names}"
        mean = self.values.sum() / max(1, len(self.values))
        return f"several labels for each of {images}, {mean:.1f} on average of {len(self.names)}: {names}"


def read_targets(
    source: Source, indices: Sequence[int] | None = None, *, task: Task | None = None
) -> Targets:
    """Return what the labels of a source, or of some of its images, say; without a task as they look."""
    chosen = np.arange(len(source)) if indices is None else np.asarray(indices, np.int64)
    numbers = [source.label(index) for index in chosen.tolist()]
    labelled = np.array([number is not None for number in numbers], np.bool_)
    numbered = np.array([number for number in numbers if number is not None], np.int64)
    task = task or recognise(source.classes)
    if task == "multiclass":
        return Targets(task, chosen[labelled], numbered, tuple(source.classes))
    occurring, rows = np.unique(numbered, return_inverse=True)
    names, values = _parse([source.classes[number] for number in occurring], task)
    return Targets(task, chosen[labelled], values[rows], names)


def recognise(labels: Sequence[str]) -> Task:
    """Return what the distinct labels of a source are for.

    Whole numbers are classes, unless some are fractions or a table has several columns of them. Columns of 0
    and 1 are labels.
    """
    table = read_numbers(labels)
    if table and (table[1] % 1).any():
        return "regression"
    if table and len(table[0]) > 1 and all(table[0]):
        return "multilabel" if _are_indicators(table[1]) else "regression"
    return "multilabel" if any(SEPARATOR in label for label in labels) else "multiclass"


def read_numbers(labels: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.float64]] | None:
    """Return the columns and the numbers of each label; None unless all have the same columns of numbers."""
    columns, rows = None, []
    for label in labels:
        pairs = [part.rpartition("=") for part in label.split(SEPARATOR)]
        names, values = tuple(name.strip() for name, _, _ in pairs), [as_number(text) for *_, text in pairs]
        if None in values or names != (columns or names):
            return None
        columns = names
        rows.append(values)
    return (columns, np.array(rows, np.float64)) if columns else None


def as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def number_columns(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> list[int]:
    """Return columns of a table if all are of numbers, otherwise none: which are meant is not clear."""
    cells = (row[column].strip() for row in rows for column in columns if column < len(row))
    only = all(cell.lower() in ("", "nan") or as_number(cell) is not None for cell in cells)
    return list(columns) if only else []


def join_numbers(header: Sequence[str], row: Sequence[str], columns: Sequence[int]) -> str:
    """Return the numbers of a row as a label, which is empty if one is missing."""
    cells = {header[column]: row[column].strip() for column in columns}
    if any(as_number(cell) is None for cell in cells.values()):
        return ""
    pairs = [f"{name}={cell}" for name, cell in cells.items()]
    return SEPARATOR.join(pairs) if len(pairs) > 1 else "".join(cells.values())


def _are_indicators(values: NDArray[np.float64]) -> bool:
    """Tell whether columns say yes and no, as 1 and 0 or as 1 and −1."""
    return bool(np.isin(values, (0, 1)).all() or np.isin(values, (-1, 1)).all())


def _parse(labels: Sequence[str], task: Task) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    table = read_numbers(labels)
    if task == "regression":
        if table is None and labels:
            text = next((label for label in labels if read_numbers([label]) is None), labels[0])
            raise ValueError(f"task=regression needs the same numbers for each image; one has {brief(text)}")
        names, values = table or ((), np.empty((0, 0)))
        return _titles(names), values.astype(np.float32)
    # More than two numbers of 0 and 1 are no set of labels, as one is there twice.
    if table and (all(table[0]) or len(table[0]) > 2) and _are_indicators(table[1]):
        return _titles(table[0]), (table[1] > 0).astype(np.float32)
    sets = [{name.strip() for name in label.split(SEPARATOR)} - {""} for label in labels]
    ordered = sorted(set[str]().union(*sets))
    column = {name: number for number, name in enumerate(ordered)}
    marks = np.zeros((len(sets), len(ordered)), np.float32)
    for row, of_label in enumerate(sets):
        marks[row, [column[name] for name in of_label]] = 1
    return tuple(ordered), marks


def _titles(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of columns, their numbers where they have none."""
    return tuple(name or (str(number) if len(names) > 1 else "number") for number, name in enumerate(names))

"""What labels say: the class of each image, several labels of it, or numbers.

A label is a text. Several labels of an image are joined by semicolons, as in `sea;sky`; `;` alone is none of
them. Numbers from several columns of a table are joined with their names, as in `age=3.5;height=1.2`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.config.settings import Task
from dino_vit.core.text import brief, plural
from dino_vit.data.image_set import ImageSet

SEPARATOR = ";"


class Targets(NamedTuple):
    """What is to be predicted of images: by the task a class, whether each label is theirs, or numbers."""

    task: Task
    indices: NDArray[np.int64]  # (n,), of the images with a label in the source
    values: NDArray[Any]  # classes: int64 (n,); otherwise float32 (n, names), labels as 0 and 1
    names: tuple[str, ...]  # of the classes, the labels, or the columns of numbers

    def __str__(self) -> str:
        images, names = plural(len(self.indices), "image"), brief(", ".join(self.names), 100)
        if self.task == "multiclass":
            text = f"one class for each of {images}, {plural(len(self.names), 'class', 'classes')}: {names}"
            unlike = len(self.names) > len(self.indices) / 2 and as_number(self.names[0]) is not None
            return text + "; if these are numbers to predict, use task=regression" * unlike + self._doubts()
        if self.task == "regression":
            return f"numbers to predict for each of {images}: {names}"
        mean = self.values.sum() / max(1, len(self.values))
        text = f"several labels for each of {images}, {mean:.1f} on average of {len(self.names)}: {names}"
        return text + self._doubts()

    def _doubts(self) -> str:
        numbers = self.values.sum(0) if self.values.ndim == 2 else np.bincount(self.values)
        # The last names may have no image.
        counts = dict(zip(self.names, numbers.astype(int).tolist(), strict=False))
        return "".join(f"; {doubt}" for doubt in doubts_about(counts))


def doubts_about(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield which names, with the images of each, may be mistyped: alike but for case, or of one image."""
    by_case = Counter(map(str.casefold, counts))
    alike = [name for name in counts if by_case[name.casefold()] > 1]
    if alike:
        yield f"perhaps the same but for capital letters: {brief(', '.join(alike), 200)}"
    single = [name for name, count in counts.items() if count == 1 and name not in alike]
    others = [name for name in counts if name not in single]
    if 0 < len(single) <= len(others):
        guesses = (get_close_matches(name, others, 1) for name in single)
        shown = (
            f"{name} ({guess[0]}?)" if guess else name for name, guess in zip(single, guesses, strict=True)
        )
        yield f"with a single image, perhaps mistyped: {brief(', '.join(shown), 200)}"


def read_targets(
    source: ImageSet, indices: Sequence[int] | None = None, *, task: Task | None = None
) -> Targets:
    """Return what the labels of a source, or of some of its images, say; without a task as they look."""
    chosen = np.arange(len(source)) if indices is None else np.asarray(indices, np.int64)
    labels = [source.label(index) for index in chosen.tolist()]
    numbers = np.array([-1 if number is None else number for number in labels], np.int64)
    chosen, numbers = chosen[numbers >= 0], numbers[numbers >= 0]
    task = task or recognise(source.classes)
    if task == "multiclass":
        return Targets(task, chosen, numbers, tuple(source.classes))
    occurring, rows = np.unique(numbers, return_inverse=True)
    names, values = _parse([source.classes[number] for number in occurring], task)
    return Targets(task, chosen, values[rows].astype(np.float32), names)


def recognise(labels: Sequence[str]) -> Task:
    """Return what the distinct labels of a source are for.

    Whole numbers are classes, unless some are fractions or a table has several columns of them.
    """
    names, values = _read_numbers(labels) or ((), np.empty(0))
    if (values % 1).any() or (len(names) > 1 and all(names)):
        return "regression"
    return "multilabel" if any(SEPARATOR in label for label in labels) else "multiclass"


def _read_numbers(labels: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.float64]] | None:
    """Return the columns and the numbers of each label; None unless all have the same columns of numbers."""
    rows = [[part.rpartition("=") for part in label.split(SEPARATOR)] for label in labels]
    columns = {tuple(name for name, _, _ in row) for row in rows}
    numbers = [[as_number(text) for *_, text in row] for row in rows]
    if len(columns) > 1 or any(None in row for row in numbers):
        return None
    return next(iter(columns), ()), np.array(numbers, np.float64)


def as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def join_numbers(cells: Mapping[str, str]) -> str:
    """Return the numbers of a row, by column, as a label, which is empty if one is missing."""
    if None in map(as_number, cells.values()):
        return ""
    pairs = [f"{name}={cell.strip()}" for name, cell in cells.items()]
    return SEPARATOR.join(pairs) if len(pairs) > 1 else "".join(cells.values())


def _parse(labels: Sequence[str], task: Task) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Return names, and for each label its numbers, or whether it has each of several labels."""
    columns, values = _read_numbers(labels) or ((), np.empty(0))
    if task == "regression":
        names = tuple(name or "number" + f" {column}" * bool(column) for column, name in enumerate(columns))
        if labels and not names:
            text = next((label for label in labels if not _read_numbers([label])), labels[0])
            raise ValueError(f"task=regression needs the same numbers for each image; one has {brief(text)}")
        return names, values
    if len(columns) > 2 and np.isin(values, (0, 1)).all():
        text = "is a 0 or 1 for each label, without the names of the labels: let the object have `classes`"
        raise ValueError(f"{brief(labels[0])} {text}, or write those of an image by name, as in sea;sky")
    sets = [{name.strip() for name in label.split(SEPARATOR)} - {""} for label in labels]
    names = tuple(sorted(set[str]().union(*sets)))
    return names, np.array([[name in each for name in names] for each in sets], np.float64)

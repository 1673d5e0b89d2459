"""What labels say: the class of each image, or several labels of it.

A label is a text. Several labels of an image are joined by semicolons, as in `sea;sky`; `;` alone is none of
them.
"""

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
NO_LABEL = ("nan", "-1", "-1.0")  # what pandas, torchvision and others write for none
ZERO_OR_ONE = {"0", "1", "0.0", "1.0"}


class Targets(NamedTuple):
    """What is to be predicted of images: by the task a class, or whether each label is theirs."""

    task: Task
    indices: NDArray[np.int64]  # (n,), of the images with a label in the source
    values: NDArray[Any]  # classes: int64 (n,); labels: 0 or 1, float32 (n, names)
    names: tuple[str, ...]  # of the classes, or the labels

    def __str__(self) -> str:
        images, names = plural(len(self.indices), "image"), brief(", ".join(self.names), 100)
        if self.task == "multiclass":
            text = f"one class for each of {images}, {plural(len(self.names), 'class', 'classes')}: {names}"
        else:
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
    names, values = _parse([source.classes[number] for number in occurring])
    return Targets(task, chosen, values[rows], names)


def recognise(labels: Sequence[str]) -> Task:
    """Return what the distinct labels of a source are for."""
    return "multilabel" if any(SEPARATOR in label for label in labels) else "multiclass"


def _parse(labels: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Return the names of several labels, and for each text whether it has each of them."""
    parts = [[name.strip() for name in label.split(SEPARATOR)] for label in labels]
    if parts and all(len(each) == len(parts[0]) > 2 and {*each} <= ZERO_OR_ONE for each in parts):
        text = "is a 0 or 1 for each label, without the names of the labels: let the object have `classes`"
        raise ValueError(f"{brief(labels[0])} {text}, or write those of an image by name, as in sea;sky")
    sets = [{name for name in each if name and name.lower() not in NO_LABEL} for each in parts]
    names = tuple(sorted(set[str]().union(*sets)))
    return names, np.array([[name in each for name in names] for each in sets], np.float32)

"""Labels of any kind as numbers from 0 on, and labels that stand in a file of their own."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.data.sources.source import IMAGE_SUFFIXES, Source

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("dino_vit")

PATH_WORDS = ("path", "file", "filename", "file_name", "filepath", "name", "image", "image_path", "img", "id")
LABEL_WORDS = (
    "label",
    "labels",
    "class",
    "cls",
    "target",
    "category",
    "class_id",
    "class_name",
    "fine_label",
)
_IMAGE = "|".join(re.escape(suffix) for suffix in IMAGE_SUFFIXES)
_LINE = re.compile(rf"(.*(?:{_IMAGE}))(?:[\t ,]+(\S.*?))?\s*", re.IGNORECASE)


class Labels(NamedTuple):
    """A number for each item, −1 for none, and what the numbers mean."""

    numbers: NDArray[np.int32]
    classes: list[str]


def number_labels(values: Sequence[object]) -> Labels:
    """Number labels from 0 on: in numeric order if all are numbers, or else sorted as texts; no gaps."""
    texts = [None if value in (None, "", b"") else _text(value) for value in values]
    classes = sorted({text for text in texts if text is not None}, key=os.fsencode)
    numeric = [_number(text) for text in classes]
    if all(number is not None for number in numeric):
        classes = sorted(classes, key=lambda text: (_number(text), text))
    number: dict[str | None, int] = {text: place for place, text in enumerate(classes)}
    number[None] = -1
    return Labels(np.array([number[text] for text in texts], dtype=np.int32), classes)


def _text(value: object) -> str:
    return os.fsdecode(value) if isinstance(value, bytes) else str(value)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def folder_labels(names: Sequence[bytes]) -> Labels:
    """Label sorted paths by their first-level folder, below the folders that all have in common."""
    folders = (name.split(b"/")[:-1] for name in (names[0], names[-1]))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(*folders, strict=False))
    below = sum(len(folder) + 1 for folder, _ in shared)
    tops = (name[below:].partition(b"/") for name in names)
    return number_labels([top if slash else None for top, slash, _ in tops])


class Entry(NamedTuple):
    """A line of a list: a path or a name, and its label."""

    name: str
    label: str | None


def read_entries(path: str, data: bytes, words: Sequence[str] = LABEL_WORDS) -> Iterator[Entry]:
    """Read a list: CSV or TSV with or without a header, or text with a path a line and perhaps a label.

    `words` are what a column of labels may be called where there are more than two.
    """
    text = data.decode("utf-8-sig", errors="surrogateescape")
    suffix = os.path.splitext(path)[1].lower()
    if suffix in (".csv", ".tsv"):
        table = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if suffix == ".tsv" else ",")
        return _entries(path, [row for row in table if any(row)], words)
    return (_line_entry(line) for line in text.split("\n") if line.strip())


def _line_entry(line: str) -> Entry:
    found = _LINE.fullmatch(line.strip("\r"))
    if found:
        return Entry(found[1], found[2])
    name, _, label = line.strip("\r").partition("\t")
    return Entry(name, label or None)


def _entries(path: str, rows: list[list[str]], words: Sequence[str]) -> Iterator[Entry]:
    if not rows:
        return
    header = _header(rows)
    name = _column(header, PATH_WORDS) if header else None
    if name is None:
        sample = rows[1 if header and len(rows) > 1 else 0]
        name = next((place for place, cell in enumerate(sample) if _is_path(cell)), 0)
    label = _column(header, words) if header else None
    if label is None and len(rows[0]) == 2:
        label = 1 - name
    if label is None and len(rows[0]) > 2:
        log.warning("%s has no column that is called one of %s: no %ss", path, ", ".join(words), words[0])
    for number, row in enumerate(rows[1 if header else 0 :], start=2 if header else 1):
        if len(row) <= max(name, label or 0):
            raise ValueError(
                f"{path}, row {number} has {len(row)} of {len(rows[0])} columns: {row!r:.80}. "
                f"Names with a comma need quotes."
            )
        yield Entry(row[name], None if label is None else row[label].strip() or None)


def _header(rows: list[list[str]]) -> list[str] | None:
    """Return the first row's words if it is a header: it has no path of an image where the next one has."""
    first = [cell.strip().lower() for cell in rows[0]]
    if any(map(_is_path, first)):
        return None
    named = _column(first, PATH_WORDS) is not None
    return first if named or (len(rows) > 1 and any(map(_is_path, rows[1]))) else None


def _column(header: list[str], words: Iterable[str]) -> int | None:
    return next((header.index(word) for word in words if word in header), None)


def _is_path(cell: str) -> bool:
    return cell.strip().lower().endswith(IMAGE_SUFFIXES)


class LabelledSource:
    """A source with other labels."""

    def __init__(self, source: Source, labels: Labels) -> None:
        self.source = source
        self._numbers, self._classes = labels

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> bytes | Tensor:
        return self.source.read(index)

    def label(self, index: int) -> int | None:
        number = int(self._numbers[index])
        return None if number < 0 else number

    def name(self, index: int) -> str:
        return self.source.name(index)

    @property
    def classes(self) -> list[str]:
        return self._classes

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint


def join_labels(source: Source, path: str | Path) -> LabelledSource:
    """Give items the labels that a file has for their names, and say how many names did not meet."""
    table = read_table(str(path))
    values = [table.get(source.name(index)) for index in range(len(source))]
    names = {source.name(index) for index in range(len(source))}
    known, surplus = len(table.keys() & names), [name for name in table if name not in names]
    if not known:
        raise ValueError(
            f"{path} has labels for none of the images: it speaks of {next(iter(table), 'nothing')!r}, "
            f"the source of {source.name(0)!r}. The names must be the same, suffix and all."
        )
    missing = sum(value is None for value in values)
    if missing:
        example = source.name(values.index(None))
        log.warning("%s: no label for %d of %d images, such as %r", path, missing, len(source), example)
    if surplus:
        text = "%s: %d labels are for names that are not in the source, such as %r"
        log.warning(text, path, len(surplus), surplus[0])
    return LabelledSource(source, number_labels(values))


def read_table(path: str, words: Sequence[str] = LABEL_WORDS) -> dict[str, object]:
    """Read what a file says of each name: a JSON object, or a list as for `read_entries`."""
    data = Path(path).read_bytes()
    if os.path.splitext(path)[1].lower() != ".json":
        return _without_contradictions(path, read_entries(path, data, words))
    try:
        table = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f'{path} must be one object of names and labels, such as {{"a.jpg": "cat"}}.')
    return table


def _without_contradictions(path: str, entries: Iterable[Entry]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, label in entries:
        if found.setdefault(name, label) != label:
            raise ValueError(f"{path} says two things of {name!r}: {found[name]!r} and {label!r}.")
    return found

"""Lists of images, and files of labels that are joined to images by name: text, CSV, TSV and JSON."""

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.text import brief, did_you_mean, plural, printable, public, public_values
from dino_vit.data.image_set import ImageSet
from dino_vit.data.index import IndexContents, WriteImages, indexing, open_index
from dino_vit.data.labels import LABEL_COLUMNS, encode_labels, is_label, parse_json
from dino_vit.data.paths import IMAGE_SUFFIXES, folder_of, suffix_of
from dino_vit.data.remote import PER_IMAGE_TIMEOUT_S, is_url, read_file
from dino_vit.data.stores.files import Files, join_path

PATH_COLUMNS = tuple(
    ["path", "file", "filename", "file_name", "filepath", "name", "image", "image_path", "img", "id"]
)
_IMAGE = "|".join(re.escape(suffix) for suffix in sorted(IMAGE_SUFFIXES, key=len, reverse=True))
_LINE = re.compile(rf"(.*(?:{_IMAGE}))(?:[\t ,]+(.*))?", re.IGNORECASE | re.DOTALL)  # a path and its label
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
SEPARATOR = ";"  # of several labels in a cell of text
GUESSED = "guessed"  # the origin of a label that `predict` wrote: nobody gave it
UNSURE = "unsure"  # the same, but somebody looked at the image and did not label it
CORRECTED = "corrected"  # somebody wrote another label than the guess
_OF_PREDICT = "origin", "confidence", "guess"  # columns of its table
_TABBED = re.compile(r"([^\t]*)\t?(.*)", re.DOTALL)  # the same, without a suffix of an image


class Entry(NamedTuple):
    """A row of a list or of a table of labels."""

    name: str  # or a path
    label: Any  # a text, or several in a list; None: it has none
    line: int  # in the file, or the row of a table that has no lines
    origin: str = ""
    confidence: str = ""
    guess: Any = None  # what `predict` wrote as the label, which may be another now

    @property
    def given(self) -> Any:
        """The label, unless it was guessed."""
        return None if self.origin in (GUESSED, UNSURE) else self.label


def read_entries(
    path: str, data: bytes, *, labels_needed: bool = False, several: bool = False
) -> Iterator[Entry]:
    """Read a list of images, or labels by name, from text, CSV, TSV, JSON or Parquet.

    A table without a column of labels is an error if they are needed, otherwise a warning. With `several`, a
    cell has several labels, as in `sea;sky`. An entry with another label than its guess was corrected.
    """
    for entry in _parse(path, data, labels_needed):
        label, has_guess = entry.label, entry.guess not in (None, "")
        if isinstance(label, str) and any("\udc80" <= letter <= "\udcff" for letter in label):
            # As Excel's plain CSV: a ü would be `\xfc`.
            text = f"the label '{brief(printable(label), 100)}' is not in UTF-8"
            raise ValueError(f"{path}, line {entry.line}: {text}; save it in UTF-8, in Excel as 'CSV UTF-8'")
        is_guess = label == entry.guess if has_guess else entry.origin == GUESSED
        if entry.origin in (GUESSED, UNSURE) and label not in (None, "") and not is_guess:
            entry = entry._replace(origin=CORRECTED)
        is_cell = several and label and isinstance(label, str)
        yield entry._replace(label=label.split(SEPARATOR)) if is_cell else entry


def _parse(path: str, data: bytes, labels_needed: bool) -> Iterator[Entry]:
    if data.startswith(b"PAR1"):
        return _parquet_entries(path, data)
    if suffix_of(path) == ".json":
        return _json_entries(path, data)
    if b"\0" in data:
        raise ValueError(f"{path} is not text in UTF-8, perhaps in UTF-16; save it in UTF-8.")
    # Spreadsheets begin a file with a byte order mark; names of files may hold any bytes.
    text = data.decode("utf-8-sig", errors="surrogateescape")
    if suffix_of(path) in _DELIMITERS:
        return _table_entries(path, _rows(path, text), labels_needed)
    return _text_entries(text)


def _text_entries(text: str) -> Iterator[Entry]:
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip("\r")
        match = _LINE.fullmatch(line.rstrip()) or _TABBED.fullmatch(line)
        if match and line.strip():
            yield Entry(match[1], match[2] or None, number)


def _rows(path: str, text: str) -> dict[int, list[str]]:
    """Return the rows of a table that are not empty, by line; a quote left open would hide all that follow.

    Where a comma is in numbers, spreadsheets separate the cells of a .csv by semicolons.
    """
    delimiter, first = _DELIMITERS[suffix_of(path)], text.partition("\n")[0]
    if delimiter not in first and not _is_path(first):
        delimiter = next((other for other in ";,\t" if other in first), delimiter)
    table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        return dict((table.line_num, row) for row in table if any(row))
    except csv.Error as error:
        raise ValueError(f"{path}, line {table.line_num}: {error}") from error


def _table_entries(path: str, lines: dict[int, list[str]], labels_needed: bool) -> Iterator[Entry]:
    if not lines:
        return
    rows = [*lines.values()]
    header = _header(rows)
    start = 1 if header else 0
    name = _find_column(header, PATH_COLUMNS)
    if name is None:
        name = next((index for index, cell in enumerate(rows[start]) if _is_path(cell)), 0)
    label = _find_column(header, LABEL_COLUMNS)
    if label is None and len(rows[0]) == 2:
        beside = {row[1 - name] for row in rows[start:] if len(row) == 2}
        title = header[1 - name] if header else "label"
        is_name = title in PATH_COLUMNS and len(beside) == len(rows) - start
        label = None if is_name or not title else 1 - name
    if label is None and len(rows[0]) > 2:
        first = brief(",".join(public_values(rows[0])), 200)
        problem = (
            f"no labels are read, as the first line names no column label: {first}. Write the names of "
            "the columns there; several labels of an image are one cell, as in sea;sky, with several=true"
        )
        if labels_needed:
            raise ValueError(f"{path}: {problem}")
        log.warning("%s: %s", path, problem)
    width, others = len(rows[0]), [_find_column(header, [title]) for title in _OF_PREDICT]
    for number, row in [*lines.items()][start:]:
        if len(row) <= max(name, label or 0) or any(row[width:]):
            advice = "; write a cell with commas in quotes" if len(row) > width else ""
            shown = brief(public_values(row), 80)
            raise ValueError(f"{path}, line {number} has {len(row)} of {width} columns: {shown}{advice}")
        text = "" if label is None else row[label]
        cells = ("" if at is None or at >= len(row) else row[at].strip() for at in others)
        yield Entry(row[name], text.strip() or None, number, *cells)


def _header(rows: list[list[str]]) -> list[str]:
    """Return the first row if it is a header: without a path of an image, but named so or before one."""
    first = [cell.strip().lower() for cell in rows[0]]
    if any(map(_is_path, first)):
        return []
    named = _find_column(first, PATH_COLUMNS) is not None
    return first if named or (len(rows) > 1 and any(map(_is_path, rows[1]))) else []


def _find_column(header: list[str], names: Sequence[str]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def _is_path(cell: str) -> bool:
    return public(cell.strip()).lower().endswith(IMAGE_SUFFIXES)


def open_list(path: str, several: bool = False) -> ImageSet:
    """Open the images in a list of paths, which are relative to the list's folder, absolute, or URLs.

    With `several`, the labels of an image are in one cell, as in `sea;sky`.
    """
    root, shown = folder_of(path), public(path)
    with indexing(path):
        given = read_entries(shown, read_file(path), several=several)
        entries = sorted(given, key=lambda entry: os.fsencode(entry.name))
    if not entries:
        raise ValueError(f"{shown} lists no images. Write one path per line.")
    if (named := len(by_name(shown, entries))) < len(entries):
        text = "%s names %s in %s; one that is named twice comes twice in an epoch"
        log.info(text, shown, plural(named, "image"), plural(len(entries), "line"))
    warn_of_joined(shown, entries)
    paths = [join_path(root, entry.name) for entry in entries]
    # To ask for the size of each remote file would take long.
    local = [row for row, path in enumerate(paths) if not is_url(path)]
    files = [path, *(paths[row] for row in local)]

    def build(_: WriteImages, signatures: NDArray[np.int64]) -> IndexContents:
        sizes = np.zeros(len(paths), dtype=np.int64)
        sizes[local] = signatures[1:, 0]
        _check_missing(shown, paths, np.flatnonzero(sizes < 0))
        names = [os.fsencode(entry.name) for entry in entries]
        labels = encode_labels([entry.given for entry in entries])
        return IndexContents(names=names, sizes=sizes, labels=labels)

    index = open_index("list-several" if several else "list", path, build, files)
    # Each remote image may be on another server.
    images = index.image_set(Files(index, root, PER_IMAGE_TIMEOUT_S), index.stamp)
    return images if len(local) == len(paths) else replace(images, stamp=None)


def _check_missing(name: str, paths: Sequence[str], missing: NDArray[np.int64]) -> None:
    """Refuse a list without any file that exists, and warn of those that do not."""
    if len(missing) == len(paths):
        raise ValueError(
            f"none of the files listed in {name} exist, such as {brief(paths[0], 200)}; paths are "
            "relative to the folder of the list"
        )
    if len(missing):
        text = "%s lists %s that cannot be found, such as %s; they count as unreadable"
        log.warning(text, name, plural(len(missing), "file"), brief(paths[missing[0]], 200))


def join_labels(images: ImageSet, path: str | Path, several: bool = False) -> ImageSet:
    """Label images by name from a file, and warn about names without a match; a guess is no label.

    With `several`, the labels of an image are in one cell, as in `sea;sky`.
    """
    table = read_table(str(path), several)
    path = public(str(path))
    warn_of_joined(path, table.values())
    entries = match_names(images, table, path)
    values, count = [entry and entry.given for entry in entries], plural(len(images), "image")
    guessed = sum(bool(entry and entry.label is not None and entry.given is None) for entry in entries)
    corrected = sum(bool(entry and entry.guess and entry.origin == CORRECTED) for entry in entries)
    labelled = len(values) - values.count(None)
    if not labelled:
        advice = "they are guesses of predict" if guessed else "fill in the labels"
        raise ValueError(f"{path} names images, but has a label for none of them: {advice}")
    if corrected or labelled < len(values):
        text = (
            f", {plural(corrected, 'corrected guess', 'corrected guesses')} among them" if corrected else ""
        )
        text += f"; {plural(guessed, 'guess', 'guesses')} of predict in it are no labels" if guessed else ""
        log.info("%s: labels for %s of %s%s", path, f"{labelled:,}", count, text)
    return images.with_labels(encode_labels(values))


def match_names(images: ImageSet, table: Mapping[str, Entry], path: str) -> list[Entry | None]:
    """Return the entry of each image by its name, and warn about names without a match."""
    names = [images.name(index) for index in range(len(images))]
    full_names = [printable(images.full_name(index)) for index in range(len(images))]
    surplus = list(map(public, sorted(set(table).difference(names, full_names))))
    images.distinct_names([i for i, full in enumerate(full_names) if full not in table and names[i] in table])
    if len(surplus) == len(table):
        raise ValueError(
            f"{path} has labels for none of the images: its names are like "
            f"'{brief(next(iter(table), ''), 200)}', those of the source like '{names[0]}', and must be equal"
        )
    if surplus:
        extra = plural(len(surplus), "label")
        log.warning("%s: %s for names not in the source: %s", path, extra, _examples(surplus))
    return [find_entry(table, images, index) for index in range(len(images))]


def find_entry(table: Mapping[str, Entry], images: ImageSet, index: int) -> Entry | None:
    """Return the entry of an image, by its whole name or as it is shown."""
    return table.get(printable(images.full_name(index))) or table.get(images.name(index))


def _examples(items: Sequence[object], form: str = "'%.200s'") -> str:
    """Return the first three, as they are told to a user."""
    return ", ".join(form % item for item in items[:3]) + ", ..." * (len(items) > 3)


def read_table(path: str, several: bool) -> dict[str, Entry]:
    """Read a label for each name (as of `ImageSet.name`)."""
    try:
        data, path = read_file(path), public(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        wrong = "is a folder" if isinstance(error, IsADirectoryError) else "does not exist"
        advice = did_you_mean(path, "; give a CSV or JSON file with a label for each image")
        raise ValueError(f"{path} {wrong}{advice}") from None
    return by_name(path, read_entries(path, data, labels_needed=True, several=several))


def _json_entries(path: str, data: bytes) -> Iterator[Entry]:
    pairs = parse_json(data, path)
    if not isinstance(pairs, tuple):
        raise ValueError(f'{path} must be one object of names and labels, such as {{"a.jpg": "cat"}}.')
    for number, (name, value) in enumerate(pairs, 1):
        if value is not None and not is_label(value):
            text = "is neither a text nor a number, nor a list of these"
            raise ValueError(f"{path}: the label of '{brief(name, 200)}' {text}")
        yield Entry(name, value, number)


def _parquet_entries(path: str, data: bytes) -> Iterator[Entry]:
    """Yield the rows of a table in Parquet, such as one that `predict` or `embed` wrote."""
    from pyarrow import BufferReader, parquet

    titles = parquet.read_schema(BufferReader(data)).names
    if not {"name", "label"} <= {*titles}:
        raise ValueError(f"{path} needs the columns name and label, but has {brief(', '.join(titles), 200)}")
    columns = [title for title in ("name", "label", *_OF_PREDICT) if title in titles]
    rows = parquet.read_table(BufferReader(data), columns=columns).to_pylist()
    for number, row in enumerate(rows, 1):
        origin, confidence = ("" if cell is None else str(cell) for cell in map(row.get, _OF_PREDICT[:2]))
        yield Entry(row["name"], row["label"], number, origin, confidence, row.get("guess"))


def by_name(path: str, entries: Iterable[Entry]) -> dict[str, Entry]:
    """Return the entry of each name; raise an error if a name has two labels."""
    table, contradictions = dict[str, Entry](), dict[str, tuple[str, Any, int, Any, int]]()
    for entry in entries:
        name = printable(entry.name)
        label = printable(entry.label) if isinstance(entry.label, str) else entry.label
        entry = entry._replace(name=name, label=label)
        first = table.setdefault(name, entry)
        if first.label is not label and first.label != label:  # NaN is not itself
            contradictions[name] = (name, first.label, first.line, label, entry.line)
    if contradictions:
        where = "row" if suffix_of(path) in (".json", ".parquet") else "line"
        form = f"%.200r has %.200r in {where} %d and %.200r in {where} %d"
        examples = _examples(public_values([*contradictions.values()]), form)
        count = plural(len(contradictions), "name")
        text = f"{path} has two labels for {count}: {examples}; keep one {where} of each"
        raise ValueError(f"{text}; several labels of an image are one value, as in sea;sky with several=true")
    return table


def warn_of_joined(path: str, entries: Iterable[Entry]) -> None:
    """Warn of a class that looks like several labels."""
    labels = (entry.label for entry in entries if isinstance(entry.label, str))
    if joined := [label for label in labels if SEPARATOR in label]:
        text = "%s: '%s' is one class; several=true reads several labels"
        log.warning(text, path, brief(max(joined, key=len)))

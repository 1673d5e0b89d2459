"""Images in Parquet, unpacked once into the index, where any of them is read without its row group."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dino_vit.core.progress import progress
from dino_vit.data.labels import Labels, number_labels
from dino_vit.data.sources.files import open_file, stamps
from dino_vit.data.sources.index import Draft, Sink, open_index
from dino_vit.data.sources.indexed import IndexedSource, by_name, draft_items

log = logging.getLogger("dino_vit")

IMAGE_WORDS = ("image", "img", "images", "jpg", "jpeg", "png", "bytes", "data", "content")
LABEL_WORDS = ("label", "labels", "cls", "class", "target", "category", "fine_label")
NAME_WORDS = ("path", "name", "file_name", "filename", "file", "key", "__key__")
BATCH = 256  # rows


@dataclass(frozen=True)
class Layout:
    """Which columns of a table hold what."""

    image: str
    nested: bool  # bytes and path in one column, as Hugging Face has them
    name: str | None
    label: str | None
    classes: tuple[str, ...] | None  # of a label that counts them


@dataclass
class Rows:
    """What is said of some rows of a table."""

    names: list[bytes | None] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    sizes: list[NDArray[np.int64]] = field(default_factory=list)

    def take(self, batch: pa.RecordBatch, layout: Layout, sink: Sink) -> None:
        """Note some rows more, and hand over their images end to end."""
        images = batch.column(layout.image)
        paths = batch.column(layout.name) if layout.name else None
        if layout.nested:
            parts = dict(zip([field.name for field in images.type], images.flatten(), strict=True))
            images, paths = parts["bytes"], parts.get("path", paths)
        images = images.cast(pa.large_binary())
        _, ends, data = images.buffers()
        offsets = np.frombuffer(ends, dtype=np.int64)[images.offset : images.offset + len(images) + 1]
        if data is not None:
            sink(memoryview(data)[int(offsets[0]) : int(offsets[-1])])
        self.sizes.append(np.diff(offsets))
        texts = [None] * len(images) if paths is None else paths.to_pylist()
        self.names += [None if text is None else os.fsencode(text) for text in texts]
        self.labels += batch.column(layout.label).to_pylist() if layout.label else [None] * len(images)


def draft_rows(
    rows: Rows,
    layout: Layout,
    *,
    tables: Sequence[tuple[str, int]],
    columns: Mapping[str, NDArray[Any]],
    watched: Sequence[str],
    stamps: NDArray[np.int64],
) -> Draft:
    """Return the draft of the rows of tables, given by name and length; in the order of the rows' names."""
    names, order = _names(rows.names, tables)
    return draft_items(
        names=names,
        sizes=np.concatenate([np.empty(0, dtype=np.int64), *rows.sizes])[order],
        labels=_labels([rows.labels[place] for place in order], layout),
        columns={name: column[order] for name, column in columns.items()},
        watched=watched,
        stamps=stamps,
    )


class ParquetSource(IndexedSource):
    """The images of a table, by name where all rows have one of their own, or else in their order."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        super().__init__(open_index("parquet", spec, self._build, self._files))

    def read(self, index: int) -> bytes:
        row = self._row(index)
        start, size = int(self.index["start"][row]), int(self.index["size"][row])
        return self.index["data"][start : start + size].tobytes()

    def _build(self, sink: Sink) -> Draft:
        before = stamps(self._files)
        layout, rows, tables = None, Rows(), []
        with progress(f"Unpacking {self._spec}") as advance:
            for path in self._files:
                table = _open(path)
                found = find_layout(path, table.schema_arrow)
                if layout is not None and found != layout:
                    raise ValueError(
                        f"{path} has other columns than {self._files[0]}. Open one kind of table at a time."
                    )
                layout = found
                tables.append((os.path.basename(path), table.metadata.num_rows))
                for batch in _batches(path, table, layout):
                    rows.take(batch, layout, sink)
                    advance(batch.num_rows)
        assert layout is not None
        sizes = np.concatenate([np.empty(0, dtype=np.int64), *rows.sizes])
        if not sizes.any():
            raise ValueError(
                f"Column {layout.image} of {self._spec} has no bytes of images, perhaps paths only. "
                f"Write the images into the table, or give the folder that holds them."
            )
        return draft_rows(
            rows,
            layout,
            tables=tables,
            columns={"start": np.cumsum(sizes) - sizes, "size": sizes},
            watched=self._files,
            stamps=before,
        )


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path if "://" not in path else open_file(path))
    except pa.ArrowException as error:
        raise ValueError(f"{path} is broken or no Parquet file: {error}. Copy it again.") from error


def _batches(path: str, table: pq.ParquetFile, layout: Layout) -> Iterator[pa.RecordBatch]:
    columns = [name for name in (layout.image, layout.name, layout.label) if name is not None]
    try:
        yield from table.iter_batches(BATCH, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is broken: {error}. Copy it again, or take it out of the set.") from error


def find_layout(path: str, schema: pa.Schema) -> Layout:
    """Say which columns hold images, names and labels: as Hugging Face notes it, or as they are called."""
    features = _features(schema)
    types = {field.name: field.type for field in schema}
    nested = {name for name, kind in types.items() if pa.types.is_struct(kind) and "bytes" in kind.names}
    binary = {name for name, kind in types.items() if _is_binary(kind)}
    noted = [name for name in types if features.get(name, {}).get("_type") == "Image"]
    image = _pick(path, "images", noted, IMAGE_WORDS) or _pick(
        path, "images", [name for name in types if name in nested | binary], IMAGE_WORDS
    )
    if image is None:
        columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise ValueError(
            f"{path} has no column of images: none of {columns} is binary, or a struct with bytes in it."
        )
    label = next((word for word in LABEL_WORDS if word in types and word != image), None)
    if label is None:
        noted = [name for name in types if features.get(name, {}).get("_type") == "ClassLabel"]
        label = noted[0] if len(noted) == 1 else None
    classes = features.get(label or "", {}).get("names")
    name = next((word for word in NAME_WORDS if word in types and pa.types.is_string(types[word])), None)
    return Layout(image, image in nested, name, label, tuple(classes) if classes else None)


def _features(schema: pa.Schema) -> dict[str, Any]:
    noted = (schema.metadata or {}).get(b"huggingface")
    try:
        return dict(json.loads(noted)["info"]["features"]) if noted else {}
    except (ValueError, KeyError, TypeError):  # of some other make
        return {}


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _pick(path: str, what: str, names: list[str], words: Sequence[str]) -> str | None:
    if len(names) <= 1:
        return names[0] if names else None
    for word in words:
        if word in names:
            log.info("%s: %s from column %s, not from %s", path, what, word, ", ".join({*names} - {word}))
            return word
    raise ValueError(
        f"{path} has several columns of {what}: {', '.join(names)}. Call one of them `{words[0]}`."
    )


def _names(given: Sequence[bytes | None], tables: Sequence[tuple[str, int]]) -> tuple[list[bytes], list[int]]:
    """Return names and the order of the rows: by the names that rows have, if these are all different."""
    known = [name for name in given if name is not None]
    if len(known) == len(given) and len(set(known)) == len(known):
        order = by_name(known)
        return [known[place] for place in order], order
    names = [os.fsencode(f"{table}/{row:09d}") for table, count in tables for row in range(count)]
    return names, list(range(len(names)))


def _labels(values: list[Any], layout: Layout) -> Labels:
    if layout.classes is None:
        return number_labels(values)
    known = len(layout.classes)
    wrong = next((value for value in values if value is not None and not -1 <= value < known), None)
    if wrong is not None:
        raise ValueError(f"Column {layout.label} has label {wrong}, but names for 0 to {known - 1} only.")
    numbers = [-1 if value is None else value for value in values]
    return Labels(np.array(numbers, dtype=np.int32), list(layout.classes))

"""Images in Parquet files and in datasets of the Hugging Face hub.

Both are read from an Arrow file that is mapped into memory. The `datasets` library keeps its data that way. A
Parquet file is unpacked into the index: reading one image of it would mean decompressing its whole row group.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dino_vit.core import log
from dino_vit.core.progress import progress
from dino_vit.core.text import brief, printable
from dino_vit.data.labels import Labels, number_labels
from dino_vit.data.sources.archives import check_ratio
from dino_vit.data.sources.files import open_file, read_file, stamps
from dino_vit.data.sources.index import Draft, IndexedSource, WriteImages, open_index

IMAGE_COLUMNS = ("image", "img", "images", "jpg", "jpeg", "png", "bytes", "data", "content")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "category", "fine_label")
NAME_COLUMNS = ("path", "name", "file_name", "filename", "file", "key", "__key__")
BINARY = (pa.binary(), pa.large_binary())
BATCH, BATCH_BYTES = 32, 2**25  # rows that are read together, and about how long they may be


@dataclass(frozen=True)
class TableColumns:
    """Which columns of a table hold the images, their names and their labels."""

    image: str
    nested: bool  # bytes and path in one column, as in Hugging Face datasets
    name: str | None
    label: str | None
    classes: tuple[str, ...] | None  # of integer labels


@dataclass
class Rows:
    """Names, labels and sizes of the images in the rows of tables."""

    names: list[bytes | None] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch, columns: TableColumns) -> pa.Array:
        """Add rows, and return their images."""
        images = batch.column(columns.image)
        paths = batch.column(columns.name) if columns.name else pa.nulls(len(batch))
        labels = batch.column(columns.label) if columns.label else pa.nulls(len(batch))
        if columns.nested:
            path = images.type.get_field_index("path")  # -1 if there are two
            if path >= 0 and pa.types.is_string(images.type.field(path).type):
                paths = pc.struct_field(images, [path])
            images = pc.struct_field(images, "bytes")
        self.names += [None if path is None else os.fsencode(path) for path in paths.to_pylist()]
        self.labels += labels.to_pylist()
        images = images.cast(pa.large_binary())
        self.sizes += pc.binary_length(images).fill_null(0).to_pylist()
        return images

    def draft(self, columns: TableColumns, tables: Sequence[tuple[str, int]]) -> Draft:
        """Return the draft of an index of tables, given by name and length.

        The items are ordered by name if all rows have a name of their own.
        """
        names = [name for name in self.names if name is not None]
        named = len(set(names)) == len(self.names)
        if not named:
            names = [os.fsencode(f"{table}/{row:09d}") for table, count in tables for row in range(count)]
        return Draft(
            names=names,
            sizes=self.sizes,
            labels=_number(columns, self.labels),
            columns={"row": np.arange(len(names))},
            by_name=named,
        )


class ParquetSource(IndexedSource):
    """The images in Parquet files, unpacked into the index."""

    def __init__(self, spec: str, files: Sequence[str]) -> None:
        self._spec, self._files = spec, list(files)
        super().__init__(open_index("parquet", spec, self._build, self._files))

    def read(self, index: int) -> bytes:
        return self.index.images[int(self.index.columns["row"][index])].as_py() or b""

    def _build(self, write_images: WriteImages) -> Draft:
        columns, rows, tables = None, Rows(), []
        stored, unpacked = int(stamps(self._files)[:, 0].sum()), 0
        with progress(f"Unpacking {self._spec}") as advance:
            for path in self._files:
                with open_file(path) as file:
                    with _reading(path):
                        table = pq.ParquetFile(file)
                    found = find_columns(path, table.schema_arrow)
                    if columns is not None and found != columns:
                        raise ValueError(
                            f"{path} has other columns than {self._files[0]}. Open them one by one."
                        )
                    columns = found
                    tables.append((os.path.basename(path), table.metadata.num_rows))
                    for batch in _batches(path, table, columns, stored):
                        unpacked += batch.nbytes
                        check_ratio(stored, unpacked)
                        write_images(rows.add(batch, columns))
                        advance(batch.num_rows)
        assert columns is not None
        if not any(rows.sizes):
            raise ValueError(
                f"Column {printable(columns.image)} of {self._spec} contains no image bytes, perhaps "
                f"only paths. Write the images into the table, or give the folder that holds them."
            )
        return rows.draft(columns, tables)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is damaged or not a Parquet file: {brief(error, 300)}. "
            "Copy it again, or remove it from the source."
        ) from error


def _batches(
    path: str, table: pq.ParquetFile, columns: TableColumns, stored: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows; what the footer says bounds how many are read at once, as each takes memory."""
    names = [name for name in (columns.image, columns.name, columns.label) if name is not None]
    starts, footer = tuple(f"{name}." for name in names), table.metadata
    leaves = [index for index, leaf in enumerate(table.schema) if f"{leaf.path}.".startswith(starts)]
    groups = map(footer.row_group, range(footer.num_row_groups))
    parts = [group.column(index) for group in groups for index in leaves]
    check_ratio(stored, sum(part.total_uncompressed_size for part in parts))
    held: list[pa.RecordBatch] = []
    with _reading(path):
        for batch in table.iter_batches(_batch_rows(parts), columns=names):
            held.append(batch)
            if sum(map(len, held)) >= BATCH or sum(part.nbytes for part in held) >= BATCH_BYTES:
                yield from pa.Table.from_batches(held).combine_chunks().to_batches()
                held = []
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def _batch_rows(parts: Sequence[pq.ColumnChunkMetaData]) -> int:
    """Return how many rows to read together: each may be as long as the dictionary of its column."""
    longest = 1.0
    for part in parts:
        size = part.total_uncompressed_size
        dictionary = part.data_page_offset - (part.dictionary_page_offset or part.data_page_offset)
        unpacked = dictionary * size / max(part.total_compressed_size, 1)
        longest = max(longest, unpacked, size / max(part.num_values, 1))
    return max(1, min(BATCH, int(BATCH_BYTES / longest)))


class HubSource(IndexedSource):
    """One split of a dataset of the Hugging Face hub: `OWNER/NAME` or `OWNER/NAME:SPLIT`."""

    def __init__(self, name: str) -> None:
        self._spec = f"hf:{name}"
        self._dataset = _load_dataset(name)
        self._columns = find_columns(self._spec, self._dataset.features.arrow_schema)
        files = [str(file["filename"]) for file in self._dataset.cache_files]
        super().__init__(open_index("hub", self._spec, self._build, files))

    def read(self, index: int) -> bytes:
        row = int(self.index.columns["row"][index])
        image = self._dataset.data.column(self._columns.image)[row].as_py()
        if self._columns.nested:
            return read_file(image["path"]) if image["bytes"] is None else bytes(image["bytes"])
        return bytes(image)

    def _build(self, _: WriteImages) -> Draft:
        rows = Rows()
        for batch in self._dataset.data.table.to_batches():
            rows.add(batch, self._columns)
        return rows.draft(self._columns, [(self._spec.rpartition("/")[2], len(self._dataset))])


def _load_dataset(spec: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("hf: needs the datasets library: pip install 'dino-vit[hub]'.") from error
    name, _, split = spec.partition(":")
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # of the library, the network or the files
        raise ValueError(
            f"hf:{spec} cannot be loaded: {brief(error, 300)}. "
            "Check the name (hf:OWNER/NAME) and the network."
        ) from error
    if not split and len(splits) == 1:
        (split,) = splits
    if split not in splits:
        ways = ", ".join(f"hf:{name}:{known}" for known in splits)
        raise ValueError(f"hf:{spec} names no split, or one that does not exist. Write one of {ways}.")
    return splits[split]


def find_columns(path: str, schema: pa.Schema) -> TableColumns:
    """Find the columns of images, names and labels, by Hugging Face's metadata or by what they are called."""
    features = _features(schema)
    types = {field.name: field.type for field in schema}
    if len(types) < len(schema):
        ((name, _),) = Counter(schema.names).most_common(1)
        raise ValueError(f"{path} has several columns called {brief(name)}; rename them.")
    usable = [name for name, type_ in types.items() if _is_image(type_)]
    marked = [name for name in usable if features.get(name, {}).get("_type") == "Image"]
    image = _pick_image(path, marked) or _pick_image(path, usable)
    if image is None:
        columns = brief(", ".join(f"{name} ({type_})" for name, type_ in types.items()), 400)
        raise ValueError(
            f"{path} has no column of images: none of {columns} is binary, or a struct with bytes in it."
        )
    label = next((name for name in LABEL_COLUMNS if name in types and name != image), None)
    if label is None:
        marked = [name for name in types if features.get(name, {}).get("_type") == "ClassLabel"]
        label = marked[0] if len(marked) == 1 else None
    classes = features.get(label, {}).get("names") if label else None
    if not isinstance(classes, list) or not pa.types.is_integer(types[label]):
        classes = None
    name = next((name for name in NAME_COLUMNS if types.get(name) == pa.string()), None)
    nested = pa.types.is_struct(types[image])
    return TableColumns(image, nested, name, label, tuple(map(str, classes)) if classes else None)


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Return what the Hugging Face libraries note of each column."""
    noted = (schema.metadata or {}).get(b"huggingface")
    try:
        found = json.loads(noted)["info"]["features"] if noted else {}
        return {name: feature for name, feature in found.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # written by something else
        return {}


def _is_image(type_: pa.DataType) -> bool:
    if pa.types.is_struct(type_) and type_.get_field_index("bytes") >= 0:
        type_ = type_.field("bytes").type
    return type_ in BINARY


def _pick_image(path: str, names: list[str]) -> str | None:
    if len(names) <= 1:
        return names[0] if names else None
    for name in IMAGE_COLUMNS:
        if name in names:
            others = [other for other in names if other != name]
            log.info("%s: using images from column %s, not from %s", path, name, ", ".join(others))
            return name
    raise ValueError(
        f"{path} has several columns of images: {brief(', '.join(names), 400)}. "
        "Rename one of them to `image`."
    )


def _number(columns: TableColumns, values: list[Any]) -> Labels:
    if columns.classes is None:
        return number_labels(values)
    count = len(columns.classes)
    wrong = next((value for value in values if value is not None and not -1 <= value < count), None)
    if wrong is not None:
        raise ValueError(f"Column {columns.label} has label {wrong}, but only 0 to {count - 1} have names.")
    numbers = [-1 if value is None else value for value in values]
    return Labels(np.array(numbers, dtype=np.int32), list(columns.classes))

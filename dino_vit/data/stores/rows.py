"""Images in tables: which columns hold images, names and labels; Parquet files, and datasets of the hub.

An image of a Parquet file is read only with its whole row group, so these are unpacked once.
"""

import json
import os
import re
import zlib
from bisect import bisect
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.text import brief, plural, progress, public
from dino_vit.data.image_set import ImageSet, Store
from dino_vit.data.index import CachedIndex, IndexContents, WriteImages, open_index
from dino_vit.data.labels import LABEL_COLUMNS, encode_labels
from dino_vit.data.paths import file_identity, short_names
from dino_vit.data.remote import PER_IMAGE_TIMEOUT_S, open_file, read_image_file

IMAGE_COLUMNS = ("image", "img", "images", "jpg", "jpeg", "png", "bytes", "data", "content")
NAME_COLUMNS = ("path", "name", "file_name", "filename", "file", "key", "__key__")
PIECE = 4096  # bytes of an image that tell it from others of its size
BATCH = 32  # rows of a Parquet file that are read together
BINARY = (pa.binary(), pa.large_binary())
# OWNER/NAME, then possibly [SPLIT] or :SPLIT, then possibly @REVISION.
_HUB_NAME = re.compile(r"(.*?)(?:[\[:]([^\[\]:/@]+)\]?)?(?:@([^@]+))?", re.DOTALL)


@dataclass(frozen=True)
class TableColumns:
    """Which columns of a table hold the images, their names and their labels."""

    image: str
    nested: bool  # bytes and path in one column, as in Hugging Face datasets
    name: str | None
    label: str | None
    classes: tuple[str, ...] | None  # of integer labels


@dataclass
class Contents:
    """The names, labels and sizes of the images in the rows of tables."""

    columns: TableColumns
    sizes: list[int] = field(default_factory=list)
    names: list[bytes | None] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch) -> pa.Array:
        """Add some rows, and return the bytes of their images."""
        columns = self.columns
        paths = batch.column(columns.name) if columns.name else pa.nulls(len(batch))
        labels = batch.column(columns.label) if columns.label else pa.nulls(len(batch))
        images = batch.column(columns.image)
        if columns.nested:
            path = images.type.get_field_index("path")  # -1 if there are two
            if path >= 0 and _is_text(images.type.field(path).type):
                paths = pc.coalesce(pc.struct_field(images, [path]), paths.cast(images.type.field(path).type))
            images = pc.struct_field(images, "bytes")
        self.names += [None if path is None else os.fsencode(path) for path in paths.to_pylist()]
        self.labels += labels.to_pylist()
        images = images.cast(pa.large_binary())
        self.sizes += pc.binary_length(images).fill_null(0).to_pylist()
        return images

    def index_contents(self, tables: Mapping[str, int]) -> IndexContents:
        """Return what goes into an index of tables, given by name and length.

        The items are ordered by name if all rows have a name of their own.
        """
        names = [name for name in self.names if name is not None]
        named = len(set(names)) == len(self.names)
        if not named:
            titles = zip(short_names([*tables]), tables.values(), strict=True)
            names = [os.fsencode(f"{title}/{row:09d}") for title, count in titles for row in range(count)]
        sizes = np.array(self.sizes, np.int64)
        return IndexContents(
            names=names,
            sizes=sizes,
            labels=encode_labels(self.labels, self.columns.classes, f"column {self.columns.label}"),
            columns={"row": np.arange(len(names)), "size": sizes},
            by_name=named,
        )


def find_columns(path: str, schema: pa.Schema) -> TableColumns:
    """Find the columns of images, names and labels, by Hugging Face's metadata or by what they are called."""
    features = _features(schema)
    types = {field.name: field.type for field in schema}
    usable = [name for name, type_ in types.items() if _is_image(type_)]
    marked = [name for name in usable if features.get(name, {}).get("_type") == "Image"]
    image = _pick_image(path, marked) or _pick_image(path, usable)
    if image is None:
        columns = brief(", ".join(f"{name} ({type_})" for name, type_ in types.items()), 400)
        raise ValueError(f"{path} has no column of images: none of {columns} is binary or has bytes.")
    label = next((name for name in LABEL_COLUMNS if name in types and name != image), None)
    if label is None:
        marked = [name for name in types if features.get(name, {}).get("_type") == "ClassLabel"]
        label = marked[0] if len(marked) == 1 else None
    classes = None
    if label:
        feature, type_ = features.get(label, {}), types[label]
        if pa.types.is_list(type_) and isinstance(feature.get("feature"), dict):  # several labels an image
            feature, type_ = feature["feature"], type_.value_type
        classes = feature.get("names") if pa.types.is_integer(type_) else None
    if not isinstance(classes, list):
        classes = None
    name = next((name for name in NAME_COLUMNS if name in types and _is_text(types[name])), None)
    nested = pa.types.is_struct(types[image])
    return TableColumns(image, nested, name, label, tuple(map(str, classes)) if classes else None)


def _is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Return what the Hugging Face libraries note of each column."""
    noted = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(noted)["info"]["features"] if noted else {}
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
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
        f"{path} has several columns of images: {brief(', '.join(names), 400)}. Rename one to `image`."
    )


def holds_paths(table: pa.Table, columns: TableColumns) -> bool:
    """Tell whether some images of a table are files elsewhere, which may be replaced without a trace."""
    images = table.column(columns.image)
    if not columns.nested or images.type.get_field_index("path") < 0:
        return False
    data, paths = (pc.struct_field(images, name) for name in ("bytes", "path"))
    return bool(pc.any(pc.and_(pc.is_null(data), pc.is_valid(paths))).as_py())


class Rows(Store):
    """Images in a column of Arrow tables, in the rows that an index or an array has, or unpacked into it."""

    def __init__(
        self, index: CachedIndex | NDArray[Any], column: str = "", tables: Sequence[Any] = ()
    ) -> None:
        self.index, self.column, self.tables = index, column, tables
        self.rows = index.rows["row"] if isinstance(index, CachedIndex) else index
        # Arrow looks for a row of a table in one chunk after another.
        columns = [table.column(column) for table in tables]
        self.chunks = [chunk for each in columns for chunk in each.chunks]
        if isinstance(index, CachedIndex) and not tables:
            self.chunks = [_unpacked(index)]
        self.starts = [0, *accumulate(map(len, self.chunks))]

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.index, self.column, self.tables)

    def _image(self, row: int) -> tuple[pa.Buffer | None, str | None]:
        """Return the bytes of an image, or without them the path of its file."""
        at = int(self.rows[row])
        chunk = bisect(self.starts, at) - 1
        value = self.chunks[chunk][at - self.starts[chunk]]
        if not value.is_valid:
            return None, None
        if not pa.types.is_struct(value.type):
            return value.as_buffer(), None
        path = value["path"].as_py() if value.type.get_field_index("path") >= 0 else None
        return value["bytes"].as_buffer(), path

    def read(self, row: int) -> bytes:
        data, path = self._image(row)
        if data is None and path:
            return read_image_file(path, PER_IMAGE_TIMEOUT_S)
        return b"" if data is None else data.to_pybytes()

    def origins(self, rows: Iterable[int]) -> list[Hashable]:
        """Return sizes, and checksums of a piece from the middle on, where images differ; of files which."""
        images = map(self._image, rows)
        return [_piece(data) if data or not path else file_identity(path) for data, path in images]


def _unpacked(index: CachedIndex) -> pa.Array:
    """Return the unpacked images as a column."""
    sizes = np.empty(len(index), np.int64)
    sizes[index.rows["row"]] = index.rows["size"]
    offsets = pa.py_buffer(np.concatenate([[0], np.cumsum(sizes)]))
    return pa.Array.from_buffers(pa.large_binary(), len(sizes), [None, offsets, index.images])


def _piece(data: pa.Buffer | None) -> Hashable:
    size = 0 if data is None else data.size
    return size, zlib.crc32(data.slice(size // 2, min(PIECE, size - size // 2))) if data else 0


def open_parquet(spec: str, files: Sequence[str]) -> ImageSet:
    """Open the images in Parquet files, unpacked into the index."""
    index = open_index("parquet", spec, partial(_unpack, public(spec), files), files)
    return index.image_set(Rows(index), index.stamp)


def _unpack(spec: str, files: Sequence[str], write_images: WriteImages, _: object) -> IndexContents:
    rows: Contents | None = None
    tables = dict.fromkeys(files, 0)
    with progress(f"Unpacking {spec}") as advance:
        for path in files:
            for columns, batch in _read_batches(path):
                rows = rows or Contents(columns)
                if columns != rows.columns:
                    raise ValueError(f"{public(path)} has different columns from {public(files[0])}")
                write_images(b"".join(filter(None, rows.add(batch).to_pylist())))
                tables[path] += len(batch)
                advance(len(batch))
    if not rows or not any(rows.sizes):
        raise ValueError(f"{spec} has no image bytes, perhaps only paths; give the folder of the images")
    return rows.index_contents(tables)


def _read_batches(path: str) -> Iterator[tuple[TableColumns, pa.RecordBatch]]:
    """Yield the rows of a file, some at a time: their images, names and labels."""
    try:
        with open_file(path) as file:
            table = pq.ParquetFile(file)
            columns = find_columns(public(path), table.schema_arrow)
            image = columns.image
            read = [f"{image}.bytes", f"{image}.path"] if columns.nested else [image]
            read += filter(None, (columns.name, columns.label))
            for batch in table.iter_batches(BATCH, columns=read):
                yield columns, batch
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{public(path)} is damaged or not a Parquet file: {brief(error, 300)}") from error


def open_hub(name: str) -> ImageSet:
    """Open a dataset of the Hugging Face hub, all its splits or one.

    Its name is `OWNER/NAME`, `OWNER/NAME/CONFIGURATION[SPLIT]@REVISION` or anything between.
    """
    spec, splits = f"hf:{name}", _load_splits(name)
    first = next(iter(splits.values()))  # `datasets` refuses splits with other columns
    columns = find_columns(spec, first.features.arrow_schema)
    files = [str(file["filename"]) for data in splits.values() for file in data.cache_files]
    index = open_index("hub", spec, lambda *_: _hub_contents(spec, splits, columns), files)
    tables = [split.data for split in splits.values()]
    images = index.image_set(Rows(index, columns.image, tables), index.stamp)
    elsewhere = any(holds_paths(data.data.table, columns) for data in splits.values())
    return replace(images, stamp=None) if elsewhere else images


def open_dataset(dataset: Any) -> ImageSet:
    """Open the rows of a Hugging Face `Dataset`, their images as they are stored."""
    if dataset.format["type"] == "custom":
        log.warning("the transform of the Dataset is not applied: its images are read as they are stored")
    columns, rows = find_columns("the Dataset", dataset.features.arrow_schema), dataset.with_format(None)
    order = dataset._indices
    indices = np.arange(len(rows)) if order is None else order.column(0).to_numpy()
    targets = list(rows[columns.label]) if columns.label else [None] * len(rows)
    return ImageSet(
        store=Rows(indices, columns.image, [dataset.data]),
        rows=range(len(rows)),
        names=list(map(str, rows[columns.name])).__getitem__ if columns.name else str,
        labels=encode_labels(targets, columns.classes, "the Dataset"),
        # Of the rows and of all that was done with them; files that they name can change.
        fingerprint=dataset._fingerprint,
        stamp=None if holds_paths(dataset.data.table, columns) else "",
    )


def _hub_contents(spec: str, splits: Mapping[str, Any], columns: TableColumns) -> IndexContents:
    rows, counts = Contents(columns), {split: len(data) for split, data in splits.items()}
    for data in splits.values():
        for batch in data.data.table.to_batches():
            rows.add(batch)
    if len(counts) > 1:  # named as in folders
        folders = [f"{split}/".encode() for split, count in counts.items() for _ in range(count)]
        numbers = (number for count in counts.values() for number in range(count))
        rows.names = [
            folder + (b"%09d" % number if name is None else name)
            for folder, number, name in zip(folders, numbers, rows.names, strict=True)
        ]
    return rows.index_contents(counts if len(counts) > 1 else {spec: len(rows.sizes)})


def _load_splits(spec: str) -> dict[str, Any]:
    """Return the chosen splits of a dataset by name, of which no other is prepared; say what was chosen."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("hf: needs the datasets library: pip install datasets") from error
    match = _HUB_NAME.fullmatch(spec)
    assert match, "the first group takes any text"
    path, split, revision = match.groups()
    name, configuration = path, None
    if path.count("/") > 1 and not os.path.isabs(path) and not os.path.isdir(path):
        owner, title, configuration = path.split("/", 2)
        name = f"{owner}/{title}"
    if not name:
        raise ValueError(f"hf:{spec} names no data set: write hf:OWNER/NAME")
    try:
        builder = datasets.load_dataset_builder(name, configuration, revision=revision)
        files = {str(key): list(urls) for key, urls in builder.config.data_files.items()}
        if split is None or split in files:
            chosen = {key: urls for key, urls in files.items() if split in (None, key)}
            splits = datasets.load_dataset(name, configuration, data_files=chosen, revision=revision)
    except Exception as error:  # of the library, the network or the files
        raise ValueError(
            f"hf:{spec} cannot be loaded: {brief(error, 300)}. Check the name (hf:OWNER/NAME, or in full "
            "hf:OWNER/NAME/CONFIGURATION[SPLIT]@REVISION) and the network."
        ) from error
    if split not in (None, *files):
        raise ValueError(f"hf:{spec}: {path} has no split {split}, but {', '.join(files)}")
    sizes = ", ".join(f"{key} ({plural(len(data), 'image')})" for key, data in splits.items())
    log.info("hf:%s: configuration %s, %s", spec, builder.config.name, sizes)
    return {str(key): data for key, data in splits.items()}

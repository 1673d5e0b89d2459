"""The index of a source: a table with a row for each image, in Arrow files that processes map into memory.

Rows are ordered by shard, and in each by name; a folder is one shard. There are two kinds:

- `CachedIndex`: one file in a cache folder (DINO_VIT_CACHE, or dino-vit below XDG_CACHE_HOME or ~/.cache). It
  is built once, and again when the source has other files, sizes or times (`open_index`). It may be deleted
  while no process uses it. A source whose images cannot be read at random (Parquet) unpacks them into it:
  images, if unpacked | padding | rows: an Arrow file | where the rows start
- `Catalogue` (`data/catalogue.py`): a file for each shard, beside it, and one that lists them.
"""

import fcntl
import hashlib
import json
import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.cache import cache_folder, note_use
from dino_vit.core.storage import StorageError, replacing
from dino_vit.core.text import brief, printable, public
from dino_vit.data.image_set import ImageSet, Store
from dino_vit.data.labels import Column, Labels, folder_columns, to_bits
from dino_vit.data.remote import UNKNOWN, file_signatures, is_url

TRAILER = struct.Struct("<Q")
ALIGNMENT = 64  # of the rows in the file, so that their columns are mapped without a copy
# A file written less than these ns before the index may be written again without a change of its time.
SETTLED = 2_000_000_000
VERSION = 14  # of what an index holds


class Index(ABC):
    """The rows of images; pickled as the path of its file."""

    metadata: dict[str, Any]
    starts: NDArray[np.int64]  # (shards + 1,), where the rows of each begin

    def __len__(self) -> int:
        return int(self.starts[-1])

    @abstractmethod
    def columns(self, shard: int) -> tuple[Mapping[str, Any], int]:
        """Return columns that have the rows of a shard, and the row with which they begin."""

    def locate(self, row: int) -> tuple[int, Mapping[str, Any], int]:
        """Return the shard of a row, columns that have the row, and its place in these."""
        shard = int(self.starts.searchsorted(row, side="right")) - 1
        columns, first = self.columns(shard)
        return shard, columns, row - first

    @abstractmethod
    def take(self, column: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values of some rows."""

    def name(self, row: int) -> str:
        """Return the name as the folder or archive has it: to read the image, not to show it."""
        _, columns, at = self.locate(row)
        return os.fsdecode(columns["name"][at].as_py())

    def image_set(self, store: Store, stamp: str | None) -> ImageSet:
        """Return the images that have the rows of this index."""
        names, sets = tuple(map(printable, self.metadata["labels"])), self.metadata["sets"]
        splits = tuple(map(printable, self.metadata["splits"]))
        bits = None if sets is None else to_bits(sets, len(names))
        return ImageSet(
            store=store,
            rows=range(len(self)),
            names=self.name,
            labels=Labels(partial(self.take, "label"), names, bits, not self.metadata["stated"]),
            splits=Column(partial(self.take, "split"), splits),
            fingerprint=self.metadata["fingerprint"],
            stamp=stamp,
        )


@dataclass(frozen=True, kw_only=True)
class IndexContents:
    """What goes into an index: names and sizes make the fingerprint."""

    names: Sequence[bytes]
    sizes: NDArray[np.int64]
    labels: Labels | None = None  # None: the first-level folders of the names
    folders: Sequence[bytes] | None = None  # paths whose folders are labels and splits; None: the names
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    counts: Sequence[int] | None = None  # of the rows in each shard; None: all are in one
    by_name: bool = True  # order the rows of a shard by the bytes of their names

    def rows(self, **metadata: Any) -> pa.RecordBatch:
        """Return the rows in their final order."""
        counts, order = [len(self.names)] if self.counts is None else self.counts, list[int]()
        for count in counts:
            part = range(len(order), len(order) + count)
            order += sorted(part, key=self.names.__getitem__) if self.by_name else part
        rows = np.array(order, dtype=np.int64)
        names = [self.names[row] for row in order]
        paths = self.names if self.folders is None else self.folders
        shown = [os.fsencode(public(os.fsdecode(path))) if b"://" in path else path for path in paths]
        labels, splits = folder_columns(shown)
        labels = self.labels or labels
        arrays = {"name": bytes_to_arrow(names), "label": to_arrow(labels.codes(rows))}
        arrays |= {"split": to_arrow(splits.codes(rows))}
        arrays |= {name: to_arrow(column[rows]) for name, column in self.columns.items()}
        metadata |= label_facts(labels, splits) | {"stated": self.labels is not None}
        metadata |= {"fingerprint": fingerprint_of(names, self.sizes[rows]), "counts": [*counts]}
        return pa.record_batch(arrays, metadata={"dino_vit": json.dumps(metadata)})


def label_facts(labels: Labels, splits: Column) -> dict[str, Any]:
    """Return what codes of labels and splits mean, as an index keeps it."""
    sets = None if labels.sets is None else [np.flatnonzero(each).tolist() for each in labels.sets]
    return {"labels": list(labels.names), "sets": sets, "splits": list(splits.names)}


def fingerprint_of(names: Sequence[bytes], sizes: NDArray[np.int64]) -> str:
    digest = hashlib.sha256(b"".join(names))
    digest.update(np.cumsum([len(name) for name in names], dtype=np.int64).tobytes())
    digest.update(sizes.tobytes())
    return f"images-{len(names)}-{digest.hexdigest()[:16]}"


WriteImages = Callable[[bytes | memoryview], object]
# Build an index, given a function that writes images, and the signatures of the files.
Build = Callable[[WriteImages, NDArray[np.int64]], IndexContents]


# pyarrow's own conversions from NumPy and lists import pandas where it is installed: half a second and more.


def bytes_to_arrow(values: Sequence[bytes]) -> pa.Array:
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def to_arrow(values: NDArray[Any]) -> pa.Array:
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


class CachedIndex(Index):
    """An index in one file, with unpacked images if there are some."""

    # Only where the index was opened, not where it was unpickled.
    file_signatures: NDArray[np.int64]
    stamp: str | None  # a digest of the files; None if their changes cannot be detected

    def __init__(self, data: pa.Buffer, path: Path) -> None:
        self.path = path
        end = data.size - TRAILER.size
        (start,) = TRAILER.unpack(data[max(end, 0) :])
        rows = pa.ipc.open_file(data[start:end]).get_batch(0)
        self.rows: dict[str, Any] = {name: np.from_dlpack(rows[name]) for name in rows.schema.names[1:]}
        self.rows["name"] = rows["name"]
        self.metadata = json.loads(rows.schema.metadata[b"dino_vit"])
        self.starts = np.cumsum([0, *self.metadata["counts"]])
        self.images = data[:start]
        note_use(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.metadata["began"])

    def columns(self, shard: int) -> tuple[Mapping[str, Any], int]:
        return self.rows, 0  # those of all shards

    def take(self, column: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        return self.rows[column].take(rows)


def open_index(
    kind: str,
    spec: str,
    build: Build,
    files: Sequence[str],
    signatures: NDArray[np.int64] | None = None,
) -> CachedIndex:
    """Return the index of a source. The first process that asks builds it, and the others wait.

    `files` are those that the source has now. Without their `signatures` each is looked at.
    """
    began = time.time_ns()  # before anything is read, so that a change meanwhile is noticed next time
    with indexing(spec):
        signatures = file_signatures(files) if signatures is None else signatures
    paths = [path if is_url(path) else os.path.abspath(path) for path in files]
    stamp = hashlib.sha256(os.fsencode("\0".join(paths)) + signatures.tobytes()).hexdigest()
    location = spec if is_url(spec) else os.path.abspath(spec)
    key = hashlib.sha256(os.fsencode(f"{kind}\0{location}\0{VERSION}")).hexdigest()[:24]
    path = cache_folder() / f"{kind}-{key}.arrow"
    newest = signatures[:, 2].max(initial=0)

    def load_current() -> CachedIndex | None:
        index = _load(path)
        if not index or not files or index.metadata["stamp"] != stamp:
            return None
        return index if newest < index.metadata["began"] - SETTLED else None

    index = load_current()
    if index is None:
        with _lock(path, spec):
            index = load_current()
            if index is None:
                with replacing(path) as partial_path, partial_path.open("wb") as file, indexing(spec):
                    _write(file, build(file.write, signatures).rows(began=began, stamp=stamp))
                index = _load(path)
    if index is None:
        raise StorageError(f"{path} cannot be read back")
    index.file_signatures = signatures
    # Of some remote files no server tells whether they changed; they may even be as long.
    undetected = ((signatures[:, 0] >= 0) & (signatures[:, 1] == UNKNOWN)).any()
    index.stamp = None if undetected else stamp
    return index


@contextmanager
def indexing(spec: str) -> Iterator[None]:
    """Say what cannot be indexed."""
    spec = public(spec)
    try:
        yield
    except OSError as error:  # of the source, or of a full disk
        raise ValueError(f"{spec} cannot be indexed: {brief(error, 300)}") from error


def _load(path: Path) -> CachedIndex | None:
    """Map an index into memory, unless it is missing or damaged."""
    try:
        with pa.memory_map(str(path)) as file:
            return CachedIndex(file.read_buffer(), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        log.warning("%s is damaged and will be rebuilt: %s", path, error)
        return None


def _reopen(path: Path, began: int) -> CachedIndex:
    index = _load(path)
    if index is None or index.metadata["began"] != began:
        raise ValueError(f"{path} was rebuilt while a process that reads it was starting; start again")
    return index


def _write(file: BinaryIO, rows: pa.RecordBatch) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
    start = file.tell()
    with pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_batch(rows)
    file.write(TRAILER.pack(start))


@contextmanager
def _lock(path: Path, spec: str) -> Iterator[None]:
    """Let one process build an index at a time; the system releases the lock of a process that dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("wb")
    except OSError as error:
        text = f"the index of {public(spec)} cannot be written: {error}"
        raise StorageError(f"{text}. Let DINO_VIT_CACHE be a folder that can be written") from error
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: waiting for another process that builds its index", public(spec))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # as Lustre without its option -o flock; what is built twice is the same
            pass
        yield

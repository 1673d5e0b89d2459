"""The index of a source: name and label of each item, in an Arrow file that all processes map into memory.

It is built once, in a cache folder (DINO_VIT_CACHE, or dino-vit below XDG_CACHE_HOME or ~/.cache), and again
when what it was built from has changed. It may be deleted at any time. A source whose images cannot be read
at random (Parquet, .npz) unpacks them into the same file:

    images: an Arrow file, or nothing | padding | items: an Arrow file | end of images, checksum of items
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dino_vit.core.storage import StorageError, replacing
from dino_vit.data.labels import Labels
from dino_vit.data.sources.files import stamps

log = logging.getLogger("dino_vit")

TRAILER = struct.Struct("<QI")
ALIGNMENT = 64  # of the items in the file, so that their columns are mapped without a copy
# A file written less than these ns before the index may be written again without a change of its time.
SETTLED = 2_000_000_000
MEMORY_LIMIT = 2**31  # bytes of images that are unpacked into memory where no file can be written
IMAGES = pa.schema([("image", pa.large_binary())])
WriteImages = Callable[[pa.Array], None]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What goes into an index. It is rebuilt when a watched file or folder no longer has its stamp.

    Without watched files, it is rebuilt each time.
    """

    items: pa.Table
    metadata: Mapping[str, Any]
    watched: Sequence[str]
    stamps: NDArray[np.int64]


Build = Callable[[WriteImages], Draft]


def draft_items(
    *,
    names: Sequence[bytes],
    sizes: NDArray[np.int64],
    labels: Labels,
    columns: Mapping[str, NDArray[Any]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    watched: Sequence[str] = (),
    stamps: NDArray[np.int64],
) -> Draft:
    """Return the draft of items in their final order; names and sizes make the fingerprint."""
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    digest = hashlib.sha256(b"".join(names))
    digest.update(ends.tobytes())
    digest.update(np.ascontiguousarray(sizes, dtype=np.int64).tobytes())
    fingerprint = f"images-{len(names)}-{digest.hexdigest()[:16]}"
    arrays = {"name": binary_array(names), "label": _to_arrow(labels.numbers)}
    arrays |= {name: _to_arrow(column) for name, column in (columns or {}).items()}
    return Draft(
        items=pa.table(arrays),
        metadata={"fingerprint": fingerprint, "classes": labels.classes, **(metadata or {})},
        watched=watched,
        stamps=stamps,
    )


# pyarrow's own conversions from and to NumPy import pandas where it is installed, which takes up to a second.


def binary_array(values: Sequence[bytes]) -> pa.Array:
    """Return bytes as an Arrow array."""
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def _to_arrow(values: NDArray[Any]) -> pa.Array:
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _to_numpy(array: pa.Array) -> NDArray[Any]:
    dtype = np.dtype(str(array.type))
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


class Index:
    """The columns of the items, their metadata and unpacked images.

    It is pickled as the path of its file, so that no process gets a copy.
    """

    def __init__(self, items: pa.Table, images: pa.Table | None, file: tuple[Path, int] | None) -> None:
        self._items, self._images, self._file = items, images, file
        self.metadata: dict[str, Any] = json.loads(items.schema.metadata[b"dino_vit"])
        self.columns: dict[str, NDArray[Any]] = {
            name: _to_numpy(items[name].chunk(0)) for name in items.column_names if name != "name"
        }
        self.names = items["name"].chunk(0)  # one chunk is written; combining would copy it
        self.images: pa.ChunkedArray = None if images is None else images["image"]

    @property
    def stamps(self) -> NDArray[np.int64]:
        return np.array(self.metadata["stamps"], dtype=np.int64).reshape(-1, 3)

    def __reduce__(self) -> tuple[Callable[..., Index], tuple[object, ...]]:
        if self._file:
            return _reopen, self._file
        return Index, (self._items, self._images, None)


class IndexedSource:
    """A source with an index; subclasses read the items."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def __len__(self) -> int:
        return len(self.index.names)

    def name(self, index: int) -> str:
        return os.fsdecode(self.index.names[self._row(index)].as_py())

    def label(self, index: int) -> int | None:
        label = int(self.index.columns["label"][self._row(index)])
        return None if label < 0 else label

    @property
    def classes(self) -> list[str]:
        return list(self.index.metadata["classes"])

    @property
    def fingerprint(self) -> str:
        return str(self.index.metadata["fingerprint"])

    def _row(self, index: int) -> int:
        return range(len(self))[index]


def order_by_name(names: Sequence[bytes]) -> list[int]:
    """Return the order of items by the bytes of their names."""
    return sorted(range(len(names)), key=names.__getitem__)


def cache_folder() -> Path:
    """Return the folder of indexes and other files that can be made again."""
    given = os.environ.get("DINO_VIT_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dino-vit"


def open_index(kind: str, spec: str, build: Build, files: Sequence[str] | None = None) -> Index:
    """Return the index of a source. The first process that asks builds it, and the others wait.

    `build` gets a function that writes images. `files` are those that the source has now, if they can change
    without a change to what is watched.
    """
    location = spec if "://" in spec else os.path.abspath(spec)
    key = hashlib.sha256(os.fsencode(f"{kind}\0{location}")).hexdigest()[:24]
    path = cache_folder() / f"{kind}-{key}.arrow"
    index = _load_current(path, files)
    if index is not None:
        return index
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path, spec):
            index = _load_current(path, files)
            if index is None:
                _write(path, spec, build)
                index = _load(path)
    except (StorageError, OSError) as error:
        log.warning("%s: the index is kept in memory, as it cannot be written to %s: %s", spec, path, error)
    return _build_in_memory(spec, build) if index is None else index


def _load_current(path: Path, files: Sequence[str] | None) -> Index | None:
    """Return the index in a file, unless something has changed since it was built."""
    index = _load(path)
    if index is None or not index.metadata["watched"]:
        return None
    watched = index.metadata["watched"]
    if files is not None and list(files) != watched:
        return None
    settled = index.stamps[:, 2].max() < index.metadata["began"] - SETTLED
    return index if settled and np.array_equal(index.stamps, stamps(watched)) else None


def _load(path: Path) -> Index | None:
    """Map an index into memory, unless it is missing, truncated or damaged."""
    try:
        with pa.memory_map(str(path)) as file:
            mapped = file.read_buffer()
    except (OSError, ValueError):  # ValueError: an empty file
        return None
    try:
        return _parse(path, mapped)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, struct.error) as error:
        log.warning("%s is damaged and will be rebuilt: %s", path, error)
        return None


def _parse(path: Path, mapped: pa.Buffer) -> Index:
    end_of_items = mapped.size - TRAILER.size
    end_of_images, checksum = TRAILER.unpack(mapped[max(end_of_items, 0) :])
    start = end_of_images + -end_of_images % ALIGNMENT
    if start > end_of_items:
        raise ValueError("it is truncated")
    items = mapped[start:end_of_items]
    # The images may be terabytes, so they have no checksum.
    if zlib.crc32(items) != checksum:
        raise ValueError("its checksum is wrong")
    images = pa.ipc.open_file(mapped[:end_of_images]).read_all() if end_of_images else None
    return Index(pa.ipc.open_file(items).read_all(), images, (path, checksum))


def _reopen(path: Path, checksum: int) -> Index:
    index = _load(path)
    if index is None or index._file != (path, checksum):
        raise ValueError(f"{path} was rebuilt while a process that reads it was starting; start again")
    return index


def _write(path: Path, spec: str, build: Build) -> None:
    with replacing(path) as partial, partial.open("wb") as file:
        writer = None

        def write_images(images: pa.Array) -> None:
            nonlocal writer
            try:
                writer = writer or pa.ipc.new_file(file, IMAGES)
                writer.write_batch(pa.record_batch([images], schema=IMAGES))
            except OSError as error:  # the cache is full; not an error of the source
                raise StorageError(str(error)) from error

        items = _build_items(spec, build, write_images)
        if writer is not None:
            writer.close()
        end_of_images = file.tell()
        file.write(bytes(-end_of_images % ALIGNMENT))
        with pa.BufferOutputStream() as stream:
            with pa.ipc.new_file(stream, items.schema) as items_writer:
                columns = [column.chunk(0) for column in items.columns]
                items_writer.write_batch(pa.record_batch(columns, schema=items.schema))
            content = stream.getvalue()
        file.write(content)
        file.write(TRAILER.pack(end_of_images, zlib.crc32(content)))


def _build_in_memory(spec: str, build: Build) -> Index:
    batches: list[pa.RecordBatch] = []

    def keep_images(images: pa.Array) -> None:
        batches.append(pa.record_batch([images], schema=IMAGES))
        if sum(batch.nbytes for batch in batches) > MEMORY_LIMIT:
            raise ValueError(
                f"{spec} needs over {MEMORY_LIMIT >> 30} GiB in {cache_folder()}, which cannot be written. "
                f"Free some space, or set DINO_VIT_CACHE to another folder."
            )

    items = _build_items(spec, build, keep_images)
    return Index(items, pa.Table.from_batches(batches, IMAGES) if batches else None, None)


def _build_items(spec: str, build: Build, write_images: WriteImages) -> pa.Table:
    began = time.time_ns()
    try:
        draft = build(write_images)
    except StorageError:
        raise
    except OSError as error:
        raise ValueError(f"{spec} cannot be read: {error}") from error
    metadata = {
        **draft.metadata,
        "began": began,
        "watched": list(draft.watched),
        "stamps": draft.stamps.tolist(),
    }
    return draft.items.replace_schema_metadata({"dino_vit": json.dumps(metadata)})


@contextmanager
def _lock(path: Path, spec: str) -> Iterator[None]:
    """Let one process build an index at a time; the system releases the lock of a process that dies."""
    try:
        import fcntl
    except ImportError:  # on Windows each process builds, and the last one's file stays
        yield
        return
    with path.with_suffix(".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: waiting for another process that builds its index", spec)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield

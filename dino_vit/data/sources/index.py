"""The index of a source: name and label of each item, in an Arrow file that all processes map into memory.

It is built once, in a cache folder (DINO_VIT_CACHE, or dino-vit below XDG_CACHE_HOME or ~/.cache), and again
when what it was built from has changed. It may be deleted while no process uses it. A source whose images
cannot be read at random (Parquet) unpacks them into the same file:

    images, if unpacked | padding | items: an Arrow file | where the items start

An index is that of a kind and a location, and current as long as the source has the same files, with the same
sizes and times (`open_index`).
"""

import fcntl
import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from dino_vit.core import log
from dino_vit.core.cache import bound, keep
from dino_vit.core.distributed import share_work
from dino_vit.core.storage import StorageError, replacing
from dino_vit.core.text import brief, numbered, numbers_apart, printable, public, public_names
from dino_vit.data.labels import Labels, below_shared, find_splits, folder_labels
from dino_vit.data.sources.files import UNKNOWN, file_signatures, is_url

TRAILER = struct.Struct("<Q")
ALIGNMENT = 64  # of the items in the file, so that their columns are mapped without a copy
# A file written less than these ns before the index may be written again without a change of its time.
SETTLED = 2_000_000_000
VERSION = 7  # of what an index holds
FEATURES, SHARDS = "features", "shards"  # folders of other files in that of the indexes


@dataclass(frozen=True, kw_only=True)
class IndexContents:
    """What goes into an index: names and sizes make the fingerprint."""

    names: Sequence[bytes]
    sizes: ArrayLike | None = None  # None: the items are the files
    labels: Labels | None = None  # None: the first-level folders of the names
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    by_name: bool = True  # order the items by the bytes of their names

    def items(self, of_files: NDArray[np.int64], **metadata: Any) -> pa.RecordBatch:
        """Return the items in their final order; `of_files` are the sizes of the files."""
        order = list(range(len(self.names)))
        if self.by_name:
            order.sort(key=self.names.__getitem__)
        names = [self.names[row] for row in order]
        rows = np.array(order, dtype=np.int64)  # NumPy would convert a list at each use
        sizes = np.asarray(of_files if self.sizes is None else self.sizes, dtype=np.int64)
        shown = [os.fsencode(public(os.fsdecode(name))) if b"://" in name else name for name in names]
        labels = (
            self.labels._replace(numbers=self.labels.numbers[rows]) if self.labels else folder_labels(shown)
        )
        arrays = {"name": bytes_to_arrow(names), "label": to_arrow(labels.numbers)}
        arrays |= {name: to_arrow(column[rows]) for name, column in self.columns.items()}
        metadata |= {
            "fingerprint": fingerprint_of(names, sizes[rows]),
            "classes": labels.classes,
            "splits": find_splits(below_shared(shown)),
        }
        return pa.record_batch(arrays, metadata={"dino_vit": json.dumps(metadata)})


def fingerprint_of(names: Sequence[bytes], sizes: NDArray[np.int64]) -> str:
    digest = hashlib.sha256(b"".join(names))
    digest.update(np.cumsum([len(name) for name in names], dtype=np.int64).tobytes())
    digest.update(sizes.tobytes())
    return f"images-{len(names)}-{digest.hexdigest()[:16]}"


WriteImages = Callable[[bytes | memoryview], object]
Build = Callable[[WriteImages], IndexContents]


# pyarrow's own conversions from NumPy and lists import pandas where it is installed: half a second and more.


def bytes_to_arrow(values: Sequence[bytes]) -> pa.Array:
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def to_arrow(values: NDArray[Any]) -> pa.Array:
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


class Index:
    """The columns of the items, their metadata and unpacked images; pickled as the path of its file."""

    file_signatures: NDArray[np.int64]  # only where the index was opened, not where it was unpickled

    def __init__(self, data: pa.Buffer, path: Path) -> None:
        self.path = path
        end = data.size - TRAILER.size
        (start,) = TRAILER.unpack(data[max(end, 0) :])
        items = pa.ipc.open_file(data[start:end]).get_batch(0)
        self.names = items["name"]
        self.columns = {name: np.from_dlpack(items[name]) for name in items.schema.names if name != "name"}
        self.metadata: dict[str, Any] = json.loads(items.schema.metadata[b"dino_vit"])
        self.images = data[:start]
        keep(path, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.metadata["began"])


class IndexedSource:
    """A source with an index; subclasses read the items."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.classes = list(map(printable, public_names(index.metadata["classes"])))
        splits = index.metadata["splits"].items()
        self.splits = {printable(name): range(*indices) for name, indices in splits}
        self.fingerprint = str(index.metadata["fingerprint"])
        # Of some remote files no server tells whether they changed; they may even be as long.
        size, version, _ = index.file_signatures.T
        told = not ((size >= 0) & (version == UNKNOWN)).any()
        self.stamp = str(index.metadata["stamp"]) if told else None
        self._numbers = _numbers_apart(index.names)

    def __len__(self) -> int:
        return len(self.index.names)

    def name(self, index: int) -> str:
        return printable(self.public_name(index))

    def public_name(self, index: int) -> str:
        """Return the name without secrets, of any characters."""
        return numbered(public(os.fsdecode(self.raw_name(index))), self._numbers.get(index))

    def full_name(self, index: int) -> str:
        return printable(os.fsdecode(self.raw_name(index)))

    def raw_name(self, index: int) -> bytes:
        """Return the name as the folder or archive has it: to read the image, not to show it."""
        return bytes(self.index.names[index].as_py())

    def label(self, index: int) -> int | None:
        label = int(self.index.columns["label"][index])
        return None if label < 0 else label


def _numbers_apart(names: pa.Array) -> dict[int, int]:
    """Return the numbers of `numbers_apart`; names without addresses are only searched for one."""
    data = names.buffers()[2] or b""
    if not (re.search(b"://", data) and re.search(b"[?#@]", data)):
        return {}
    return numbers_apart([os.fsdecode(name) for name in names.to_pylist()])


def cache_folder() -> Path:
    """Return the folder of indexes and other files that can be made again."""
    if given := os.environ.get("DINO_VIT_CACHE"):
        return below_home(given)
    return below_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dino-vit"


def below_home(path: str) -> Path:
    """Return the path of a cache, its ~ replaced; a user in a container may have no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        text = f"{path} is in a home folder that does not exist"
        raise ValueError(f"{text}; give another, for all caches by the variable DINO_VIT_CACHE") from error


def bound_caches(gigabytes: float, features: Path | None = None, spared: Path | None = None) -> None:
    """Delete indexes and features, used longest ago, until all fit; and copies of shards left incomplete."""
    folder = cache_folder()
    bound([folder, features or folder / FEATURES, folder / SHARDS], gigabytes, spared)


def open_index(
    kind: str,
    spec: str,
    build: Build,
    files: Sequence[str],
    signatures: NDArray[np.int64] | None = None,
    prepare: Callable[[], object] = lambda: None,
) -> Index:
    """Return the index of a source. The first process that asks builds it, and the others wait.

    `build` gets a function that writes images. `files` are those that the source has now. Without their
    `signatures` each is looked at. If one process needs to build it, all first call `prepare`.
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

    def load_current() -> Index | None:
        index = _load(path)
        if not index or not files or index.metadata["stamp"] != stamp:
            return None
        return index if newest < index.metadata["began"] - SETTLED else None

    index = load_current()
    if any(share_work(lambda _: [index is None], [])):
        prepare()
    if index is None:
        with _lock(path, spec):
            index = load_current()
            if index is None:
                with replacing(path) as partial_path, partial_path.open("wb") as file, indexing(spec):
                    _write(file, build(file.write).items(signatures[:, 0], began=began, stamp=stamp))
                index = _load(path)
    if index is None:
        raise StorageError(f"{path} cannot be read back")
    index.file_signatures = signatures
    return index


@contextmanager
def indexing(spec: str) -> Iterator[None]:
    """Say what cannot be indexed."""
    spec = public(spec)
    try:
        yield
    except OSError as error:  # of the source, or of a full disk
        raise ValueError(f"{spec} cannot be indexed: {brief(error, 300)}") from error


def _load(path: Path) -> Index | None:
    """Map an index into memory, unless it is missing or damaged."""
    try:
        with pa.memory_map(str(path)) as file:
            return Index(file.read_buffer(), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        log.warning("%s is damaged and will be rebuilt: %s", path, error)
        return None


def _reopen(path: Path, began: int) -> Index:
    index = _load(path)
    if index is None or index.metadata["began"] != began:
        raise ValueError(f"{path} was rebuilt while a process that reads it was starting; start again")
    return index


def _write(file: BinaryIO, items: pa.RecordBatch) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
    start = file.tell()
    with pa.ipc.new_file(file, items.schema) as writer:
        writer.write_batch(items)
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
        except OSError as error:  # as Lustre without its option -o flock; what is built twice is the same
            log.warning("%s cannot be locked (%s); other processes may build it too", path, error.strerror)
        yield

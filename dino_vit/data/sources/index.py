"""What is known of a source's items, as columns of numbers in one file that all processes map into memory.

The file is built once, in a cache folder (DINO_VIT_CACHE, or dino-vit below XDG_CACHE_HOME or ~/.cache), and
again when what it was built from has changed. It may be deleted at any time.

    magic | column data | other columns | footer: JSON | its length and checksum | magic
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.storage import StorageError, replacing, sync
from dino_vit.data.sources.files import stamps
from dino_vit.data.sources.texts import Texts

log = logging.getLogger("dino_vit")

MAGIC = b"dino-vit index1\n"
TAIL = struct.Struct("<QI")
SETTLED = 2_000_000_000  # ns: what was written later than this before the index may be written again unseen
MEMORY = 2**31  # bytes that an index may have where it cannot be written to a file
Sink = Callable[[bytes | memoryview], object]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What goes into an index: columns, facts, and the files and folders whose change makes it void.

    Without `watched`, the index is built anew each time.
    """

    columns: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, Any]
    watched: Sequence[str] = ()
    stamps: NDArray[np.int64]


class Index:
    """Columns and facts; pickled as the path of the file, so that no process has a copy."""

    def __init__(
        self, columns: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any], file: tuple[Path, int] | None
    ) -> None:
        self.columns, self.metadata, self._file = columns, metadata, file

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def texts(self, name: str) -> Texts:
        return Texts(self[f"{name}.letters"], self[f"{name}.ends"])

    def __reduce__(self) -> tuple[Callable[..., Index], tuple[object, ...]]:
        if self._file:
            return _reopen, self._file
        return Index, (self.columns, self.metadata, None)


def _reopen(path: Path, checksum: int) -> Index:
    index = _load(path)
    if index is None or index._file != (path, checksum):
        raise ValueError(f"{path} was built anew while a process was starting that reads it; start again")
    return index


def cache_folder() -> Path:
    """Return where indices are kept."""
    given = os.environ.get("DINO_VIT_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dino-vit"


def open_index(
    kind: str, spec: str, build: Callable[[Sink], Draft], files: Sequence[str] | None = None
) -> Index:
    """Return the index of a source, built by the first process that asks, while the others wait.

    `build` gets a function that writes to the column `data`. `files` are those that the source has now, where
    that can change without a change of what was watched.
    """
    place = spec if "://" in spec else os.path.abspath(spec)
    key = hashlib.sha256(os.fsencode(f"{kind}\0{place}")).hexdigest()[:24]
    path = cache_folder() / f"{kind}-{key}.index"
    index = _load_current(path, files)
    if index is not None:
        return index
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path, spec):
            index = _load_current(path, files)
            if index is None:
                _write(path, spec, build)
                index = _load(path)
    except (StorageError, OSError) as error:
        log.warning("%s: the index is kept in memory, as it cannot be in %s: %s", spec, path.parent, error)
    return _build_in_memory(spec, build) if index is None else index


def _load_current(path: Path, files: Sequence[str] | None) -> Index | None:
    index = _load(path)
    if index is None or not len(index["watched.ends"]):
        return None
    watched = list(index.texts("watched"))
    if files is not None and list(files) != watched:
        return None
    then = index["stamps"]
    settled = then[:, 2].max() < index.metadata["began"] - SETTLED
    return index if settled and np.array_equal(then, stamps(watched)) else None


def _load(path: Path) -> Index | None:
    """Map an index, unless it is not there, torn or damaged."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # ValueError: the file is empty
        return None
    try:
        return _parse(path, mapped)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        log.warning("%s is damaged and will be built anew: %s", path, error)
        return None


def _parse(path: Path, mapped: mmap.mmap) -> Index:
    end = len(mapped) - len(MAGIC) - TAIL.size
    if end < len(MAGIC) or mapped[: len(MAGIC)] != MAGIC or mapped[-len(MAGIC) :] != MAGIC:
        raise ValueError("it is no whole index of this version")
    length, checksum = TAIL.unpack(mapped[end : end + TAIL.size])
    footer = mapped[max(end - length, 0) : end]
    if zlib.crc32(footer) != checksum:
        raise ValueError("its footer does not have the checksum that was written with it")
    known = json.loads(footer)
    columns: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape, offset, expected) in known["columns"].items():
        count = int(np.prod(shape, dtype=np.int64))
        column = np.frombuffer(mapped, dtype, count, offset) if count else np.empty(0, dtype)
        if expected is not None and zlib.crc32(column.data) != expected:
            raise ValueError(f"column {name} does not have the checksum that was written with it")
        columns[name] = column.reshape(shape)
    return Index(columns, known["about"], (path, checksum))


def _write(path: Path, spec: str, build: Callable[[Sink], Draft]) -> None:
    with replacing(path) as partial:
        with partial.open("wb") as file:
            file.write(MAGIC)
            draft, began = _build(spec, build, lambda data: _write_cache(file, data))
            size = file.tell() - len(MAGIC)
            # Of the data, which may be terabytes, the size must do.
            table: dict[str, tuple[str, list[int], int, int | None]] = {
                "data": ("|u1", [size], len(MAGIC), None)
            }
            for name, column in _all_columns(draft).items():
                file.write(bytes(-file.tell() % 64))
                whole = np.ascontiguousarray(column)
                table[name] = (
                    whole.dtype.str,
                    list(whole.shape),
                    file.tell(),
                    zlib.crc32(whole.reshape(-1).data),
                )
                file.write(whole.reshape(-1).data)
            footer = json.dumps({"columns": table, "about": {**draft.metadata, "began": began}}).encode()
            file.write(footer + TAIL.pack(len(footer), zlib.crc32(footer)) + MAGIC)
        sync(partial)


def _write_cache(file: BinaryIO, data: bytes | memoryview) -> None:
    try:
        file.write(data)
    except OSError as error:  # not to be taken for one of the source
        raise StorageError(str(error)) from error


def _build(spec: str, build: Callable[[Sink], Draft], sink: Sink) -> tuple[Draft, int]:
    began = time.time_ns()
    try:
        return build(sink), began
    except StorageError:
        raise
    except OSError as error:
        raise ValueError(f"{spec} cannot be read: {error}") from error


def _build_in_memory(spec: str, build: Callable[[Sink], Draft]) -> Index:
    data = io.BytesIO()

    def sink(piece: bytes | memoryview) -> None:
        if data.tell() + len(piece) > MEMORY:
            raise ValueError(
                f"{spec} needs more than {MEMORY >> 30} GiB of {cache_folder()}, which cannot be written. "
                f"Make room there, or set DINO_VIT_CACHE to a folder that has some."
            )
        data.write(piece)

    draft, _ = _build(spec, build, sink)
    columns = {"data": np.frombuffer(data.getbuffer(), np.uint8), **_all_columns(draft)}
    return Index(columns, draft.metadata, None)


def _all_columns(draft: Draft) -> dict[str, NDArray[Any]]:
    return {**draft.columns, **Texts.of(draft.watched).columns("watched"), "stamps": draft.stamps}


@contextmanager
def _alone(path: Path, spec: str) -> Iterator[None]:
    """Keep other processes that build the same index waiting; the system lets go when a process dies."""
    try:
        import fcntl
    except ImportError:  # on Windows each builds, and the last one's file stays
        yield
        return
    with path.with_suffix(".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: waiting for another process that builds its index", spec)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a filesystem without locks: as on Windows
            pass
        yield

"""Read files: local ones by the system's own calls, URLs by `remote.py`."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from io import BufferedReader
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.text import progress
from dino_vit.data.sources.remote import (
    MOST_REQUESTED,
    ChangedFile,
    FileSignature,
    RemoteFile,
    check_length,
    in_threads,
    is_http,
    is_url,
    remote_info,
    remote_signature,
    remotely,
    request,
    retry,
    time_limit,
)

BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
FILE_SUFFIXES = (".tar", ".zip", ".parquet", ".txt", ".csv", ".tsv")  # of no folder
UNKNOWN = -1  # version of a file, in a catalogue that was written elsewhere
OPEN_FILES = 128  # per process, well below the system's usual limit of 1024


def plain(path: str) -> str:
    """Return a local path without `file://` and `~`; other URLs as they are."""
    if path.startswith("file://"):
        return path.removeprefix("file://")
    return path if is_url(path) else os.path.expanduser(path)


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield what a pattern with `{000..010}` or `{a,b}` stands for."""
    braces = BRACES.search(pattern)
    if not braces:
        yield pattern
        return
    choices: Iterable[str] = braces[1].split(",")
    if numbers := _RANGE.fullmatch(braces[1]):
        first, last = numbers.groups()
        choices = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    start, end = pattern[: braces.start()], pattern[braces.end() :]
    for choice in choices:
        yield from expand_braces(f"{start}{choice}{end}")


def exists(path: str) -> bool:
    if not is_url(path):
        return os.path.exists(path)
    return bool(remotely(path, lambda system, inner: system.exists(inner, **time_limit(system))))


def is_folder(path: str) -> bool:
    if not is_url(path):
        return os.path.isdir(path)
    if is_http(path) and path.lower().endswith(FILE_SUFFIXES):  # else it may be read whole, for links
        return False
    return bool(remotely(path, lambda system, inner: system.isdir(inner, **time_limit(system))))


def read_file(path: str) -> bytes:
    if not is_url(path):
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    return remotely(path, lambda system, inner: system.cat_file(inner, **time_limit(system)))


def open_file(path: str, buffer: int = MOST_REQUESTED) -> BinaryIO:
    """Open a file for random access; of a remote one at least `buffer` bytes are requested at a time."""
    if not is_url(path):
        return open(path, "rb")
    size = retry(lambda: remote_info(path), path).get("size")
    if size is None:
        raise OSError(f"{path} has no known size, so it cannot be read at random")
    return BufferedReader(RemoteFile(path, int(size)), buffer)


def file_signatures(paths: Sequence[str]) -> NDArray[np.int64]:
    """Return size, version and time of change (ns, 0: unknown) of each path; size −1 if it does not exist."""
    chunks = [paths[start : start + 256] for start in range(0, len(paths), 256)]
    with progress("Looking at files", len(paths)) as advance:
        rows = in_threads(_signatures, chunks, lambda signatures: advance(len(signatures)))
    return np.concatenate([np.empty((0, 3), dtype=np.int64), *rows])


def _signatures(paths: Sequence[str]) -> NDArray[np.int64]:
    return np.array([file_signature(path) for path in paths], dtype=np.int64)


def file_signature(path: str) -> FileSignature:
    try:
        if not is_url(path):
            status = os.stat(path)
            # `cp -p`, `rsync -t` and `tar -x` set the first time back; nothing sets back the second.
            return status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return remote_signature(remote_info(path))
    except OSError:
        return -1, -1, 0


class ByteRangeReader:
    """Read ranges of bytes of files, from several threads and processes at once."""

    def __init__(self, paths: Sequence[str], file_signatures: NDArray[np.int64]) -> None:
        self.paths, self.file_signatures = paths, file_signatures
        self.is_remote = is_url(paths[0])
        self._unchanged: set[int] = set()  # remote files that were checked

    def read(self, file: int, start: int, size: int) -> bytes:
        path = self.paths[file]
        if is_url(path):
            return retry(lambda: self.request(file, start, size), path)
        opened = _opened(self, file)  # kept until the read is done: another thread may push it out
        status = os.fstat(opened.number)
        # Programs that purge disks change its times; whoever reads an archive looks at its checksums.
        if status.st_size != self.file_signatures[file, 0]:
            raise ChangedFile(path)
        # Without moving a position, so that processes can share the open file.
        within = min(size, max(0, status.st_size - start))  # a damaged archive may state any size
        return check_length(os.pread(opened.number, within, start), size, path)

    def request(self, file: int, start: int, size: int) -> bytes:
        """Read a range of a remote file by one request, after a look whether it is still the same."""
        if file not in self._unchanged:
            self.check_unchanged(file)
        return request(self.paths[file], start, size)

    def check_unchanged(self, file: int) -> None:
        """Raise if a remote file is not the one in the index."""
        info = remote_info(self.paths[file], fresh=True)
        size, version, _ = self.file_signatures[file].tolist()
        now = remote_signature(info)
        if now[0] != size or version not in (UNKNOWN, now[1]):
            raise ChangedFile(self.paths[file])
        self._unchanged.add(file)


@lru_cache(OPEN_FILES)
def _opened(reader: ByteRangeReader, file: int) -> "_Descriptor":
    return _Descriptor(reader.paths[file])


class _Descriptor:
    """An open file, closed when it is no longer used: opening one takes a request to a file server."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

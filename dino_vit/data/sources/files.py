"""Read files: local ones by the system's own calls, URLs through fsspec."""

import errno
import glob
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from dino_vit.core.progress import plural
from dino_vit.core.text import brief

T = TypeVar("T")
R = TypeVar("R")

OPEN_FILES = 128  # per reader and process, well below the system's usual limit of 1024
THREADS = 16  # they mostly wait for disks and networks
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
MAX_EXPANDED, MAX_BRACES = 1_000_000, 20  # paths of a pattern with braces


def is_url(path: str) -> bool:
    return "://" in path


def plain(path: str) -> str:
    """Return a local path without `file://` and `~`; other URLs as they are."""
    if path.startswith("file://"):
        return path.removeprefix("file://")
    return path if is_url(path) else os.path.expanduser(path)


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's filesystem and the path in it; each process has filesystems of its own."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{brief(url, 200)} cannot be reached: {error}") from error


def exists(path: str) -> bool:
    if not is_url(path):
        return os.path.exists(path)
    system, inner = filesystem(path)
    return bool(system.exists(inner))


def is_folder(path: str) -> bool:
    if not is_url(path):
        return os.path.isdir(path)
    system, inner = filesystem(path)
    return bool(system.isdir(inner))


def read_file(path: str) -> bytes:
    """Return the content of a file."""
    if not is_url(path):
        with open(path, "rb", buffering=0, opener=_open_regular) as file:
            return file.readall()
    return _remotely(path, lambda system, inner: system.cat_file(inner))


def open_file(path: str) -> BinaryIO:
    """Open a file for random access."""
    if not is_url(path):
        return open(path, "rb", opener=_open_regular)
    return _remotely(path, lambda system, inner: system.open(inner, "rb", block_size=8 * 2**20))


def _open_regular(path: str, flags: int) -> int:
    """Open a file, but no pipe or device, which may have no end or never answer."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return descriptor


def _remotely(url: str, work: Callable[[Any, str], R]) -> R:
    system, inner = filesystem(url)
    try:
        return work(system, inner)
    except OSError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise OSError(f"{url}: {error}") from error


def in_threads(
    work: Callable[[T], R], items: Sequence[T], done: Callable[[R], object] = lambda _: None
) -> list[R]:
    """Map items in threads, in order, and call `done` with each result; the first error cancels the rest."""
    results = []
    with ThreadPoolExecutor(THREADS) as pool:
        for result in pool.map(work, items):
            results.append(result)
            done(result)
    return results


def stamps(paths: Sequence[str]) -> NDArray[np.int64]:
    """Return size, version and time of change (ns, 0: unknown) of each path; size −1 if it does not exist."""
    chunks = [paths[start : start + 256] for start in range(0, len(paths), 256)]
    rows = in_threads(lambda chunk: [_stamp(path) for path in chunk], chunks)
    return np.array([stamp for row in rows for stamp in row], dtype=np.int64).reshape(-1, 3)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        if not is_url(path):
            status = os.stat(path)
            return status.st_size, status.st_mtime_ns, status.st_mtime_ns
        size, version = _remotely(path, lambda system, inner: (system.size(inner), system.ukey(inner)))
        return size or 0, zlib.crc32(str(version).encode()), 0
    except OSError:
        return -1, -1, 0


def is_pattern(path: str) -> bool:
    return bool(_BRACES.search(path) or glob.has_magic(path))


def expand(pattern: str) -> list[str]:
    """Return the paths that match a pattern with `{000..010}`, `{a,b}`, `*`, `?` or `[...]`, sorted."""
    found: set[str] = set()
    missing: list[str] = []
    if (braces := pattern.count("{")) > MAX_BRACES:
        raise ValueError(f"{brief(pattern, 200)} has {braces:,} braces; write {MAX_BRACES} or fewer.")
    paths = list(islice(_expand_braces(pattern), MAX_EXPANDED + 1))
    if len(paths) > MAX_EXPANDED:
        raise ValueError(f"{brief(pattern, 200)} stands for more than {MAX_EXPANDED:,} paths; give a folder.")
    for path in paths:
        if glob.has_magic(path):
            found.update(_glob(path))
        elif exists(path):
            found.add(path)
        else:
            missing.append(path)
    if missing:
        example = brief(missing[0], 200)
        raise ValueError(f"{brief(pattern, 200)}: {plural(len(missing), 'missing file')}, such as {example}.")
    return sorted(found, key=os.fsencode)


def _expand_braces(pattern: str) -> Iterator[str]:
    found = _BRACES.search(pattern)
    if not found:
        yield pattern
        return
    choices: Iterable[str] = found[1].split(",")
    if numbers := _RANGE.fullmatch(found[1]):
        first, last = numbers.groups()
        choices = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    start, end = pattern[: found.start()], pattern[found.end() :]
    for choice in choices:
        yield from _expand_braces(f"{start}{choice}{end}")


def _glob(path: str) -> list[str]:
    if not is_url(path):
        return glob.glob(path, recursive=True)
    return _remotely(path, lambda system, inner: [system.unstrip_protocol(p) for p in system.glob(inner)])


class Ranges:
    """Read ranges of bytes of files, from several threads and processes at once."""

    def __init__(self, paths: Sequence[str], stamps: NDArray[np.int64]) -> None:
        self.paths, self.stamps = paths, stamps
        self._open = lru_cache(OPEN_FILES)(_Descriptor)

    def read(self, file: int, start: int, size: int) -> bytes:
        path = self.paths[file]
        if is_url(path):
            data = _remotely(path, lambda system, inner: system.cat_file(inner, start, start + size))
        else:
            length, version, _ = self.stamps[file].tolist()
            if start + size > length:  # before so much memory is taken
                raise OSError(f"{path} is truncated")
            data = self._open(path, length, version).read(start, size)
        if len(data) != size:
            raise OSError(f"{path} is truncated")
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranges, (self.paths, self.stamps)


class _Descriptor:
    """An open file without a position, so that processes can share it, closed when it is no longer used."""

    def __init__(self, path: str, size: int, version: int) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        status = os.fstat(self.number)
        if (status.st_size, status.st_mtime_ns) != (size, version):
            raise OSError(f"{path} was changed after it was indexed; start again to rebuild its index")

    def read(self, start: int, size: int) -> bytes:
        data = os.pread(self.number, size, start)
        while len(data) < size:  # Linux returns 2 GiB at most
            more = os.pread(self.number, size - len(data), start + len(data))
            if not more:
                break
            data += more
        return data

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

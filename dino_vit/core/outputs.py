"""What commands write: files that say whose they are, and nothing over what a user has.

A file that exists is replaced or removed only if it has our mark, and never if the command at work reads it.
"""

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dino_vit.core.storage import StorageError, replacing
from dino_vit.core.text import expand_braces

MARK = "written by dino-vit, which may replace it"
PNG_MARK = {"Comment": MARK}  # as metadata of a picture
_ENDS = 65_536  # bytes at the beginning and the end of a file in which its mark is
_MOST = 10**6  # files that a pattern may stand for
_LISTS = (".txt", ".csv", ".tsv")
_PICTURES = (".png", ".npy")  # of our files those that a folder of images would be read with


class Work:
    """A command at work: what it reads, and what it could not write."""

    def __init__(self, inputs: Mapping[str, Sequence[str]], *, on_console: bool = False) -> None:
        self.inputs = [(key, spec) for key, specs in inputs.items() for spec in specs]
        self.on_console = on_console  # where results are written without an output too
        self.unwritten: list[StorageError] = []
        self.result: object = None

    @cached_property
    def _files(self) -> dict[tuple[int, int], str]:
        """The settings that name each file or folder, by its device and inode."""
        files = dict[tuple[int, int], str]()
        for key, spec in self.inputs:
            matches = chain.from_iterable(map(glob.iglob, _patterns(spec)))
            for path in [spec] if os.path.exists(spec) else islice(matches, _MOST):
                if (identity := _identity(path)) is not None:
                    files.setdefault(identity, f"{key}={spec}")
        return files

    def reader(self, path: Path) -> str | None:
        """Return the setting by which the command reads a file, or would read it if it were there."""
        if (identity := _identity(path)) in self._files:
            return self._files[identity]
        return next((f"{key}={spec}" for key, spec in self.inputs if _contains(key, spec, path)), None)


def _contains(key: str, spec: str, path: Path) -> bool:
    """Tell whether a setting names a folder of images, or a list of them, in which this file is."""
    if key.rpartition(".")[2] in ("weights", "run"):  # in whose folders results are
        return False
    if os.path.isdir(spec):
        folder, path = (Path(os.path.realpath(each)) for each in (spec, path))
        return path.suffix.lower() in _PICTURES and folder in path.parents
    if Path(spec).suffix.lower() not in _LISTS or not (path.exists() and os.path.isfile(spec)):
        return False
    cells = re.split(rb"[,\t\r\n]", Path(spec).read_bytes())
    return os.fsencode(path.name) in {os.path.basename(cell.strip(b' "')) for cell in cells}


def _patterns(spec: str) -> Iterator[str]:
    """Yield the patterns that a text stands for, and an archive in which an array is named."""
    yield from expand_braces(spec.removeprefix("file://"))
    yield glob.escape(spec.rpartition(":")[0])


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


_work: ContextVar[Work | None] = ContextVar("work", default=None)


@contextmanager
def at_work(inputs: Mapping[str, Sequence[str]], *, on_console: bool = False) -> Iterator[Work]:
    """Guard what the command within the block reads; at its end raise what it could not write."""
    work = Work(inputs, on_console=on_console)
    token = _work.set(work)
    try:
        yield work
    finally:
        _work.reset(token)
    if work.unwritten:
        error = StorageError("; ".join(map(str, work.unwritten)))
        error.result = work.result
        raise error


def on_console() -> bool:
    """Tell whether the command at work was given on a command line."""
    work = _work.get()
    return work is not None and work.on_console


def claim(*paths: Path) -> None:
    """Raise for a file that cannot be written, or is not to be: a user has it, or the command reads it."""
    work = _work.get()
    for path in paths:
        folder = next((parent for parent in path.parents if os.path.lexists(parent)), path.parent)
        if not folder.is_dir():
            raise StorageError(f"{path} cannot be written: {folder} is not a folder; give another output")
        if not os.path.lexists(path):
            if work and (setting := work.reader(path)):
                raise StorageError(f"{path} would be one of the images of {setting}; give another output")
            continue
        if work and (setting := work.reader(path)):
            raise StorageError(f"{path} would be overwritten, but {setting} is read; give another output")
        if path.is_dir():
            raise StorageError(f"{path} is a folder; give the name of a file as output")
        if not is_ours(path):
            raise StorageError(
                f"{path} already exists, and dino-vit did not write it; "
                "give another output, or move that file away"
            )


def is_ours(path: Path) -> bool:
    """Tell whether a file has our mark; a CSV has none, so the JSON file beside it has its digest."""
    if _is_marked(path):
        return True
    beside = path.with_suffix(".json")
    if path.suffix != ".csv" or not (path.is_file() and _is_marked(beside)):
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest().encode() in beside.read_bytes()


def _is_marked(path: Path) -> bool:
    if not path.is_file():  # opening a pipe would wait
        return False
    try:
        with path.open("rb") as file:
            ends = file.read(_ENDS)
            file.seek(max(file.seek(0, os.SEEK_END) - _ENDS, 0))
            ends += file.read()
    except OSError:
        return False
    return MARK.encode() in ends


@contextmanager
def replacing_output(path: Path) -> Iterator[Path]:
    """Yield a temporary path, whose file takes the place of `path`, which may be new or ours."""
    claim(path)
    with replacing(Path(os.path.realpath(path))) as partial:  # what a link leads to, not the link
        yield partial
        claim(path)  # it may have come meanwhile
        assert path.suffix == ".csv" or _is_marked(partial), f"{path} has no mark"


def write_output(path: Path, content: bytes | Callable[[Path], Any]) -> None:
    """Write bytes, or what a function writes to a path."""
    with replacing_output(path) as partial:
        partial.write_bytes(content) if isinstance(content, bytes) else content(partial)


def remove_output(path: Path) -> None:
    """Remove the file of an earlier call; leave those of others."""
    work = _work.get()
    if is_ours(path) and not (work and work.reader(path)):
        path.unlink(missing_ok=True)


@contextmanager
def after_figures() -> Iterator[None]:
    """Let a command print its figures if they cannot be written: it ends with the error after that."""
    work = _work.get()
    try:
        yield
    except StorageError as error:
        if work is None:
            raise
        work.unwritten.append(error)

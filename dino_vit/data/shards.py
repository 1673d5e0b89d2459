"""Images in shards (files of many images), and local copies of remote ones, which all of a host read.

The folder of the copies has a bound, may be shared by several runs, and may be deleted at any time. A copy
appears under its name when it is complete; a shard without a copy is read by a request for each image.
"""

import hashlib
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.cache import SHARDS, cache_folder
from dino_vit.core.process import in_threads
from dino_vit.core.text import brief, public
from dino_vit.data.remote import (
    UNKNOWN,
    Refused,
    SourceLost,
    check_length,
    remote_info,
    remote_signature,
    request,
    retry,
)

SUFFIX, PARTIAL = ".shard", ".partial"  # of a local copy, and of one that is being made
_COPY = re.compile(r"\d+-[0-9a-f]{24}(\.shard|\.[0-9a-f]{8}\.partial)")  # only these are ours to delete
PART = 4 * 2**20  # bytes of a request
REQUESTS = 8  # at a time, as object stores answer a single one slowly
RECENT_S = 600  # for which a copy that another run uses, or makes, is spared
POLL_S = 0.2  # between two looks at the position of the run
CATALOGUE_AGAIN = "write the catalogue again: dino-vit pack FOLDER index_only=true"


class ChangedFile(Refused):
    """A file is not the one that was indexed."""


@dataclass(eq=False)
class Shards:
    """Local files that hold the images of a set, read in ranges of bytes by threads and processes at once."""

    path: Callable[[int], str]
    starts: NDArray[np.int64]  # (shards + 1,), where the images of each begin
    file_signatures: NDArray[np.int64]
    digest: Callable[[int], str] | None = None  # that a catalogue states, empty if there is none
    is_remote: ClassVar = False

    @property
    def sizes(self) -> NDArray[np.int64]:
        return self.file_signatures[:, 0]

    def read(self, shard: int, start: int, size: int) -> bytes:
        path = self.path(shard)
        with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
            # Programs that purge disks change its times; whoever reads an archive looks at its checksums.
            if os.fstat(file.fileno()).st_size == self.sizes[shard]:
                return check_length(os.pread(file.fileno(), size, start), size, path)
        raise self.changed(shard)

    def changed(self, shard: int) -> ChangedFile:
        """Return the error that says what to do."""
        advice = CATALOGUE_AGAIN if self.digest else "start again to rebuild its index"
        shown = public(self.path(shard))
        return ChangedFile(f"{shown} was changed or removed after it was indexed; {advice}")


# Caches of fsspec have no bound, and cost more to read: 100 kB of a `filecache` 0.5 ms, of a `blockcache`
# 0.35 ms, here 0.27 ms. The first copies shards of 100 MB from a server of the same host at 110 to 130 MB/s,
# the second at 50 to 80, this at 75 to 115 (two busy cores), with several requests at a time, as stores that
# are far away answer a single one slowly.
@dataclass(eq=False)
class RemoteShards(Shards):
    """Remote files, with local copies of some, which all processes of a host read and one makes.

    All files in the folder, also those of other runs, stay within `limit` bytes together.
    """

    folder: Path = field(default_factory=lambda: cache_folder() / SHARDS)
    limit: float = math.inf
    is_remote: ClassVar = True
    _unchanged: set[int] = field(default_factory=set)  # files that were checked

    def read(self, shard: int, start: int, size: int) -> bytes:
        """Read from a copy, or else from the file itself.

        A copy is not held open: once deleted, it must not take room on the disk.
        """
        with suppress(OSError):
            if self.has_copy(shard):
                with self.copy_path(shard).open("rb", buffering=0) as file:
                    if len(data := os.pread(file.fileno(), size, start)) == size:
                        return data
        return retry(lambda: self._request(shard, start, size), self.path(shard))

    def _request(self, shard: int, start: int, size: int) -> bytes:
        """Read a range by one request, after a look whether the file is still the same."""
        if shard not in self._unchanged:
            self._check_unchanged(shard)
        return request(self.path(shard), start, size)

    def _check_unchanged(self, shard: int) -> None:
        """Raise if a file is not the one in the index."""
        size, version, _ = self.file_signatures[shard].tolist()
        now = remote_signature(remote_info(self.path(shard), fresh=True))
        if now[0] != size or version not in (UNKNOWN, now[1]):
            raise self.changed(shard)
        self._unchanged.add(shard)

    def _name(self, shard: int) -> str:
        """Return the name of a copy, beginning with the number of its shard; another if that changed."""
        size, version, _ = self.file_signatures[shard].tolist()
        stated = (self.digest and self.digest(shard)) or f"{size}\0{version}"
        key = hashlib.sha256(os.fsencode(f"{self.path(shard)}\0{stated}")).hexdigest()
        return f"{shard}-{key[:24]}{SUFFIX}"

    def _shard_called(self, name: str) -> int | None:
        """Return the shard whose copy has a name, or None for a copy of another source."""
        number = name.partition("-")[0]
        shard = int(number) if number.isdecimal() else len(self.sizes)
        return shard if shard < len(self.sizes) and name == self._name(shard) else None

    def copy_path(self, shard: int) -> Path:
        return self.folder / self._name(shard)

    def _files(self) -> Iterator[tuple["os.DirEntry[str]", os.stat_result]]:
        """Yield the files in the folder, those of other runs too."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in filter(lambda entry: _COPY.fullmatch(entry.name), os.scandir(self.folder)):
            with suppress(FileNotFoundError):  # another run deletes too
                yield entry, entry.stat()

    def copied_bytes(self) -> int:
        """Return the bytes of the files in the folder."""
        return sum(status.st_size for _, status in self._files())

    def has_copy(self, shard: int) -> bool:
        """Tell whether there is a copy, and other runs from time to time that it is used."""
        path = self.copy_path(shard)
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - RECENT_S / 10:
                os.utime(path)
            return True
        return False

    def copy(self, shard: int, stop: threading.Event | None = None) -> None:
        """Copy a shard; the copy of another run that does the same at the time is as good."""
        path = self.copy_path(shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{secrets.token_hex(4)}{PARTIAL}")  # containers share process numbers
        try:
            with partial.open("w+b") as file:
                self._download(shard, file, stop)
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _download(self, shard: int, file: BufferedRandom, stop: threading.Event | None) -> None:
        """Write a shard to an open file, and verify it."""
        url, size = self.path(shard), int(self.sizes[shard])

        def download(start: int) -> None:
            if stop and stop.is_set():
                raise SourceLost(f"{public(url)} is no longer needed")
            length = min(PART, size - start)
            data = retry(lambda: self._request(shard, start, length), url, stop)
            os.pwrite(file.fileno(), data, start)

        self._check_unchanged(shard)
        in_threads(download, range(0, size, PART), threads=REQUESTS)
        self._check_unchanged(shard)
        stated = self.digest and self.digest(shard)
        if stated and stated != hashlib.file_digest(file, "sha256").hexdigest():
            text = "is damaged: it does not match the digest in its catalogue. Copy or pack it again"
            raise ValueError(f"{public(url)} {text}")

    def make_room(self, shard: int, uses: NDArray[np.int64], keep: Sequence[int]) -> None:
        """Delete copies until there is room for a shard: those that are needed last go first.

        Copies in `keep` stay, and those of other runs as long as they are used, if that is enough.
        """
        kept = set(keep)
        files, total = [], int(self.sizes[shard])
        for entry, status in self._files():
            total += status.st_size
            recent = time.time() - status.st_mtime < RECENT_S
            number = self._shard_called(entry.name)
            # A partial file that nobody writes any more is of a run that was killed.
            if number not in kept and (entry.name.endswith(SUFFIX) or not recent):
                used = number is None and recent
                needed = 2**63 if number is None else int(uses[number])
                files.append((used, -needed, status.st_mtime, entry, status.st_size))
        for *_, entry, size in sorted(files, key=lambda file: file[:3]):
            if total <= self.limit:
                return
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
            total -= size


@dataclass(eq=False)
class Prefetch:
    """A thread that keeps local copies of the shards that come next, the nearest first.

    `next_uses` tells, from a position of the run on, after how many images each shard is needed next; those
    within `ahead` images are copied, as far as their limit allows.
    """

    shards: RemoteShards
    next_uses: Callable[[int], NDArray[np.int64]]
    ahead: int
    limit: float | None = None  # bytes of copies of this source, where several share the folder
    position: int = 0
    failure: ValueError | Refused | None = None  # why a run must end

    @contextmanager
    def running(self, position: int) -> Iterator[None]:
        """Run the thread, from a position of the run (in steps) on, which `self.position` then follows."""
        self.position, self.failure = position, None
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="shards", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(POLL_S)  # it may wait for an answer of a server

    def _run(self, stop: threading.Event) -> None:
        warned = False
        while not stop.is_set():
            pause = POLL_S
            try:
                if self.copy_next(stop):
                    continue
            except (ValueError, Refused) as error:
                self.failure = error
                return
            except SourceLost:  # logged already; a run may do without as long as there are other copies
                pass
            except OSError as error:  # such as a full disk
                if not warned:
                    text = "shards are not copied: %s; data.cache=FOLDER may be on another disk"
                    log.warning(text, brief(error, 300))
                warned, pause = True, 10
            stop.wait(pause)

    def copy_next(self, stop: threading.Event | None = None) -> bool:
        """Copy the nearest shard that is missing; return False if there is none."""
        shards = self.shards
        uses = self.next_uses(self.position)
        near = np.flatnonzero(uses < self.ahead)
        near = near[np.argsort(uses[near], kind="stable")].tolist()
        fitting = np.searchsorted(np.cumsum(shards.sizes[near]), self.limit or shards.limit, side="right")
        near = near[:fitting]
        missing = next((shard for shard in near if not shards.has_copy(shard)), None)
        if missing is None:
            return False
        shards.make_room(missing, uses, near)
        shards.copy(missing, stop)
        return True

"""Make copies of remote shards ahead: verified, bounded, by one thread of a host, safe beside other runs."""

import hashlib
import os
import re
import threading
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.text import brief
from dino_vit.data.shards import SUFFIX, SUMS, DamagedShard, ShardedSource
from dino_vit.data.sources.files import ChangedFile, SourceLost, patiently, read_file

PARTIAL = ".partial"  # of a copy that is being made
PART = 4 * 2**20  # bytes of a request
REQUESTS = 8  # at a time, as object stores answer a single one slowly
SUMS_PATIENCE = 10  # seconds for which digests are requested again if they cannot be read
RECENT = 600  # seconds for which a copy that another run uses is spared
POLL = 0.2  # seconds between two looks at the position of the run


class ShardCache:
    """Make copies of shards, and delete others so that all in the folder stay within `limit` bytes."""

    def __init__(self, source: ShardedSource, limit: float) -> None:
        self.copies, self.ranges, self.unpack = source.copies, source.ranges, source.unpack
        self.limit = limit
        self.stop = threading.Event()
        self._sums = cache(_read_sums)
        self._etags_are_digests = True  # those of encrypted objects are not, which nothing tells beforehand

    def copy(self, shard: int) -> bool:
        """Copy a shard if it has no copy, or return False if another run is about to."""
        path = self.copies.path(shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(PARTIAL)
        with _claimed(partial) as number:
            if number is None:
                return False
            if not path.exists():
                self._make(shard, number)
                os.fsync(number)
                os.replace(partial, path)
        return True

    def _make(self, shard: int, number: int) -> None:
        """Write the copy of a shard to an open file."""
        if self.unpack is None:
            self._download(shard, number)
            return
        with TemporaryFile(dir=self.copies.folder) as whole, open(number, "wb", closefd=False) as copy:
            self._download(shard, whole.fileno())
            self.unpack(self.copies.paths[shard], whole, copy)

    def _download(self, shard: int, number: int) -> None:
        """Write a shard to an open file, and verify it."""
        url, size, wrong = self.copies.paths[shard], int(self.copies.stamps[shard, 0]), ""

        def part(start: int) -> None:
            if self.stop.is_set():
                raise SourceLost(f"{url} is no longer needed")
            length = min(PART, size - start)
            data = patiently(lambda: self.ranges.request(shard, start, length), url, self.stop)
            os.pwrite(number, data, start)

        for _ in range(3):
            patiently(lambda: self.ranges.check_unchanged(shard), url, self.stop)
            os.ftruncate(number, 0)
            with ThreadPoolExecutor(REQUESTS) as pool:
                deque(pool.map(part, range(0, size, PART)), maxlen=0)
            info = patiently(lambda: self.ranges.check_unchanged(shard), url, self.stop)
            before, wrong = wrong, self._wrong_digest(url, info, number)
            if not wrong:
                return
            if wrong == before:  # the same bytes twice
                if self._stated_sum(url):
                    raise DamagedShard(
                        f"{url} is damaged: its digest is not the one in {SUMS} beside it. "
                        "Copy or pack it again"
                    )
                if self._etags_are_digests:
                    text = "the ETag of %s is not its MD5, as in an encrypted bucket: copies are verified by "
                    log.warning(text + "size alone, unless %s lies beside the shards", url, SUMS)
                self._etags_are_digests = False  # so that not every shard is fetched twice
                return
        raise OSError(f"{url} arrives with other bytes each time")

    def _wrong_digest(self, url: str, info: Mapping[str, Any], number: int) -> str:
        """Return the digest of a file if it is not the one that is stated, and otherwise nothing."""
        stated, name = self._stated_sum(url), "sha256"
        if not stated and self._etags_are_digests:
            stated, name = _stated_md5(url, info), "md5"
        if not stated:
            return ""
        with open(number, "rb", closefd=False) as file:
            file.seek(0)
            found = hashlib.file_digest(file, name).hexdigest()
        return "" if found == stated else found

    def _stated_sum(self, url: str) -> str:
        folder, _, name = url.rpartition("/")
        return self._sums(folder).get(name, "")

    def make_room(self, shard: int, uses: NDArray[np.int64], keep: Sequence[int]) -> None:
        """Delete copies until there is room for a shard: those that are needed last go first.

        Copies in `keep` stay, and those of other runs as long as they are used, if that is enough.
        """
        ours = dict(zip(self.copies.names, uses.tolist(), strict=True))
        kept = {self.copies.names[number] for number in keep}
        files, total = [], self.copies.size(shard)
        self.copies.folder.mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(self.copies.folder):
            with suppress(FileNotFoundError):  # another run deletes too
                status = entry.stat()
                if entry.name.endswith(PARTIAL) and _abandoned(Path(entry.path)):
                    continue
                total += status.st_size
                if entry.name.endswith(SUFFIX) and entry.name not in kept:
                    used = entry.name not in ours and time.time() - status.st_mtime < RECENT
                    files.append((used, -ours.get(entry.name, 2**63), status.st_mtime, entry, status.st_size))
        for *_, entry, size in sorted(files, key=lambda file: file[:3]):
            if total <= self.limit:
                return
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
            total -= size


class Prefetch:
    """A thread that keeps copies of the shards that come next, the nearest first.

    `next_uses` tells, from a position of the run on, after how many images each shard is needed next; those
    within `ahead` images are copied, as far as the cache holds them.
    """

    def __init__(self, cache: ShardCache, next_uses: Callable[[int], NDArray[np.int64]], ahead: int) -> None:
        self.cache, self.next_uses, self.ahead = cache, next_uses, ahead
        self.position = 0
        self.failure: ValueError | ChangedFile | None = None  # why a run must end

    @contextmanager
    def running(self, position: int) -> Iterator[None]:
        """Run the thread, from a position of the run (in steps) on, which `self.position` then follows."""
        self.position, self.failure = position, None
        stop = self.cache.stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="shards", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(POLL)  # it may wait for an answer of a server

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                pause = 0.0 if self.copy_next() else POLL
            except (DamagedShard, ChangedFile) as error:
                self.failure = error
                return
            except SourceLost:  # which was said; a run may do without as long as there are other copies
                pause = POLL
            except OSError as error:
                log.warning("no shard is copied to data.cache at present: %s", brief(error, 300))
                pause = 10
            stop.wait(pause)

    def copy_next(self) -> bool:
        """Copy the nearest shard that is missing; return False if there is none."""
        copies = self.cache.copies
        uses = self.next_uses(self.position)
        near = [shard for shard in np.argsort(uses, kind="stable").tolist() if uses[shard] < self.ahead]
        sizes = np.cumsum([copies.size(shard) for shard in near])
        near = near[: np.searchsorted(sizes, self.cache.limit, side="right")]
        for shard in near:
            path = copies.path(shard)
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > RECENT / 10:
                    os.utime(path)  # tells other runs that it is used
                continue
            self.cache.make_room(shard, uses, near)
            if self.cache.copy(shard):
                return True
        return False


def _stated_md5(url: str, info: Mapping[str, Any]) -> str:
    """Return the digest that an object store tells, or nothing, as of most uploads in parts."""
    if url.startswith(("gs://", "gcs://")):
        return b64decode(info.get("md5Hash") or "").hex()
    found = str(info.get("ETag", "")).strip('"') if url.startswith(("s3://", "s3a://")) else ""
    return found if re.fullmatch("[0-9a-f]{32}", found) else ""


def _read_sums(folder: str) -> dict[str, str]:
    """Return the digests by name of the files in a remote folder, where they are stated."""
    url = f"{folder}/{SUMS}"

    def read() -> bytes:
        with suppress(FileNotFoundError, PermissionError):  # object stores forbid what is not there
            return read_file(url)
        return b""

    try:
        text = patiently(read, url, patience=SUMS_PATIENCE).decode()
    except (SourceLost, UnicodeDecodeError) as error:
        reason = brief(error.__cause__ or error, 200)
        log.warning("copies of shards are not verified by %s, which cannot be read (%s)", url, reason)
        return {}
    return {name: digest for digest, name in re.findall(r"^([0-9a-f]{64}) [ *](.+)$", text, re.MULTILINE)}


@contextmanager
def _claimed(partial: Path) -> Iterator[int | None]:
    """Open a file for this process alone, or yield None; the system ends the claim of a process that dies."""
    number = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield number if _lock(number, partial) else None
    finally:
        if _lock(number, partial):  # not if it was renamed
            partial.unlink(missing_ok=True)
        os.close(number)


def _lock(number: int, path: Path) -> bool:
    """Lock an open file, unless another process has done so, has renamed the file or has deleted it."""
    try:
        flock(number, LOCK_EX | LOCK_NB)
        return os.path.samestat(os.fstat(number), path.stat())
    except OSError:
        return False


def _abandoned(partial: Path) -> bool:
    """Delete a file that a killed run has left incomplete."""
    number = os.open(partial, os.O_RDWR)
    try:
        if not _lock(number, partial):
            return False
        partial.unlink()
        return True
    finally:
        os.close(number)

"""Read files: local ones by the system's own calls, URLs through fsspec, again if a request fails."""

import math
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from itertools import chain, count
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from dino_vit.core import log
from dino_vit.core.process import REQUEUE, in_threads
from dino_vit.core.text import brief, progress, public, public_text

R = TypeVar("R")
FileSignature = tuple[int, int, int]  # size, version and time of change

UNKNOWN = -1  # version of a remote file that no one tells, or in a catalogue that was written elsewhere
REQUEST_TIMEOUT_S = 30  # within which a server must answer a request
MOST_REQUESTED = 8 * 2**20  # bytes of a file that one request asks for
RETRYABLE_STATUS = (408, 425, 429)  # HTTP: of the refusals (400 to 499), those after which to ask again
PER_IMAGE_TIMEOUT_S = 30  # for which an image is requested that may be on a server of its own
# What file systems call the version of a file, or the time of its last change. Not fsspec's `ukey`, which
# over HTTP is the same whatever the file holds.
VERSIONS = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "sha", "blob_id"),
    *("LastModified", "Last-Modified", "last_modified", "updated", "modified", "modify", "mtime"),
)

Stop = threading.Event | Event
process_stops: Stop = threading.Event()  # another one in a DataLoader worker
timeout_s = 180.0  # `data.timeout`: for which a remote file is requested again before the run ends
_last_warning = [-math.inf]


@contextmanager
def retrying(seconds: float) -> Iterator[None]:
    """Within the block, request remote files again for so many seconds."""
    global timeout_s
    before, timeout_s = timeout_s, seconds
    try:
        yield
    finally:
        timeout_s = before


class SourceLost(Exception):
    """A remote file could not be read for minutes; the run may be started again."""

    exit_code = REQUEUE


class Refused(SourceLost):
    """A server says that a file is not there, or may not be read; asking again would not help."""

    exit_code = 2


class RangeNotSupported(OSError):
    """A server does not know how to send a part of a file."""


def is_url(path: str) -> bool:
    return "://" in path


def is_http(path: str) -> bool:
    return path.lower().startswith(("http://", "https://"))


def local_path(path: str) -> str:
    """Return a local path without `file://` and `~`; other URLs as they are."""
    if path.startswith("file://"):
        return path.removeprefix("file://")
    return path if is_url(path) else os.path.expanduser(path)


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's filesystem and the path in it; each process has filesystems of its own."""
    import fsspec

    if "reference" in re.split("::|://", url):  # their templates are programs, which fsspec runs
        raise ValueError(f"{brief(url, 200)} is a file of references, which are not read")
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{brief(url, 200)} cannot be reached: {without(url, error)}") from error


class RemoteFile(RawIOBase):
    """A remote file for random access, read by requests that are made again if they fail."""

    def __init__(self, url: str, length: int) -> None:
        self.url, self.length, self.position = url, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.length)[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self.length - self.position))
        end = self.position + size

        def part(start: int) -> bytes:
            return retry(lambda: request(self.url, start, min(MOST_REQUESTED, end - start)), self.url)

        buffer[:size] = b"".join(in_threads(part, range(self.position, end, MOST_REQUESTED)))
        self.position = end
        return size


def without(url: str, error: BaseException) -> str:
    """Return the text of an error, in which other libraries name a URL as it was given, secrets and all."""
    return public_text(str(error).replace(url, public(url)))


def remotely(url: str, work: Callable[[Any, str], R]) -> R:
    """Call `work` with a URL's file system and its path there; whatever fails is an OSError."""
    system, inner = filesystem(url)
    try:
        return work(system, inner)
    except OSError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise OSError(f"{public(url)}: {without(url, error)}") from error


def time_limit(system: Any) -> dict[str, float]:
    """Return the argument that limits the seconds of a call, also where a server sends byte by byte."""
    return {"timeout": min(REQUEST_TIMEOUT_S, timeout_s)} if system.async_impl else {}


def retry(work: Callable[[], R], path: str, stop: Stop | None = None, seconds: float | None = None) -> R:
    """Read from a remote file, again and again if it fails, until the time is over or `stop` is set."""
    seconds = min(timeout_s, seconds or timeout_s)
    end = time.monotonic() + seconds
    for attempt in count():
        try:
            return work()
        except OSError as error:
            shown = public(path)
            if refusal := _refusal(path, error):
                text = f"{shown} is not there or may not be read ({refusal})"
                raise Refused(f"{text}. Check the address, and the credentials if it needs some") from error
            late = "it does not answer in time" if isinstance(error, TimeoutError) else ""
            reason = late or brief(without(path, error.__cause__ or error).removeprefix(f"{shown}: "), 300)
            left = end - time.monotonic()
            if left <= 0:
                raise SourceLost(
                    f"{shown} could not be read for {seconds:g} seconds ({reason}). "
                    "When it can be reached again, run the same command again"
                ) from error
            if attempt == 5 and _last_warning[0] < end - 2 * timeout_s:  # not from each thread
                _last_warning[0] = end - timeout_s
                log.warning("%s cannot be read (%s); retrying for %.0f more seconds", shown, reason, left)
            if (stop or process_stops).wait(min(2**attempt / 4, 10, left)):
                raise SourceLost(f"{shown} is no longer needed") from error
    raise AssertionError


def _refusal(path: str, error: OSError) -> str | None:
    """Return how a server refuses a file for good, or None if asking again may help."""
    cause = error.__cause__
    if getattr(getattr(cause, "os_error", None), "errno", 0) == socket.EAI_NONAME:
        return "no host has this name"
    if type(cause).__name__ == "NoCredentialsError":  # botocore's
        return str(cause)
    if status := getattr(cause, "status", 0):
        return f"HTTP {status}" if 400 <= status < 500 and status not in RETRYABLE_STATUS else None
    # fsspec also calls a file not found whose website does not answer; botocore's errors have a response.
    unreachable = cause is not None and not hasattr(cause, "response") and not isinstance(cause, LookupError)
    forbidden = isinstance(error, PermissionError) or str(error).startswith("Forbidden:")  # as gcsfs says
    refused = (isinstance(error, FileNotFoundError) and not unreachable) or forbidden
    refused = refused or isinstance(error, RangeNotSupported)
    return brief(without(path, error), 200) if refused else None


def remote_info(url: str, *, fresh: bool = False) -> dict[str, Any]:
    """Return what the file system knows of a file; `fresh`: not as it was when a folder was listed."""

    def look(system: Any, inner: str) -> dict[str, Any]:
        if fresh:
            system.invalidate_cache()
        return dict(system.info(inner, **time_limit(system)))

    return ask(url, look)


def remote_signature(info: dict[str, Any]) -> FileSignature:
    version = next((info[key] for key in VERSIONS if info.get(key)), None)
    return info.get("size") or 0, UNKNOWN if version is None else zlib.crc32(str(version).encode()), 0


def ask(url: str, work: Callable[[Any, str], R], seconds: float | None = None) -> R:
    """Call `work` with a URL's file system and its path there, again if it fails."""
    return retry(lambda: remotely(url, work), url, seconds=seconds)


def list_remote(root: str) -> dict[str, FileSignature]:
    """Return the files below a folder, and their signatures as far as the listing has them."""

    def find(system: Any, inner: str) -> tuple[str, dict[str, Any]]:
        system.invalidate_cache()
        return inner, system.find(inner, detail=True)

    with progress(f"Listing {public(root)}") as advance:
        inner, infos = ask(root, find)
        advance(len(infos))
    return {path.removeprefix(inner).lstrip("/"): remote_signature(info) for path, info in infos.items()}


def request(url: str, start: int, size: int) -> bytes:
    """Return a range of a remote file; what fails is an OSError."""

    def read(system: Any, inner: str) -> Any:
        settings = {**time_limit(system), **(_for_a_range(system, size) if is_http(url) else {})}
        # By name: another argument comes first on S3.
        return system.cat_file(inner, start=start, end=start + size, **settings)

    return check_length(remotely(url, read), size, url)


def _for_a_range(system: Any, size: int) -> dict[str, Any]:
    """Return the arguments of aiohttp with which a server that sends more is refused before it does."""

    async def check(answer: Any) -> None:
        if answer.status == 200 and (answer.content_length is None or answer.content_length > size):
            raise RangeNotSupported("the server sends whole files only, not the parts that it is asked for")

    headers = {**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    return {"headers": headers, "raise_for_status": check}


def check_length(data: bytes, size: int, path: str) -> bytes:
    if len(data) != size:
        raise OSError(f"{public(path)} has {len(data):,} bytes where it should have {size:,}")
    return data


def exists(path: str) -> bool:
    """Tell whether there is a file or folder. Object stores answer 403 for a missing one, which counts so."""
    if not is_url(path):
        return os.path.exists(path)
    try:
        return bool(remote_info(path))
    except Refused:
        return False


def is_folder(path: str) -> bool:
    if not is_url(path):
        return os.path.isdir(path)
    if is_http(path):
        return False
    return bool(ask(path, lambda system, inner: system.isdir(inner, **time_limit(system))))


def read_file(path: str, seconds: float | None = None) -> bytes:
    """Read a whole file; a remote one for so many seconds at most."""
    if not is_url(path):
        return Path(path).read_bytes()
    return bytes(ask(path, lambda system, inner: system.cat_file(inner, **time_limit(system)), seconds))


def read_image_file(path: str, seconds: float | None) -> bytes:
    """Read one image of many, which counts as unreadable if a server refuses it, or has not answered."""
    try:
        return read_file(path, seconds)
    except SourceLost as error:
        if seconds is None and not isinstance(error, Refused):
            raise
        raise OSError(str(error)) from error


def raise_if_lost(unreadable: Exception) -> None:
    """Raise what ended the reading of an image if no server answered, which another start may mend."""
    answer = getattr(unreadable.__cause__, "__cause__", None)
    if isinstance(answer, SourceLost) and not isinstance(answer, Refused):
        raise answer


def open_file(path: str, buffer: int = MOST_REQUESTED) -> BinaryIO:
    """Open a file for random access; of a remote one at least `buffer` bytes are requested at a time."""
    if not is_url(path):
        return open(path, "rb")
    size = remote_info(path).get("size")
    if size is None:
        raise OSError(f"{public(path)} has no known size, so it cannot be read at random")
    return BufferedReader(RemoteFile(path, int(size)), buffer)


def file_signatures(paths: Sequence[str]) -> NDArray[np.int64]:
    """Return size, version and time of change (ns, 0: unknown); size −1 of a local file that is missing."""
    chunks = [paths[start : start + 256] for start in range(0, len(paths), 256)]
    with progress("Looking at files", len(paths)) as advance:
        rows = in_threads(lambda part: [*map(file_signature, part)], chunks, lambda rows: advance(len(rows)))
    return np.array([*chain.from_iterable(rows)], dtype=np.int64).reshape(-1, 3)


def file_signature(path: str) -> FileSignature:
    if is_url(path):
        return remote_signature(remote_info(path))
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1, 0
    # `cp -p`, `rsync -t` and `tar -x` set the first time back; nothing sets back the second.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns

"""Keep a second run out of a folder, for as long as the process of the first one lives."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # a dependency of accelerate


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder, or raise if a living process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    try:
        descriptor = _lock(path)
    except (ImportError, OSError) as error:  # Windows, or a file system without locks
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
            raise ValueError(_taken(folder, path)) from None
        path, descriptor = folder / ".lease", _lease(folder / ".lease")
    with suppress(OSError):  # a full disk is no reason to stop: the text is for people
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {socket.gethostname()}".encode())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        with suppress(OSError):  # unless nothing was written, it is not empty
            folder.rmdir()


def _lock(path: Path) -> int:
    """Lock a file and return its descriptor.

    A record lock ends with this process, on whatever host; loader processes, which would keep one of flock
    for some seconds after a kill, do not inherit it.
    """
    from fcntl import LOCK_EX, LOCK_NB, lockf

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lockf(descriptor, LOCK_EX | LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder before this one has removed the file


def _lease(path: Path) -> int:
    """Make a file that names its process; one whose process has died on this host is replaced."""
    with suppress(OSError, ValueError):
        pid, host = path.read_text().split()
        if host == socket.gethostname() and not psutil.pid_exists(int(pid)):
            path.unlink()
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        text = f"{_taken(path.parent, path)}. If it no longer runs, remove {path}"
        raise ValueError(text) from None


def _taken(folder: Path, path: Path) -> str:
    pid, _, host = path.read_text().partition(" ")
    return (
        f"another run writes to {folder} (process {pid} on {host}); wait for its end, or give another output"
    )

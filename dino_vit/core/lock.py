"""Keep a second run out of a folder, for as long as the process of the first one lives."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, lockf
from pathlib import Path

from dino_vit.core.distributed import is_main_process

# What a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder on rank 0, or raise if another living process holds it."""
    if not is_main_process():
        yield
        return
    found = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    descriptor = _lock(path)
    if descriptor is None:
        path = folder / ".lease"
        descriptor = _lease(path)
    with suppress(OSError):  # a full disk is no reason to stop: the text is for people
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {socket.gethostname()}".encode())
    try:
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):
            path.unlink()
            if not found:
                folder.rmdir()  # if nothing was written


def _lock(path: Path) -> int | None:
    """Lock a file and return its descriptor, or None if the file system has no locks.

    Unlike `flock`, a POSIX record lock is not inherited by loader processes, which outlive a killed run by
    some seconds.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lockf(descriptor, LOCK_EX | LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(_taken(path)) from None
            if error.errno not in _NO_LOCKS:
                raise
            path.unlink(missing_ok=True)
            return None
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)  # the holder before this one has removed the file


def _lease(path: Path) -> int:
    """Make a file that names its process; one whose process has died on this host is replaced."""
    with suppress(OSError, ValueError):
        pid, host = path.read_text().split()
        if host == socket.gethostname() and not _lives(int(pid)):
            path.unlink()
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        raise ValueError(f"{_taken(path)}. If it no longer runs, remove {path}") from None


def _lives(pid: int) -> bool:
    """Tell whether a process other than this one lives: in a container started again both may be number 1."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _taken(path: Path) -> str:
    holder = ""
    with suppress(OSError):
        pid, _, host = path.read_text().partition(" ")
        holder = f" (process {pid} on {host})" if host else ""
    return f"another run is using {path.parent}{holder}: wait until it ends, or give another output"

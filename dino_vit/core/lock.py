"""Keep a second run out of a folder, for as long as the process of the first one lives."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil  # a dependency of accelerate


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder, or raise if a living process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with ExitStack() as stack:
        try:
            # A record lock ends with this process, on whatever host; loader processes, which would keep one
            # of flock for some seconds after a kill, do not inherit it.
            from fcntl import LOCK_EX, LOCK_NB, lockf

            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            lockf(descriptor, LOCK_EX | LOCK_NB)
            with suppress(OSError):  # a full disk is no reason: the text is for people
                os.ftruncate(descriptor, 0)
                os.write(descriptor, _owner())
        except (ImportError, OSError) as error:  # Windows, or a file system without locks
            if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(_taken(folder, path)) from None
            stack.enter_context(_lease(folder, folder / ".lease"))
        yield


@contextmanager
def _lease(folder: Path, path: Path) -> Iterator[None]:
    """Hold a file that names its process; one whose process has died on this host is replaced."""
    with suppress(OSError, ValueError):
        pid, host = path.read_text().split()
        if host == socket.gethostname() and not psutil.pid_exists(int(pid)):
            path.unlink()
    try:
        with path.open("xb") as file:
            file.write(_owner())
    except FileExistsError:
        text = f"{_taken(folder, path)}. If it no longer runs, remove {path}"
        raise ValueError(text) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _owner() -> bytes:
    return f"{os.getpid()} {socket.gethostname()}".encode()


def _taken(folder: Path, path: Path) -> str:
    pid, _, host = path.read_text().partition(" ")
    return (
        f"another run writes to {folder} (process {pid} on {host}); wait for its end, or give another output"
    )

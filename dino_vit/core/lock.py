"""Keep a second run out of a folder, for as long as the process of the first one lives."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, lockf
from pathlib import Path

from dino_vit.core import log
from dino_vit.core.distributed import is_main_process


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder on rank 0, or raise if another living process holds it."""
    if not is_main_process():
        yield
        return
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with open(path, "a+b", buffering=0) as file:
        _lock(file.fileno(), path)
        with suppress(OSError):  # a full disk is no reason to stop: the text is for people
            file.truncate(0)
            file.write(f"{os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
                if not existed:
                    folder.rmdir()  # if nothing was written


def _lock(descriptor: int, path: Path) -> None:
    try:
        # DataLoader workers, which outlive a killed run by some seconds, would inherit the lock of `flock`.
        lockf(descriptor, LOCK_EX | LOCK_NB)
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return
        holder = "it is just ending"  # and has removed the file that this process opened
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # as Lustre without its option -o flock
            log.warning("%s cannot be locked (%s): start no second run in this folder", path, error.strerror)
            return
        holder = f"process {path.read_text()}" if path.exists() else "it is just ending"
    raise ValueError(
        f"another run is using {path.parent} ({holder}): wait until it ends, or give another output"
    )

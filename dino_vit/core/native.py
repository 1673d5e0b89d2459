"""Stop two habits of native libraries: lines on stderr about damaged files, memory given back at once."""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_stderr = 2  # the descriptor that Python's lines go to
_inside = 0  # threads inside `silenced`
_lock = threading.Lock()

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt(3)


def separate_stderr() -> None:
    """Let Python write to a copy of stderr, which stays open while `silenced` closes the original."""
    global _stderr
    stream = sys.stderr
    if _stderr == 2 and stream is sys.__stderr__ and stream is not None:
        _stderr = os.dup(2)
        sys.stderr = os.fdopen(_stderr, "w", 1, encoding=stream.encoding, errors="backslashreplace")
        os.register_at_fork(after_in_child=_start_over)


@contextmanager
def silenced() -> Iterator[None]:
    """Drop what goes to the original stderr meanwhile, if Python's lines do not."""
    if _stderr == 2:
        yield
        return
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _inside
    with _lock:
        before, _inside = _inside, _inside + change
        if not before:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.close(null)
        elif not _inside:
            os.dup2(_stderr, 2)


def _start_over() -> None:
    """Forget the other threads, which a forked process does not have."""
    global _inside, _lock
    _inside, _lock = 0, threading.Lock()
    os.dup2(_stderr, 2)


def write_to_stderr(data: bytes) -> None:
    """Write at once, as a signal handler must."""
    os.write(_stderr, data)


def set_torch_environment() -> None:
    """Set what torch reads once, when it is imported, unless the user has."""
    # Threads that spin while they wait slow a busy CPU down several times; large tensors on small pages
    # (Linux) cost a CPU step a tenth of its time in page faults.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones; with other C libraries, do nothing.

    It would give many megabytes back to the system, which clears each page before it hands it out again: a
    third of the time of a step with DINOv2's loss (`benchmarks/objective.py`). The peak grows by up to 13 %.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)

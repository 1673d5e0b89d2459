"""This process: what it prints, its memory, threads, errors for other processes, signals, and its lock."""

import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, lockf
from itertools import chain, pairwise
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self, TextIO, TypeVar

from dino_vit.core import log

T = TypeVar("T")
R = TypeVar("R")
THREADS = 16  # they mostly wait for disks and networks
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
REQUEUE = 75  # EX_TEMPFAIL: the run is not finished and should be started again
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc's mallopt(3)


def is_rank_0() -> bool:
    """Tell whether this process prints and writes, also before and after there is a process group."""
    return os.environ.get("RANK", "0") == "0"


def open_closed_streams() -> None:
    """Let standard streams that are closed, as under cron, lead nowhere: a file would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115 - for as long as the process lives


def drop_output(stream: TextIO) -> None:
    """Let what could not be written go, or Python would try again at its end and complain."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Interruption:
    """Remember a signal until the end of a step; before the first, and at a second ctrl-C, leave at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.in_steps = False

    def __enter__(self) -> Self:
        # Only the main thread may handle signals; what nohup started goes on without its terminal.
        is_main = threading.current_thread() is threading.main_thread()
        kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        numbers = set(STOP_SIGNALS) - kept if is_main else set[signal.Signals]()
        self._handlers = {number: signal.signal(number, self._remember) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if not self.in_steps:
            self.leave()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == signal.SIGINT and is_rank_0():
            with suppress(OSError):  # sys.stderr may be in the middle of a write
                os.write(
                    2, b"\nStopping after this step. Press ctrl-C again to stop at once, without saving.\n"
                )

    def leave(self) -> NoReturn:
        """Leave as ctrl-C does, or with the exit code that asks for the continuation of the run."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(REQUEUE)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder on rank 0, or raise if another run holds it."""
    if not is_rank_0():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with open(path, "a+b", buffering=0) as file:
        try:
            # DataLoader workers, which outlive a killed run by some seconds, would inherit that of `flock`.
            lockf(file, LOCK_EX | LOCK_NB)
        except (PermissionError, BlockingIOError):
            text = f"another run is using {folder} (process {path.read_text()})"
            raise ValueError(f"{text}: wait until it ends, or give another output") from None
        except OSError as error:  # as Lustre without its option -o flock
            log.warning("%s cannot be locked (%s): start no second run in this folder", path, error.strerror)
        with suppress(OSError):  # a full disk is no reason to stop: the text is for people
            file.truncate(0)
            file.write(f"{os.getpid()} on {socket.gethostname()}".encode())
        yield


def is_foreseen(error: BaseException) -> bool:
    """Tell whether an error is a sentence for users, rather than our bug or that of their code."""
    return isinstance(error, ValueError | OSError) or hasattr(error, "exit_code")


def portable(error: Exception) -> Exception:
    """Return an error that reaches another process: itself, or its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # of the code of any library
        text = str(error)
        return ValueError(text) if is_foreseen(error) else RuntimeError(f"{type(error).__name__}: {text}")


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors, which Linux would clear again page by page."""
    _call_glibc("mallopt", (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1))


def release_freed_memory() -> None:
    """Let glibc return freed memory again in a DataLoader worker, which would grow with images of many sizes.

    The thresholds are those at which glibc arrives by itself, unless they were set before.
    """
    thresholds = (M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, 2**26)
    _call_glibc("mallopt", (M_MMAP_MAX, 65_536), *thresholds)


def return_freed_memory() -> None:
    """Return what was freed until now, whatever glibc is to keep: each thread keeps its own."""
    _call_glibc("malloc_trim", (0,))


def _call_glibc(name: str, *calls: tuple[int, ...]) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        for arguments in calls:
            function(*arguments)


def in_threads(
    work: Callable[[T], R],
    items: Sequence[T],
    done: Callable[[R], object] = lambda _: None,
    threads: int = THREADS,
) -> list[R]:
    """Map items in threads, in order, and call `done` with each result; the first error cancels the rest."""
    results = []
    with ThreadPoolExecutor(threads) as pool:
        for result in pool.map(work, items):
            results.append(result)
            done(result)
    return results


def in_batches(indices: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    """Split indices into batches; the last may be smaller."""
    return (indices[start : start + batch_size] for start in range(0, len(indices), batch_size))


def read_ahead(
    read: Callable[[T], R], blocks: Iterable[Sequence[T]], threads: int | None
) -> Iterator[list[R]]:
    """Yield what is read of each block by threads, prefetching one while the caller works on another."""
    with ThreadPoolExecutor(threads) as pool:
        try:
            # Each pair starts the block after the one that is yielded.
            for started, _ in pairwise(chain((pool.map(read, block) for block in blocks), [None])):
                assert started is not None
                yield list(started)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # the caller may have stopped early

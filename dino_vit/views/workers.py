"""DataLoader workers: how many there are, how they start, hand over batches and end."""

import logging
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Event
from typing import Any

import torch
from torch.utils.data import get_worker_info

from dino_vit.core import log
from dino_vit.core.process import STOP_SIGNALS, is_foreseen, portable, release_freed_memory
from dino_vit.core.runtime import cores_of_a_process
from dino_vit.data.sources import files

MOST_WORKERS = 16  # more rarely help, but cost memory
LOOK_S = 1.0  # for which a process waits for a batch before it looks at its workers and signals
GRACE_S = 5.0  # for which it waits after a signal, at least
SLOWER = 2  # or for so many times as long as for any batch before
_by_pipe = False  # in a worker: whether shared memory was full
_has_warned = False


class NoBatch(Exception):
    """A run that was asked to stop waits for a batch that does not come."""


class Pickled:
    """What a worker hands over, pickled by the thread that made it.

    The DataLoader's own thread would print an error, as where shared memory is full, and drop the batch,
    which the run would wait for without end.
    """

    def __init__(self, content: Any) -> None:
        self.data, self.is_shared = _pickled(content)

    def unpack(self) -> Any:
        """Return the content, in the process that the worker works for; once."""
        if not self.is_shared:
            _warn_of_full_memory()
        return pickle.loads(self.data)

    def pin_memory(self) -> Any:
        """Return the content in pinned memory (the DataLoader calls this)."""
        content = self.unpack()
        return content if isinstance(content, Exception) else content.pin_memory()


def _pickled(content: Any) -> tuple[bytes, bool]:
    """Return content as bytes, and whether its tensors lie in shared memory; else the bytes have them."""
    global _by_pipe
    if not _by_pipe:
        try:
            return bytes(ForkingPickler.dumps(content)), True
        except (
            RuntimeError,
            OSError,
        ):  # full, or too many files; from now on, as parts of a batch stay there
            _by_pipe = True
    return pickle.dumps(content), False


def _warn_of_full_memory() -> None:
    global _has_warned
    if not _has_warned:
        log.warning(
            "shared memory (/dev/shm) is too small for the batches of the workers, which come through pipes: "
            "slower; docker run --shm-size=16g gives more"
        )
    _has_warned = True


def handed_over(make: Callable[[], Any]) -> Any:
    """Return what `make` returns, or its error, in a form that reaches the process of the run."""
    try:
        content = make()
        return content if get_worker_info() is None else Pickled(content)
    except Exception as error:
        if get_worker_info() is None:
            return error
        if not is_foreseen(error):
            error.add_note(f"in a DataLoader worker:\n{traceback.format_exc()}")
        return Pickled(portable(error))


def wait_for_batch(batches: Any, is_stopping: Callable[[], bool], longest: float = 0.0) -> Any:
    """Return what comes next from the workers; after a signal wait a limited time.

    `longest` is how long it took until now: where batches are slow, the step is still finished.
    """
    waited = 0.0
    while True:
        try:
            content = next(batches)
            return content.unpack() if isinstance(content, Pickled) else content
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
        waited += LOOK_S if is_stopping() else 0.0
        if waited >= max(GRACE_S, SLOWER * longest):
            _kill(batches)
            raise NoBatch


def _kill(batches: Any) -> None:
    """End workers that may hang, so that nobody waits for them."""
    torch._C._remove_worker_pids(id(batches))  # or their end would be an error
    batches._worker_pids_set = False
    for worker in batches._workers:
        worker.kill()


def choose_workers(given: int | None, processes: int) -> int:
    """Return the DataLoader workers of each process: as given, else its cores but the one it needs itself."""
    return min(cores_of_a_process(processes) - 1, MOST_WORKERS) if given is None else given


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Hold signals back while workers start: they inherit this, and must not die before they ignore them."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def init_worker(stops: Event, timeout_s: float, number: int) -> None:
    """Ignore signals sent to all processes of a run, which needs its workers to finish the step."""
    files.process_stops, files.timeout_s = stops, timeout_s  # no worker goes on waiting for a server
    release_freed_memory()
    if number:
        log.setLevel(logging.ERROR)  # one says that a server does not answer
    for ignored in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if stops.is_set() else None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

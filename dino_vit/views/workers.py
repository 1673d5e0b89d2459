"""DataLoader workers: how many there are, how they start and end."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

from dino_vit.core import log
from dino_vit.core.process import STOP_SIGNALS, release_freed_memory
from dino_vit.core.runtime import cores_of_a_process
from dino_vit.data import remote

MOST_WORKERS = 16  # more rarely help, but cost memory


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
    remote.process_stops, remote.timeout_s = stops, timeout_s  # no worker goes on waiting for a server
    release_freed_memory()
    if number:
        log.setLevel(logging.ERROR)  # one says that a server does not answer
    for ignored in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if stops.is_set() else None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

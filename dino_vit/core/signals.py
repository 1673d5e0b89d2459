"""The signals that stop a run, and the exit code that asks for its continuation."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, Self, TypeVar

from dino_vit.core.native import write_to_stderr

T = TypeVar("T")
REQUEUE = 75  # EX_TEMPFAIL: the run is not finished and should be started again


class Stopped(BaseException):  # what reads images handles every Exception
    """A signal came in a wait that may take minutes."""


class Interruption:
    """Remember a signal until the end of a step; before the first, and at a second ctrl-C, leave at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.in_steps, self.in_wait = False, False

    def __enter__(self) -> Self:
        # Only the main thread may ask for signals.
        numbers = self.SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._handlers = {number: signal.signal(number, self._remember) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and not (self.in_steps and self.received is None):
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if not self.in_steps:
            sys.exit(REQUEUE)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            write_to_stderr(
                b"\nStopping after this step. Press ctrl-C again to stop at once, without saving.\n"
            )
        if self.in_wait:
            self.in_wait = False
            raise Stopped

    def wait(self, work: Callable[[], T]) -> T | None:
        """Return what is waited for, or None as soon as a signal asks to stop."""
        try:
            try:
                self.in_wait = True
                return None if self.asked else work()
            finally:
                self.in_wait = False
        except Stopped:  # may come in any line above
            return None

    def until_asked(self, items: Iterator[T]) -> Iterator[T | None]:
        """Yield items, each of which may take minutes, and None from when a signal asks to stop."""
        while True:
            yield self.wait(lambda: next(items))

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.received is not None

    def leave(self) -> NoReturn:
        """Leave a run that is saved: as ctrl-C does, or with the exit code that asks for its continuation."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(REQUEUE)

"""The signals that stop a run, and the exit code that asks for its continuation."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE = 75  # EX_TEMPFAIL: the run is not finished and should be started again


class Interruption:
    """Remember a signal until the end of a step; before the first, and at a second ctrl-C, leave at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.in_steps = False

    def __enter__(self) -> Self:
        # Only the main thread may handle signals.
        numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._handlers = {number: signal.signal(number, self._remember) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and (self.asked or not self.in_steps):
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if not self.in_steps:
            sys.exit(REQUEUE)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            # sys.stderr may be in the middle of a write.
            os.write(2, b"\nStopping after this step. Press ctrl-C again to stop at once, without saving.\n")

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.received is not None

    def leave(self) -> NoReturn:
        """Leave a run that is saved: as ctrl-C does, or with the exit code that asks for its continuation."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(REQUEUE)

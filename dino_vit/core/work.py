"""The command at work: whether it was given on a command line, and what it could not write."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dino_vit.core.storage import StorageError


class Work:
    """A command at work."""

    def __init__(self, *, on_console: bool) -> None:
        self.on_console = on_console  # where results are written without an output too
        self.unwritten: list[StorageError] = []
        self.result: object = None


_work: ContextVar[Work | None] = ContextVar("work", default=None)


@contextmanager
def at_work(*, on_console: bool = False) -> Iterator[Work]:
    """Run a command within the block; at its end raise what it could not write."""
    work = Work(on_console=on_console)
    token = _work.set(work)
    try:
        yield work
    finally:
        _work.reset(token)
    if work.unwritten:
        error = StorageError("; ".join(map(str, work.unwritten)))
        error.result = work.result
        raise error


def on_console() -> bool:
    """Tell whether the command at work was given on a command line."""
    work = _work.get()
    return work is not None and work.on_console


@contextmanager
def after_figures() -> Iterator[None]:
    """Let a command print its figures if they cannot be written: it ends with the error after that."""
    work = _work.get()
    try:
        yield
    except StorageError as error:
        if work is None:
            raise
        work.unwritten.append(error)

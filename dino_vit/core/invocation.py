"""The invocation of a command: whether on a command line, and what it could not write."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dino_vit.core.storage import StorageError


class Invocation:
    """A command that runs."""

    def __init__(self, *, on_console: bool) -> None:
        self.on_console = on_console  # where results are written without an output too
        self.errors: list[StorageError] = []  # of results that could not be written
        self.result: object = None


_current: ContextVar[Invocation | None] = ContextVar("invocation", default=None)


@contextmanager
def invoked(*, on_console: bool = False) -> Iterator[Invocation]:
    """Run a command within the block; at its end raise what it could not write."""
    invocation = Invocation(on_console=on_console)
    token = _current.set(invocation)
    try:
        yield invocation
    finally:
        _current.reset(token)
    if invocation.errors:
        error = StorageError("; ".join(map(str, invocation.errors)))
        error.result = invocation.result
        raise error


def on_console() -> bool:
    """Tell whether the current command was given on a command line."""
    invocation = _current.get()
    return invocation is not None and invocation.on_console


@contextmanager
def after_figures() -> Iterator[None]:
    """Let a command print its figures if they cannot be written: it ends with the error after that."""
    invocation = _current.get()
    try:
        yield
    except StorageError as error:
        if invocation is None:
            raise
        invocation.errors.append(error)

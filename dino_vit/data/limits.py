"""What files of others may take: regular files alone, so many bytes each, so much at a time in all threads.

A file of some kilobytes may decompress to gigabytes, a server may send without an end, a pipe may never be
written to. Sizes are checked before anything of that size is made.
"""

import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, BinaryIO

from dino_vit.core.text import brief, public

MAX_BYTES = 2**30  # of an image file, wherever it is stored, and of a list or a file of labels
MAX_PIXELS = 200_000_000  # of an image; of all that are decoded at a time, too


def check_bytes(size: int, name: str) -> None:
    """Refuse what is larger than a file may be, and wait until this thread may hold so many bytes."""
    if size > MAX_BYTES:
        raise ValueError(f"{brief(name, 1000)} has {size:,} bytes; a file may have {MAX_BYTES:,}")
    hold(BYTES, size)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; refuse a pipe or a device, which may never answer or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or a pipe waits for someone who writes
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe"}
    kind = next((kind for is_kind, kind in kinds.items() if is_kind(mode)), "a device")
    raise ValueError(f"{brief(os.fspath(path), 1000)} is {kind}; only regular files are read")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file as long as it is now, however it grows."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_bytes(size, os.fspath(path))
        return file.read(size)


class Budget:
    """What the threads of this process may hold together; more than all of it, one thread alone."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.reset()

    def reset(self) -> None:
        """Let all of it be free."""
        self.free = self.total
        self._turn, self._changed = threading.Lock(), threading.Condition()

    def take(self, amount: int) -> int:
        """Wait for an amount, and return what was taken."""
        amount = min(amount, self.total)
        with self._turn, self._changed:  # who came first goes first, also if it needs more
            self._changed.wait_for(lambda: self.free >= amount)
            self.free -= amount
        return amount

    def give(self, amount: int) -> None:
        """Give back what was taken."""
        with self._changed:
            self.free += amount
            self._changed.notify_all()


BYTES, PIXELS = Budget(MAX_BYTES), Budget(MAX_PIXELS)


class _Held(threading.local):
    """What this thread holds for its image; None outside `one_image`."""

    amounts: dict[Budget, int] | None = None


_held = _Held()


@contextmanager
def one_image() -> Iterator[None]:
    """Within the block this thread works on one image, whose bytes and then pixels count until its end."""
    if _held.amounts is not None:
        yield
        return
    _held.amounts = {}
    try:
        yield
    finally:
        amounts, _held.amounts = _held.amounts, None
        for budget, amount in amounts.items():
            budget.give(amount)


def hold(budget: Budget, amount: int) -> None:
    """Wait until this thread may hold so much for its image."""
    if _held.amounts is None:
        return
    before = _held.amounts.pop(budget, 0)
    budget.give(before)  # or two that want more would wait for each other
    _held.amounts[budget] = budget.take(max(before, amount))


def _release_all() -> None:
    """Reset the budgets in a forked process: the threads that hold something are not in it."""
    BYTES.reset()
    PIXELS.reset()
    _held.amounts = None


os.register_at_fork(after_in_child=_release_all)


class RangeNotSupported(OSError):
    """A server does not know how to send a part of a file."""


class LongFile(OSError):
    """A file is longer than it may be."""


def read_range(system: Any, inner: str, start: int, size: int, limits: Mapping[str, Any]) -> Any:
    """Return a range of a file; refuse an answer of another length before it is read into memory."""

    async def check(answer: Any) -> None:
        length = answer.content_length
        if answer.ok and (length is None or length > size):
            answered = "any length" if length is None else f"{length:,} bytes"
            text = f"{public(inner)}: the server answers with {answered}, where {size:,} bytes were asked for"
            raise RangeNotSupported(text) if answer.status == 200 else OSError(text)

    headers = {**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    settings = {**limits, "headers": headers, "raise_for_status": check}
    return system.cat_file(inner, start=start, end=start + size, **settings)


def read_whole(system: Any, inner: str, limit: int, limits: Mapping[str, Any]) -> Any:
    """Return a file of up to `limit` bytes, whose length the server need not state."""
    from fsspec.asyn import sync

    async def read() -> bytes:
        session, content = await system.set_session(), BytesIO()
        async with session.get(system.encode_url(inner), **{**system.kwargs, **limits}) as answer:
            if answer.status == 404:
                raise FileNotFoundError(inner)
            answer.raise_for_status()
            size = answer.content_length or 0
            async for part in answer.content.iter_any():
                size = max(size, content.tell() + len(part))
                if size > limit:
                    raise LongFile(f"{public(inner)} has more than {limit:,} bytes")
                content.write(part)
        return content.getvalue()

    return sync(system.loop, read)

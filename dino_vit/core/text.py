"""Text for people: safe on screens and in files, counted, brief; and progress on long work.

Names of files may hold any bytes, line breaks and escape sequences too.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from pathlib import Path
from typing import Any, TextIO, cast

from rich import markup
from rich.console import Console
from rich.progress import Progress

from dino_vit.core import log

PATIENCE = 2.0  # seconds; shorter work shows no progress
LINE_EVERY = 15.0  # seconds without a terminal
_SIBLINGS = 10_000  # of a path that does not exist are looked at
# Control characters, what ends a line or turns its direction, and what UTF-8 cannot encode.
_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Each takes time in proportion to the text: no two matches overlap, and none is tried again from within.
_SCHEME = r"[\w+.-]++"
_IS_ADDRESS = re.compile(rf"\s*{_SCHEME}:[:/]")
_CHAINED = re.compile(rf"::(?={_SCHEME}:[:/])")  # as fsspec has it: zip://a.png::https://host/a.zip
# In a sentence an address ends at a space, or at a quote that something other than a name follows.
_IN_TEXT = re.compile(rf"""(?<![\w+.-]){_SCHEME}://[^\s/]*+(?:[^\s'"]|['"](?![\s,;:.)\]}}>]|$))*+""")
_USER = re.compile(r"(?<=\w://)[^/]*@")
_QUERY = re.compile("[?#].*", re.DOTALL)
_MARK = re.compile("[?#@]")
_HTTP = re.compile("https?://", re.IGNORECASE)
_BYTES = range(0xDC80, 0xDD00)  # bytes of a name that are not UTF-8, as Python decodes them


def printable(text: object) -> str:
    """Return text on one line, its control characters and undecodable bytes escaped (`\\n`, `\\xff`)."""
    return _UNPRINTABLE.sub(_escape, str(text))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return rf"\x{code - 0xDC00:02x}" if code in _BYTES else found[0].encode("unicode_escape").decode()


def public(value: str) -> str:
    """Return an address without user, password, query and fragment; any other text with its addresses so.

    It is for a value: an address may hold spaces and quotes, which in a sentence would end it.
    """
    if "://" not in value or not _MARK.search(value):
        return value
    if not _IS_ADDRESS.match(value):
        return public_text(value)
    return "::".join(map(_without_secrets, _CHAINED.split(value)))


def public_text(text: str) -> str:
    """Return sentences whose addresses have no user, password, query and fragment."""
    return _IN_TEXT.sub(lambda found: _without_secrets(found[0]), text) if "://" in text else text


def _without_secrets(address: str) -> str:
    if "://" not in address:
        return address
    address = _USER.sub("", address)
    mark = _QUERY.search(address)
    # Elsewhere than over HTTP, names may have such a mark without a secret, and patterns a question mark.
    if mark and ("=" in mark[0] or _HTTP.search(address, 0, mark.start())):
        return address[: mark.start()]
    return address


def public_values(content: Any) -> Any:
    """Return what JSON can hold with all its texts `public`."""
    if isinstance(content, str):
        return public(content)
    if isinstance(content, Mapping):
        return {public(name): public_values(value) for name, value in content.items()}
    if isinstance(content, tuple):
        return tuple(map(public_values, content))
    return list(map(public_values, content)) if isinstance(content, list) else content


def brief(text: object, length: int = 60) -> str:
    """Return the beginning of `printable` text, for a message."""
    line = printable(public(str(text))[: length + 1])  # half a password would not be recognised
    return line if len(line) <= length else f"{line[: length - 4].rstrip()} ..."


def did_you_mean(path: str, otherwise: str = "") -> str:
    """Return a question about a path that exists and is nearly the given one, as the end of a message."""
    given = Path(path)
    with suppress(OSError, StopIteration):
        missing = next(part for part in (*reversed(given.parents), given) if not part.exists())
        for similar in get_close_matches(missing.name, os.listdir(missing.parent)[:_SIBLINGS]):
            meant = missing.with_name(similar) / given.relative_to(missing)
            if meant.exists():
                return f"; did you mean {printable(meant)}?"
    return otherwise


def printable_lines(text: str) -> str:
    """Escape text as `printable` does, but keep its line breaks; leave out what is not public."""
    return "\n".join(map(printable, public_text(text).split("\n")))


class PrintableFormatter(logging.Formatter):
    """Format log lines without escape sequences."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


@contextmanager
def log_shown(verbose: bool = True) -> Iterator[None]:
    """Show the lines of the library on stderr where no handler does, or hide all but warnings."""
    level, handler = log.level, logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter())
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    if verbose and not log.hasHandlers():
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def duration(seconds: float) -> str:
    """Return a time in its two largest units: 45s, 12m30, 14h02, 3d07h."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02}h"
    if hours:
        return f"{h}h{m:02}"
    return f"{m}m{s:02}" if m else f"{s}s"


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun, such as "1 image" or "2,000 images"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class Unfailing:
    """A stream whose disk may be full or whose reader may be gone: what cannot be written is left out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def unfailing(stream: TextIO) -> TextIO:
    """Return a stream that never ends a run."""
    return cast(TextIO, Unfailing(stream))


class Advance:
    """Count finished items, and show them when it is time."""

    def __init__(self, title: str, total: int | None, outer: Callable[[str], None] | None = None) -> None:
        self.outer = outer  # shows the work of which this is a part
        self.title, self.total, self.done = printable(public_text(title)), total, 0
        self.start = self.shown = time.monotonic()
        # Only rank 0 logs at this level. FORCE_COLOR makes rich take a log file for a terminal.
        console = Console(file=unfailing(sys.stderr))
        is_live = log.isEnabledFor(logging.INFO) and sys.stderr.isatty() and not console.is_dumb_terminal
        self.bar = Progress(console=console, transient=True, auto_refresh=False, disable=not is_live)
        self.task = self.bar.add_task(markup.escape(self.title), total=total)

    def __call__(self, count: int) -> None:
        """Count more items."""
        self.done += count
        self.show()

    def show(self, part: str = "") -> None:
        """Show the line, with that of a part of the work, if it is time."""
        if self.outer:
            self.outer(self.line(part))
            return
        now = time.monotonic()
        if now - self.start < PATIENCE or now - self.shown < (LINE_EVERY if self.bar.disable else 0.2):
            return
        if self.bar.disable and self.done == self.total:  # which the last line says
            return
        self.shown = now
        self.bar.start()
        self.bar.update(
            self.task, completed=self.done, description=markup.escape(self.line(part)), refresh=True
        )
        if self.bar.disable:
            log.info("%s", self.line(part))

    def line(self, part: str = "") -> str:
        """Return the count and the rate, and in brackets the line of a part of the work."""
        total = f" of {self.total:,}" if self.total and self.done != self.total else ""
        rate = self.done / max(time.monotonic() - self.start, 1e-9)
        text = f"{self.title}: {self.done:,}{total}, {rate:{',.0f' if rate >= 10 else '.2g'}}/s"
        return f"{text} ({part})" if part else text


_at_work: ContextVar[Callable[[str], None] | None] = ContextVar("_at_work", default=None)


@contextmanager
def shows_parts(show: Callable[[str], None]) -> Iterator[None]:
    """Let a function show the progress of all work within the block."""
    token = _at_work.set(show)
    try:
        yield
    finally:
        _at_work.reset(token)


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Advance]:
    """Yield a function to call with each number of finished items; `total` may be unknown.

    Work within other work has no line of its own.
    """
    outer = _at_work.get()
    advance = Advance(title, total, outer)
    try:
        with shows_parts(advance.show):
            yield advance
    finally:
        advance.bar.stop()
    if outer is None and time.monotonic() - advance.start > PATIENCE:
        log.info("%s in %s", advance.line(), duration(time.monotonic() - advance.start))


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """What a command found or wrote; as text, and where Python shows it, it is what the command prints."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return printable_lines(self.text)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)

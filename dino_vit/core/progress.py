"""Show how far a long piece of work is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

log = logging.getLogger("dino_vit")

PATIENCE = 2.0  # seconds: shorter work needs no words
LINE_EVERY = 20.0  # seconds, where there is no terminal


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Advance]:
    """Yield a function that is told of each few more items; a total that is not known may be left out."""
    advance = Advance(title, total)
    try:
        yield advance
    finally:
        if advance.bar:
            advance.bar.stop()
    if time.monotonic() - advance.start > PATIENCE:
        log.info("%s in %.0f s", advance.line(), time.monotonic() - advance.start)


class Advance:
    """Count the items that are done, and say so when it is time."""

    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total = title, total
        self.done, self.note = 0, ""
        self.start = self.said = time.monotonic()
        # Of several processes those that do not speak draw nothing either.
        visible = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)
        console = Console(stderr=True)
        self.bar = Progress(console=console, transient=True, auto_refresh=False) if visible else None
        self.task = self.bar.add_task(title, total=total) if self.bar else None

    def __call__(self, count: int, note: str = "") -> None:
        """Count some more, with a note on them."""
        self.done += count
        self.note = note
        now = time.monotonic()
        if now - self.start < PATIENCE or now - self.said < (0.2 if self.bar else LINE_EVERY):
            return
        self.said = now
        if self.bar and self.task is not None:
            self.bar.start()
            self.bar.update(self.task, completed=self.done, description=self.line(), refresh=True)
        else:
            log.info("%s", self.line())

    def line(self) -> str:
        """Say how many are done, how many a second, and the note."""
        total = f" of {self.total:,}" if self.total and self.done != self.total else ""
        rate = self.done / max(time.monotonic() - self.start, 1e-9)
        note = f", {self.note}" if self.note else ""
        return f"{self.title}: {self.done:,}{total}, {rate:,.0f} a second{note}"

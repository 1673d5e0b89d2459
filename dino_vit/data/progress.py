"""Show how far a long piece of work is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

log = logging.getLogger("dino_vit")

PATIENCE = 2.0  # seconds: shorter work needs no words
LINE_EVERY = 20.0  # seconds, where there is no terminal


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told of each few more items; a total that is not known may be left out."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, auto_refresh=False) if sys.stderr.isatty() else None
    task = bar.add_task(title, total=total) if bar else None
    start = said = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        now = time.monotonic()
        if now - start < PATIENCE or now - said < (0.2 if bar else LINE_EVERY):
            return
        said = now
        if bar and task is not None:
            bar.start()
            bar.update(task, completed=done, description=f"{title}: {done:,}", refresh=True)
        else:
            log.info("%s: %s%s", title, f"{done:,}", f" of {total:,}" if total else "")

    try:
        yield advance
    finally:
        if bar:
            bar.stop()
    if time.monotonic() - start > PATIENCE:
        log.info("%s: %s in %.0f s", title, f"{done:,}", time.monotonic() - start)

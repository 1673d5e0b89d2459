"""Progress on long work: a bar on a terminal or in a notebook, otherwise a log line from time to time."""

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import Progress

from dino_vit.core import log
from dino_vit.core.text import printable

PATIENCE = 2.0  # seconds; shorter work shows nothing
LINE_EVERY = 20.0  # seconds, without a terminal
NOTEBOOK_COLUMNS = 120

# Said by tqdm, which libraries import, in a notebook without ipywidgets.
warnings.filterwarnings("ignore", message="IProgress not found")


class Advance:
    """Count finished items, and show them when it is time."""

    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total = printable(title), total
        self.done, self.note = 0, ""
        self.start = self.shown = time.monotonic()
        notebook = in_notebook()
        # Only rank 0 logs at this level.
        visible = (notebook or sys.stderr.isatty()) and log.isEnabledFor(logging.INFO)
        console = Console(stderr=True)
        self.bar = Progress(console=console, transient=True, auto_refresh=False) if visible else None
        self.task = self.bar.add_task(escape(self.title), total=total) if self.bar else None
        if self.bar and notebook:
            self.bar.live = NotebookLive(self.bar.get_renderable, transient=True)  # type: ignore[assignment]

    def __call__(self, count: int, note: str = "") -> None:
        """Count more items, with a note on them."""
        self.done += count
        self.note = note
        now = time.monotonic()
        if now - self.start < PATIENCE or now - self.shown < (0.2 if self.bar else LINE_EVERY):
            return
        self.shown = now
        if self.bar and self.task is not None:
            self.bar.start()
            self.bar.update(self.task, completed=self.done, description=escape(self.line()), refresh=True)
        else:
            log.info("%s", self.line())

    def line(self) -> str:
        """Return the count, the rate and the note."""
        total = f" of {self.total:,}" if self.total and self.done != self.total else ""
        rate = self.done / max(time.monotonic() - self.start, 1e-9)
        note = f", {self.note}" if self.note else ""
        return f"{self.title}: {self.done:,}{total}, {rate:,.0f}/s{note}"


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Advance]:
    """Yield a function to call with each number of finished items; `total` may be unknown."""
    advance = Advance(title, total)
    try:
        yield advance
    finally:
        if advance.bar:
            advance.bar.stop()
    if time.monotonic() - advance.start > PATIENCE:
        log.info("%s in %s", advance.line(), duration(time.monotonic() - advance.start))


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


def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")  # which the shell of a terminal has not


class NotebookLive:
    """What `rich.live.Live` is on a terminal; rich's own needs ipywidgets in a notebook."""

    def __init__(self, get_renderable: Callable[[], RenderableType], *, transient: bool = False) -> None:
        self.get_renderable, self.transient = get_renderable, transient
        # For lines that stay.
        self.console = Console(file=sys.stderr, width=NOTEBOOK_COLUMNS, force_jupyter=False)
        self.handle: Any = None

    def start(self, refresh: bool = True) -> None:
        """Show the bar, unless it is shown already."""
        from IPython.display import display

        if self.handle is None:
            self.handle = display({"text/html": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            if refresh:
                self.refresh()

    @property
    def is_started(self) -> bool:
        """Whether the bar is shown."""
        return self.handle is not None

    def refresh(self) -> None:
        """Draw the bar as it is now."""
        page = Console(record=True, file=StringIO(), width=NOTEBOOK_COLUMNS, force_jupyter=False)
        page.print(self.get_renderable())
        style = "margin:0; line-height:normal; font-family:monospace"
        drawn = page.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
        self._show(drawn)

    def stop(self) -> None:
        """Leave the bar as it is, or remove it if it is transient."""
        if self.handle is not None and self.transient:
            self._show("")
        elif self.handle is not None:
            self.refresh()

    def _show(self, page: str) -> None:
        self.handle.update({"text/html": page}, raw=True)

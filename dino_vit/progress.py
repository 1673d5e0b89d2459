"""Show how far a count has come: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from dino_vit.monitor import REFRESH, duration

LINE_EVERY = 10.0


class Counting:
    """Count `unit`s of something on stderr, or on `stream`; silent where `quiet`."""

    def __init__(
        self,
        what: str,
        *,
        total: int,
        unit: str = "images",
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.unit, self.quiet = what, total, unit, quiet
        self.stream = sys.stderr if stream is None else stream
        self.clock = clock
        self.done, self.note = 0, ""
        self.started = self.shown = clock()
        console = Console(file=self.stream)
        terminal = not quiet and self.stream.isatty() and not console.is_dumb_terminal
        self.live = (
            Live(get_renderable=self._picture, console=console, auto_refresh=False, transient=True)
            if terminal
            else None
        )

    def __enter__(self) -> Self:
        if self.live:
            self.live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()
        if error is None and self.done and not self.quiet:
            self.stream.write(f"{self.what}: {self._numbers()}\n")
            self.stream.flush()

    def advance(self, count: int, note: str = "") -> None:
        """Count some more, with a note for the line."""
        self.done, self.note = min(self.done + count, self.total), note
        if self.quiet or self.clock() - self.shown < (REFRESH if self.live else LINE_EVERY):
            return
        self.shown = self.clock()
        if self.live:
            self.live.refresh()
        else:
            self.stream.write(f"{self.what}: {self._numbers()}  eta {self._eta()}\n")
            self.stream.flush()

    def _picture(self) -> Table:
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        track = ProgressBar(total=self.total, completed=self.done)
        bar.add_row(self.what, track, f"{self._numbers()}  eta {self._eta()}")
        return bar

    def _numbers(self) -> str:
        rate = self.done / max(self.clock() - self.started, 1e-9)
        parts = [f"{self.done:,}/{self.total:,} {self.unit}", f"{rate:,.0f}/s", self.note]
        return "  ".join(part for part in parts if part)

    def _eta(self) -> str:
        elapsed = self.clock() - self.started
        return duration(elapsed / self.done * (self.total - self.done)) if self.done else "-"

"""Show a run on stderr: as a bar or, without a terminal, line by line."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dino_vit.core.text import duration, live_console, printable_lines
from dino_vit.training.metrics import MetricsRecord
from dino_vit.training.verdict import LEARNING, TOO_EARLY, Diagnosis

REFRESH = 0.5  # seconds between two updates of the bar
FIRST_ESTIMATE = 5  # steps after the start
RECENT = 20  # records whose pace the remaining time is estimated from


class RunProgress:
    """Show a run on stderr, or on `stream`: a bar on a terminal, otherwise one line per record."""

    def __init__(
        self,
        *,
        total_steps: int,
        step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.step, self.clock = total_steps, step, clock
        self.stream = sys.stderr if stream is None else stream
        self.metrics: MetricsRecord | None = None
        self.diagnosis = TOO_EARLY
        self.knn: float | None = None
        self.saved_step: int | None = None  # shown in the next line, or in the bar
        self.start_clock()
        self.drawn = -math.inf
        self.live = self._terminal()

    def __enter__(self) -> Self:
        if self.live:
            self.live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def start_clock(self) -> None:
        """Estimate the remaining time from the steps taken from now on."""
        self.recent = deque([(self.clock(), self.step)], maxlen=RECENT)

    def advance(self, step: int) -> None:
        """Move the bar to `step`; cheap enough for every step."""
        self.step = step
        if len(self.recent) == 1 and step >= self.recent[0][1] + FIRST_ESTIMATE:
            self.recent.append((self.clock(), step))
        if self.live and self.clock() - self.drawn >= REFRESH:
            self._draw(self.live)

    def show(self, metrics: MetricsRecord, diagnosis: Diagnosis) -> None:
        """Show a record; when the state turns bad, or good again, say so once."""
        before, self.diagnosis, self.metrics, self.step = self.diagnosis, diagnosis, metrics, metrics.step
        self.total_steps = metrics.total_steps  # which `budget.minutes` changes
        self.recent.append((self.clock(), metrics.step))
        if self.live:
            self.knn = self.knn if metrics.knn is None else metrics.knn
            self._draw(self.live)
        else:
            self.knn = metrics.knn
            self._write(self._line())
            self.saved_step = None
        last = self.step >= self.total_steps  # then the run's summary says it
        if diagnosis != before and diagnosis.advice and not last:
            self.notice(f"step {metrics.step:,}: {diagnosis.state}. {diagnosis.advice}")
        elif diagnosis != before and before.advice:
            self.notice(f"step {metrics.step:,}: {diagnosis.state} again, no longer {before.state}.")

    def notice(self, text: str) -> None:
        """Print a sentence that stays."""
        text = printable_lines(text)
        if self.live:
            self.live.console.print(Text(text))
        else:
            self._write(text)

    def _terminal(self) -> Live | None:
        """Return rich's live display, without its thread: workers forked beside one may hang."""
        console = live_console(self.stream)
        if console is None:
            return None
        redirect = sys.stdout.isatty()
        return Live(
            get_renderable=self._picture, console=console, auto_refresh=False, redirect_stdout=redirect
        )

    def _draw(self, live: Live) -> None:
        self.drawn = self.clock()
        live.refresh()

    def _picture(self) -> Group:
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        track = ProgressBar(total=self.total_steps, completed=self.step)
        share = f"{self.step / self.total_steps:.0%}"
        bar.add_row(f"{self.step:,}/{self.total_steps:,}", track, f"{share}  eta {self._eta()}")
        style = "bold red" if self.diagnosis.advice else "green" if self.diagnosis == LEARNING else "dim"
        figures = Text(no_wrap=True, overflow="ellipsis").append(self.diagnosis.state, style=style)
        figures.append("".join(f"  {part.strip()}" for part in (*self._figures(), *self._events())))
        return Group(bar, figures)

    def _line(self) -> str:
        total = f"{self.total_steps:,}"
        state = f"eta {self._eta():>6}", self.diagnosis.state
        step = f"step {self.step:>{len(total)},}/{total}"
        return "  ".join([step, *self._figures(), *state, *self._events()])

    def _figures(self) -> list[str]:
        """Return the figures of the last record, in columns."""
        if (metrics := self.metrics) is None:
            return []
        excess = "" if metrics.excess is None else f" (ln K {metrics.excess:+6.2f})"
        parts = [f"epoch {metrics.epoch:5.1f}", f"loss {metrics.loss:6.3f}{excess}"]
        for name, gap in (("gap", metrics.entropy_gap), ("patches", metrics.patch_entropy_gap)):
            parts += [] if gap is None else [f"{name} {gap:5.2f}"]
        return [*parts, f"{metrics.images_per_second:>7,.0f} img/s", f"wait {metrics.data_wait:>3.0%}"]

    def _events(self) -> list[str]:
        knn = [] if self.knn is None else [f"k-NN {self.knn:.1f} %"]
        return knn + ([] if self.saved_step is None else [f"saved {self.saved_step:,}"])

    def _eta(self) -> str:
        """Return the remaining time at the pace of the recent records, evaluations included."""
        (then, first), (now, last) = self.recent[0], self.recent[-1]
        if self.step >= self.total_steps:
            return "0s"
        if last <= first:
            return "-"
        return duration((now - then) / (last - first) * (self.total_steps - self.step))

    def _write(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()

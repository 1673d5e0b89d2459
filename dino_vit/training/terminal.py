"""Show a run on stderr: as a bar or, without a terminal, line by line."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dino_vit.core.progress import NotebookLive, duration, in_notebook
from dino_vit.core.text import printable_lines
from dino_vit.training.diagnosis import Diagnosis
from dino_vit.training.readings import Reading
from dino_vit.training.verdict import LEARNING, TOO_EARLY

REFRESH = 0.5  # seconds between two updates of the bar
FIRST_ESTIMATE = 5  # steps after the start
RECENT = 20  # readings whose pace the remaining time is estimated from


class RunProgress:
    """Show a run on stderr, or on `stream`: a bar on a terminal, otherwise one line per reading."""

    def __init__(
        self,
        *,
        total_steps: int,
        step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.step = total_steps, step
        self.stream = sys.stderr if stream is None else stream
        self.clock = clock
        self.reading: Reading | None = None
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
            if not self.live:
                self._write(f"step {step:,}/{self.total_steps:,}: about {self._eta()} to go")
        if self.live and self.clock() - self.drawn >= REFRESH:
            self._draw(self.live)

    def show(self, reading: Reading, diagnosis: Diagnosis) -> None:
        """Show a reading; when the state turns bad, or good again, say so once."""
        before, self.diagnosis, self.reading, self.step = self.diagnosis, diagnosis, reading, reading.step
        self.total_steps = reading.total_steps  # which a run of some minutes changes
        self.knn = self.knn if reading.knn is None else reading.knn
        self.recent.append((self.clock(), reading.step))
        if self.live:
            self._draw(self.live)
        else:
            self._write(self._line(reading))
            self.saved_step = None
        last = self.step >= self.total_steps  # then the run's summary says it
        if diagnosis != before and diagnosis.advice and not last:
            self.notice(f"step {reading.step:,}: {diagnosis.state}. {diagnosis.advice}")
        elif diagnosis != before and before.advice:
            self.notice(f"step {reading.step:,}: {diagnosis.state} again, no longer {before.state}.")

    def notice(self, text: str) -> None:
        """Print a sentence that stays."""
        text = printable_lines(text)
        if self.live:
            self.live.console.print(Text(text))
        else:
            self._write(text)

    def _terminal(self) -> Live | NotebookLive | None:
        """Return rich's live display, without its thread: loader processes forked beside one may hang."""
        if self.stream is sys.stderr and in_notebook():
            return NotebookLive(self._picture)
        console = Console(file=self.stream)
        # Ask the stream, as FORCE_COLOR makes rich take a log file for a terminal.
        if not self.stream.isatty() or console.is_dumb_terminal:
            return None
        redirect = sys.stdout.isatty()
        return Live(
            get_renderable=self._picture, console=console, auto_refresh=False, redirect_stdout=redirect
        )

    def _draw(self, live: Live | NotebookLive) -> None:
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
        return Group(bar, self._numbers())

    def _numbers(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        style = "bold red" if self.diagnosis.advice else "green" if self.diagnosis == LEARNING else "dim"
        text.append(self.diagnosis.state, style=style)
        if self.reading:
            text.append("  " + "  ".join(part.strip() for part in _parts(self.reading)))
        if self.knn is not None:
            text.append(f"  k-NN {self.knn:.1f} %")
        if self.saved_step is not None:
            text.append(f"  saved {self.saved_step:,}", style="dim")
        return text

    def _line(self, reading: Reading) -> str:
        total = f"{self.total_steps:,}"
        step = f"step {reading.step:>{len(total)},}/{total}"
        parts = [step, *_parts(reading), f"eta {self._eta():>6}", self.diagnosis.state]
        if reading.knn is not None:
            parts.append(f"k-NN {reading.knn:.1f} %")
        if self.saved_step is not None:
            parts.append(f"saved {self.saved_step:,}")
        return "  ".join(parts)

    def _eta(self) -> str:
        """Return the remaining time at the pace of the recent readings, evaluations included."""
        (then, first), (now, last) = self.recent[0], self.recent[-1]
        if self.step >= self.total_steps:
            return "0s"
        if last <= first:
            return "-"
        return duration((now - then) / (last - first) * (self.total_steps - self.step))

    def _write(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()


def _parts(reading: Reading) -> list[str]:
    excess, gap, patch_gap = reading.excess, reading.entropy_gap, reading.patch_entropy_gap
    return [
        f"epoch {reading.epoch:5.1f}",
        f"loss {reading.loss:6.3f}" + ("" if excess is None else f" (ln K {excess:+6.2f})"),
        *([] if gap is None else [f"gap {gap:5.2f}"]),
        *([] if patch_gap is None else [f"patches {patch_gap:5.2f}"]),
        f"{reading.images_per_second:>7,.0f} img/s",
        f"wait {reading.data_wait:>3.0%}",
    ]

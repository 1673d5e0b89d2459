"""A run on stderr: a line for each record, and on a terminal a bar below them."""

import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self, TextIO

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from dino_vit.core.text import LINE_EVERY, duration, live_console, printable_lines, shows_parts, unfailing
from dino_vit.reports.metrics import MetricsRecord
from dino_vit.reports.verdict import BAD, Verdict

REFRESH = 0.5  # seconds between two updates of the bar
RECENT = 1800  # seconds whose pace the remaining time is estimated from


class RunProgress:
    """Show a run on stderr, or on `stream`: a line per record, and on a terminal a bar below them."""

    def __init__(
        self,
        *,
        total_steps: int,
        step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`seconds_left` are those of `budget.minutes`; otherwise they are estimated by the steps."""
        self.clock, self.drawn, self.seconds_left = clock, -math.inf, seconds_left
        self.stream = unfailing(sys.stderr if stream is None else stream)
        self.diagnosis = "too early to tell"
        self.saved_step: int | None = None  # shown in the next line
        console = live_console(self.stream)
        self.bar = Progress(
            TextColumn("{task.completed:,}/{task.total:,}"),
            BarColumn(None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            auto_refresh=False,  # its thread is in the way of workers, which may be forked beside one
            speed_estimate_period=RECENT,
            redirect_stdout=sys.stdout.isatty(),
            get_time=clock,
            disable=console is None,  # then it only estimates the remaining time
            expand=True,
        )
        self.bar.add_task("", total=total_steps, completed=step, left="-")
        (self.task,) = self.bar.tasks
        self.last_line = self.last_step = self.clock()
        self._within = ExitStack()

    def __enter__(self) -> Self:
        self.bar.start()
        self._within.enter_context(shows_parts(self.refresh))
        return self

    def __exit__(self, *_: object) -> None:
        self._within.close()
        self.bar.stop()

    def advance(self, step: int, total_steps: int) -> None:
        """Move to `step` of a total that `budget.minutes` changes."""
        self.bar.update(self.task.id, completed=step, total=total_steps)

    def refresh(self, part: str = "") -> None:
        """Show how far the run is, or a part of its work such as an evaluation; without a terminal rarely.

        It is cheap enough for every step.
        """
        now = self.clock()
        # A line comes now if the next step, which may take as long as this one, would be late for it.
        silent, self.last_step = now - self.last_line + now - self.last_step, now
        if self.bar.disable and silent >= LINE_EVERY:
            step, total = self.task.completed, self.task.total
            self.notice(f"step {step:,}/{total:,}  {part or f'eta {self.time_left()}'}")
        elif not self.bar.disable and now - self.drawn >= REFRESH:
            self.drawn = now
            self.bar.update(self.task.id, left=escape(part) or self.time_left(), refresh=True)

    def time_left(self) -> str:
        """Return how long the run still takes, as a text."""
        left = self.seconds_left()
        seconds = self.task.time_remaining if left is None else max(left, 0.0)
        if self.task.finished:
            seconds = 0.0
        return "-" if seconds is None else duration(seconds)

    def show(self, metrics: MetricsRecord, verdict: Verdict) -> None:
        """Show a record; when the diagnosis turns bad, or good again, say so once."""
        before, self.diagnosis = self.diagnosis, verdict.diagnosis
        self.bar.update(self.task.id, completed=metrics.step, total=metrics.total_steps)
        self.bar.update(self.task.id, left=self.time_left(), refresh=True)
        self.notice(self._line(metrics))
        self.saved_step = None
        last = metrics.step >= metrics.total_steps  # then the run's summary says it
        if self.diagnosis != before and {self.diagnosis, before} & {*BAD} and not last:
            self.notice(
                f"step {metrics.step:,}: {self.diagnosis}. {verdict.sentence} {verdict.advice}".rstrip()
            )

    def notice(self, text: str) -> None:
        """Print a line that stays."""
        self.last_line = self.clock()
        text = printable_lines(text)
        if self.bar.disable:
            self.stream.write(f"{text}\n")
            self.stream.flush()
        else:
            self.bar.console.print(Text(text), soft_wrap=True)

    def _line(self, metrics: MetricsRecord) -> str:
        """Return the figures of a record, in columns."""
        total = f"{metrics.total_steps:,}"
        excess = "" if metrics.excess is None else f" ({metrics.excess:+5.2f})"
        parts = [f"step {metrics.step:>{len(total)},}/{total}", f"epoch {metrics.epoch:5.1f}"]
        parts += [f"loss {metrics.loss:6.3f}{excess}"]
        parts += [f"{metrics.images_per_second:>7,.0f} img/s", f"wait {metrics.data_wait:>3.0%}"]
        parts += [f"eta {self.time_left():>6}", self.diagnosis]
        parts += [] if metrics.knn is None else [f"k-NN {metrics.knn:.1f} %"]
        parts += [] if self.saved_step is None else [f"saved {self.saved_step:,}"]
        return "  ".join(parts)

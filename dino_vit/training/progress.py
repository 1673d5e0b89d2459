"""A run on stderr: a line for each record, and where none comes for long, how far it is."""

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from dino_vit.core.text import LINE_EVERY, duration, printable_lines, unfailing
from dino_vit.reports.metrics import MetricsRecord
from dino_vit.reports.verdict import BAD, Verdict

RECENT = 20  # records, whose pace the remaining time is estimated from


class RunProgress:
    """Show a run on a stream, line by line."""

    def __init__(
        self,
        *,
        total_steps: int,
        step: int = 0,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`seconds_left` are those of `budget.minutes`; otherwise they are estimated by the steps."""
        self.clock, self.seconds_left = clock, seconds_left
        self.stream = unfailing(stream)
        self.step, self.total_steps = step, total_steps
        self.records = deque[tuple[int, float]](maxlen=RECENT)  # steps and times of the last
        self.diagnosis = "too early to tell"
        self.saved_step: int | None = None  # shown in the next line
        self.last_line = self.last_step = self.clock()

    def advance(self, step: int, total_steps: int) -> None:
        """Move to `step` of a total that `budget.minutes` changes."""
        self.step, self.total_steps = step, total_steps

    def refresh(self, part: str = "") -> None:
        """Show how far the run is, or a part of its work such as an evaluation, where no line came for long.

        It is cheap enough for every step.
        """
        now = self.clock()
        # A line comes now if the next step, which may take as long as this one, would be late for it.
        silent, self.last_step = now - self.last_line + now - self.last_step, now
        if silent >= LINE_EVERY:
            self.notice(f"step {self.step:,}/{self.total_steps:,}  {part or f'eta {self.time_left()}'}")

    def time_left(self) -> str:
        """Return how long the run still takes, as a text."""
        left, steps = self.seconds_left(), self.total_steps - self.step
        if steps <= 0:
            left = 0.0
        elif left is None and len(self.records) > 1:
            (first, start), (last, end) = self.records[0], self.records[-1]
            left = (end - start) / (last - first) * steps
        return "-" if left is None else duration(max(left, 0.0))

    def show(self, metrics: MetricsRecord, verdict: Verdict) -> None:
        """Show a record; when the diagnosis turns bad, or good again, say so once."""
        before, self.diagnosis = self.diagnosis, verdict.diagnosis
        self.advance(metrics.step, metrics.total_steps)
        self.records.append((metrics.step, self.clock()))
        self.notice(self._line(metrics))
        self.saved_step = None
        last = metrics.step >= metrics.total_steps  # then the run's summary says it
        if self.diagnosis != before and {self.diagnosis, before} & {*BAD} and not last:
            self.notice(
                f"step {metrics.step:,}: {self.diagnosis}. {verdict.sentence} {verdict.advice}".rstrip()
            )

    def notice(self, text: str) -> None:
        """Print a line."""
        self.last_line = self.clock()
        self.stream.write(f"{printable_lines(text)}\n")
        self.stream.flush()

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

"""Log a run on rank 0: to its folder, to trackers, and to stderr as a bar or, without a terminal, as lines.

Nothing here changes the run.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from io import StringIO
from typing import Self, TextIO

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dino_vit import __version__
from dino_vit.config import yaml
from dino_vit.config.display import to_yaml
from dino_vit.config.settings import values
from dino_vit.core.progress import duration, plural
from dino_vit.core.runtime import cores_of_a_process, device_name
from dino_vit.core.storage import StorageError, write_bytes
from dino_vit.training.readings import (
    STARTING,
    Diagnosis,
    Reading,
    Record,
    append_record,
    diagnose,
    drop_later_records,
    to_json,
)
from dino_vit.training.setup import Run

REFRESH = 0.5  # seconds between two updates of the bar
RECENT = 20  # readings whose pace the remaining time is estimated from


class Reporter:
    """Log a run to the terminal, to its folder and to trackers; do nothing on other ranks."""

    def __init__(self, run: Run) -> None:
        self.run, self.state = run, run.state
        config, accelerator = self.state.config, self.state.accelerator
        self.main = bool(accelerator.is_main_process)
        self.progress = RunProgress(
            total_steps=self.state.plan.total_steps,
            step=self.state.step,
            stream=sys.stderr if self.main else StringIO(),
        )
        self.metrics = self.state.folder / "metrics.jsonl"
        self.readings: list[Reading] = []
        if self.main:
            self._write_config(to_yaml(config))
            records = drop_later_records(self.metrics, self.state.step)
            self.readings = [Reading.from_record(record) for record in records]
        plain = {key: v if isinstance(v, int | float) else str(v) for key, v in values(config).items()}
        accelerator.init_trackers("logs", config=plain)

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(*error)

    def _write_config(self, text: str) -> None:
        """Write the settings unless they are unchanged: on a full disk a good file must stay untouched."""
        path = self.state.folder / "config.yaml"
        if not path.exists() or path.read_text() != text:
            write_bytes(path, text.encode())

    def start(self) -> None:
        """Describe the run, and record this start in `starts.jsonl`."""
        for line in describe_start(self.run):
            self.progress.notice(line)
        if self.main and self.state.step < self.state.plan.total_steps:
            try:
                append_record(self.state.folder / "starts.jsonl", start_record(self.run))
            except OSError as error:  # a full disk may be freed before the next checkpoint
                self.progress.notice(f"starts.jsonl could not be written: {error}")

    def log_baseline(self, figures: Mapping[str, float]) -> None:
        """Log the evaluation before the first step."""
        text = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in figures.items())
        self.progress.notice(f"before the first step: {text}")
        self.progress.start_clock()
        self.state.accelerator.log({f"eval/{name}": value for name, value in figures.items()}, step=0)
        if self.main:
            write_bytes(self.state.folder / "baseline.json", to_json(dict(figures)))

    def log(self, reading: Reading) -> None:
        """Log a reading, with what it says about the run."""
        if not self.main:
            return
        self.readings.append(reading)
        diagnosis = diagnose(self.readings, settled_step=self.state.plan.settled_step)
        self.progress.show(reading, diagnosis)
        try:
            append_record(self.metrics, reading.to_record(diagnosis.state))
            self.state.accelerator.log(reading.scalars(), step=reading.step)
        except OSError as error:  # a full disk may be freed before the next checkpoint
            self.progress.notice(f"step {reading.step:,}: the reading could not be written. {error}")
        self._compare_with_weights(reading)

    def _compare_with_weights(self, reading: Reading) -> None:
        """Warn when a run from trained weights is worse than these weights."""
        name, value = ("knn", reading.knn) if reading.knn is not None else ("rankme", reading.rankme)
        before = self.state.baseline
        if self.state.config.init and value is not None and before is not None and value < before:
            self.progress.notice(
                f"step {reading.step:,}: {name} {value:.1f} is below the {before:.1f} of the initial "
                "weights. Lower optim.lr or optim.layer_decay, or bring teacher.momentum nearer to 1"
            )

    def stop(self) -> None:
        """Say how a run that was asked to stop resumes."""
        if self.state.saved_step == self.state.step:
            self.progress.notice(f"saved at step {self.state.step:,}; run the same command to resume")

    def finish(self) -> None:
        """Say where the result is."""
        if self.state.saved_step != self.state.step:
            raise StorageError(
                f"the run is complete, but its last checkpoint could not be written; free disk space for "
                f"{self.state.folder} and run the same command again"
            )
        best = self.state.best
        text = (
            f", the best by {best['figure']} ({best['value']:.1f}) at step {best['step']:,}" if best else ""
        )
        self.progress.notice(f"done: {self.state.checkpoints.folder} holds the last step{text}")


def parameter_counts(run: Run) -> dict[str, int]:
    """Return the number of parameters of backbone and head."""
    parts = {"backbone": run.state.student.backbone, "head": run.state.student.head}
    return {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}


def start_record(run: Run) -> Record:
    """Return a line of `starts.jsonl`: when, from which step, on what, with which choices."""
    state, plan = run.state, run.state.plan
    return {
        "step": state.step,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "torch": torch.__version__,
        "device": device_name(state.device),
        "cores": cores_of_a_process(state.accelerator.num_processes),
        "processes": state.accelerator.num_processes,
        "precision": state.precision,
        "workers": state.loader.workers,
        "global_batch": plan.global_batch,
        "images": len(state.source),
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "parameters": parameter_counts(run),
        "reasons": {choice.key: choice.reason for choice in run.choices},
    }


def describe_start(run: Run) -> Iterator[str]:
    """Yield lines on the devices, the images, the network, and the reason for each choice."""
    state, config, plan = run.state, run.state.config, run.state.plan
    processes, workers = state.accelerator.num_processes, state.loader.workers
    factors = (
        f"{plural(config.data.batch_size, 'image')} × {plural(config.optim.accumulate, 'pass', 'passes')} "
        f"× {plural(processes, 'process', 'processes')}"
    )
    yield (
        f"dino-vit {__version__}: {plural(processes, 'process', 'processes')} on {state.device.type}, "
        f"precision {state.precision}, {plural(workers, 'loader worker')}{' each' if processes > 1 else ''}, "
        f"global batch {plan.global_batch} = {factors}"
    )
    yield (
        f"{len(state.source):,} images of {config.data.source}: {plural(plan.steps_per_epoch, 'step')} "
        f"per epoch, {plural(plan.total_steps, 'step')} ({plan.epochs:.4g} epochs), peak lr {plan.lr:.3g}"
    )
    yield from run.notes
    width, depth, heads = config.model.shape
    parameters = {name: number / 1e6 for name, number in parameter_counts(run).items()}
    views = config.views
    yield (
        f"ViT/{config.model.patch_size}, width {width}, {plural(depth, 'block')}, {plural(heads, 'head')} "
        f"({parameters['backbone']:.1f} M parameters, projection head {parameters['head']:.1f} M); "
        f"views {views.global_count} × {views.global_size} px and {views.local_count} × {views.local_size} px"
    )
    for choice in run.choices:
        yield f"  {choice.key}={yaml.write(choice.value)}: {choice.reason}"
    if run.resumed:
        yield f"resuming after step {state.step:,} from {run.resumed}"


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
        self.diagnosis = STARTING
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
        if self.live and self.clock() - self.drawn >= REFRESH:
            self._draw(self.live)

    def show(self, reading: Reading, diagnosis: Diagnosis) -> None:
        """Show a reading; when the state turns bad, or good again, say so once."""
        before, self.diagnosis, self.reading, self.step = self.diagnosis, diagnosis, reading, reading.step
        self.knn = self.knn if reading.knn is None else reading.knn
        self.recent.append((self.clock(), reading.step))
        if self.live:
            self._draw(self.live)
        else:
            self._write(self._line(reading))
            self.saved_step = None
        if diagnosis != before and diagnosis.advice:
            self.notice(f"step {reading.step:,}: {diagnosis.state}. {diagnosis.advice}")
        elif diagnosis != before and before.advice:
            self.notice(f"step {reading.step:,}: {diagnosis.state} again, no longer {before.state}.")

    def notice(self, text: str) -> None:
        """Print a sentence that stays."""
        if self.live:
            self.live.console.print(Text(text))
        else:
            self._write(text)

    def _terminal(self) -> Live | None:
        """Return rich's live display, without its thread: loader processes forked beside one may hang."""
        console = Console(file=self.stream)
        # Ask the stream, as FORCE_COLOR makes rich take a log file for a terminal.
        if not self.stream.isatty() or console.is_dumb_terminal:
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
        return Group(bar, self._numbers())

    def _numbers(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        style = "bold red" if self.diagnosis.advice else "green" if self.diagnosis != STARTING else "dim"
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
    return [
        f"epoch {reading.epoch:5.1f}",
        f"loss {reading.loss:6.3f} (ln K {reading.excess:+6.2f})",
        f"gap {reading.entropy_gap:5.2f}",
        f"{reading.images_per_second:>7,.0f} img/s",
        f"wait {reading.data_wait:>3.0%}",
    ]

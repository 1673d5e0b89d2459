"""Log a run on rank 0: its start, its records, its result, in files and on stderr.

Nothing here changes the state.
"""

import logging
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from io import StringIO
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Self

import torch

from dino_vit import __version__
from dino_vit.config.loading import to_yaml, write_yaml
from dino_vit.config.objects import is_object
from dino_vit.config.sections import BASELINES
from dino_vit.config.settings import values
from dino_vit.core import log
from dino_vit.core.runtime import device_name
from dino_vit.core.storage import StorageError, write_bytes
from dino_vit.core.text import plural, printable, public, public_values
from dino_vit.data.image_set import evenly_spaced
from dino_vit.reports.accuracies import describe_knn
from dino_vit.reports.metrics import (
    BASELINE,
    Baseline,
    MetricsRecord,
    Start,
    append_record,
    drop_later_records,
    read_records,
    to_json,
)
from dino_vit.reports.verdict import WAITING_HELP, judge_run, waits_for_images
from dino_vit.training.progress import RunProgress
from dino_vit.training.resume import set_earlier_run_aside
from dino_vit.training.state import TrainingState

COLUMNS_HELP = (
    "columns of the log: loss: in brackets, how far above that of a network to which all images are alike; "
    "below 0 it tells them apart; wait: share of the time spent waiting for images; eta: time left"
)
# What needs no network, and how it is called.
TITLES = {"colours": "colours alone", "largest_class": "always the largest class", "chance": "chance"}
GUESSES = {name: TITLES.get(name, name) for name in (*BASELINES, *TITLES)}
FEW_CHOICES = 3  # each gets a line at the start
SAMPLE = 1000  # images that are looked at for some without a label


class Reporter:
    """Log a run to the terminal, to its folder and to trackers; do nothing on other ranks."""

    def __init__(
        self,
        state: TrainingState,
        *,
        on_metrics: Callable[[MetricsRecord], object] | None = None,
        on_checkpoint: Callable[[Path], object] | None = None,
    ) -> None:
        self.state = state
        self.is_resumed = state.saved_step is not None
        self.on_metrics, self.on_checkpoint = on_metrics, on_checkpoint
        config, accelerator, folder = state.config, state.accelerator, state.folder
        self.main = bool(accelerator.is_main_process)
        self.progress = RunProgress(
            total_steps=state.total_steps,
            step=state.step,
            stream=sys.stderr if log.isEnabledFor(logging.INFO) else StringIO(),
            seconds_left=lambda: state.clock.left,
        )
        self.history: list[MetricsRecord] = []
        self.baseline: Baseline | None = None
        self.has_advised_on_waiting = False
        if self.main:
            # Another change would go unnoticed with resume=changed.
            compute = config.compute.model_copy(update={"resume": "same"})
            settings = to_yaml(config.model_copy(update={"compute": compute})).encode()
            if not self.is_resumed:
                set_earlier_run_aside(folder, settings)
            with self._full_disk_allowed():
                write_bytes(folder / "config.yaml", settings)
            # A run that was killed may have logged steps that come after its last checkpoint.
            self.history = drop_later_records(folder / "metrics.jsonl", state.step)
            if self.is_resumed:
                self.baseline = next(iter(read_records(folder / "baseline.json", BASELINE)), None)
        # Trackers take numbers and text only.
        plain = {
            key: v if isinstance(v, int | float) else printable(str(public_values(v)))
            for key, v in values(config).items()
        }
        # Trackio would give each start a name of its own; a run that resumes goes on under the same one.
        run_settings = {"trackio": {"name": plain["output"], "resume": "allow"}}
        accelerator.init_trackers("logs", config=plain, init_kwargs=run_settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in self.state.accelerator.trackers:
            tracker.finish()

    def start(self) -> None:
        """Describe the run, and record this start in `starts.jsonl`."""
        start = start_record(self.state)
        for line in describe_start(self.state, start):
            self.progress.notice(line)
        if self.main and not self.state.is_done:
            with self._full_disk_allowed():
                append_record(self.state.folder / "starts.jsonl", asdict(start))

    def log_baseline(self, baseline: Baseline) -> None:
        """Log the evaluation before the first step."""
        self.baseline = baseline
        self.progress.notice(describe_baseline(self.state, baseline))
        figures = {f"eval/{name}": value for name, value in baseline.figures().items()}
        self.state.accelerator.log(figures, step=0)
        if self.main:
            with self._full_disk_allowed():
                write_bytes(self.state.folder / "baseline.json", to_json(asdict(baseline)))

    def log(self, metrics: MetricsRecord) -> None:
        """Log a record, with what it says about the run."""
        if not self.main:
            return
        self.history.append(metrics)
        verdict = judge_run(self.history, self.state.config, self.baseline)
        self.history[-1] = replace(metrics, diagnosis=verdict.diagnosis)
        self.progress.show(metrics, verdict)
        if waits_for_images(self.history) and not self.has_advised_on_waiting:
            self.has_advised_on_waiting = True
            self.progress.notice(self._advice_on_waiting())
        with self._full_disk_allowed():
            append_record(self.state.folder / "metrics.jsonl", self.history[-1].to_record())
            self.state.accelerator.log(metrics.scalars(), step=metrics.step)
        if self.on_metrics:
            self.on_metrics(self.history[-1])

    @contextmanager
    def _full_disk_allowed(self) -> Iterator[None]:
        """Go on without a record that cannot be written: the disk may be freed before the next checkpoint."""
        try:
            yield
        except (OSError, StorageError) as error:
            log.warning("step %s: the record could not be written. %s", f"{self.state.step:,}", error)

    def _advice_on_waiting(self) -> str:
        state = self.state
        loading, images = state.interval.loading, state.interval.loaded
        times = (f"{1000 * seconds / images:.3g} ms to {part}" for part, seconds in loading.items())
        return (
            f"step {state.step:,}: the run waits for images {self.history[-1].data_wait:.0%} of its time; "
            f"an image takes {', '.join(times)}, with data.workers={state.loader.workers}; "
            f"{WAITING_HELP}"
        )

    def saved(self, path: Path) -> None:
        """Note that a checkpoint is on the disk."""
        self.progress.saved_step = self.state.saved_step
        if self.on_checkpoint:
            self.on_checkpoint(path)

    def stop(self) -> None:
        """Say how a run that was asked to stop resumes."""
        if self.state.saved_step == self.state.step:
            self.progress.notice(f"saved at step {self.state.step:,}; run the same command to resume")

    def finish(self) -> None:
        """Say what has come of the run, and where it is."""
        best, weights = self.state.evaluations.best, self.state.folder
        if self.main:
            verdict = judge_run(self.history, self.state.config, self.baseline)
            self.progress.notice(str(verdict))
            if best and verdict.is_past_best:
                weights = self.state.checkpoints.path(best["step"])
        self.progress.notice(f"saved: {self.state.checkpoints.folder} holds the last step")
        self.progress.notice(self._next_commands(weights))

    def _next_commands(self, weights: Path) -> str:
        """Return the commands to look at a run with; those that fit any images, of these weights."""
        data, source, folder = self.state.config.data, self.state.source, str(self.state.folder)
        is_passed = any(map(is_object, data.sources))  # which no command line can name
        report = f"dino_vit.report({folder!r})" if is_passed else f"dino-vit report {shlex.quote(folder)}"
        text = f"next: `{report}` draws curves, a map of the images and attention"
        if len(data.sources) > 1 or is_passed:
            return text
        images = f"{shlex.quote(public(data.sources[0]))} {shlex.quote(str(weights))}"
        if not self.state.evaluations.online.has_labels:
            return (
                f"{text}; `dino-vit label {images}` writes a page to label a few by; "
                f"`dino-vit predict {images} labels=few.csv` labels the others by these"
            )
        labels = f" labels={shlex.quote(public(data.labels))}" if data.labels else ""
        labels += " several=true" * data.several
        if data.labels and (source.codes(evenly_spaced(len(source), SAMPLE)) < 0).any():
            return f"{text}; `dino-vit predict {images}{labels} output=rest.csv` labels the other images"
        return f"{text}; `dino-vit knn {images}{labels}` classifies each image by the others"


def start_record(state: TrainingState) -> Start:
    """Return what is recorded of a start."""
    run, student = state.run, state.student
    total, backbone = (sum(p.numel() for p in part.parameters()) for part in (student, student.backbone))
    return Start(
        step=state.step,
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        torch=torch.__version__,
        device=device_name(state.device),
        processes=state.accelerator.num_processes,
        precision=run.precision,
        workers=state.loader.workers,
        global_batch=run.global_batch,
        images=len(state.source),
        steps_per_epoch=run.steps_per_epoch,
        total_steps=state.total_steps,
        parameters={"backbone": backbone, "head": total - backbone},
        reasons={choice.key: choice.reason for choice in run.choices},
    )


def describe_baseline(state: TrainingState, baseline: Baseline) -> str:
    """Return what the untrained network and simpler means reach."""
    if baseline.knn is None or baseline.levelled_knn is None:
        ways = f"in about {baseline.rankme:.0f} ways (effective rank)"
        return f"before the first step the network tells images apart {ways}"
    levels, network = baseline.figures(), "initial weights" if state.config.init else "untrained network"
    guesses = ", ".join(f"{title} {levels[name]:.1f}" for name, title in GUESSES.items() if name in levels)
    return (
        f"before the first step, {describe_knn(baseline)} (%): {network} {baseline.knn:.1f} by the "
        f"CLS token, {baseline.levelled_knn:.1f} by CLS and levelled cells; "
        f"without a network, levelled if better: {guesses}"
    )


def describe_start(state: TrainingState, start: Start) -> Iterator[str]:
    """Yield lines on the devices, the images, the network and what was chosen; all with `compute.verbose`."""
    run, config, is_resumed = state.run, state.config, state.saved_step is not None
    processes = plural(start.processes, "process", "processes")
    verbose = config.compute.verbose
    readers = plural(start.workers, "worker") + " each" * (start.processes > 1)
    yield (
        f"dino-vit {__version__}: {processes} on {state.device.type}, precision {start.precision}, "
        f"{readers}, global batch {start.global_batch}"
    )
    epochs, minutes = start.total_steps / run.steps_per_epoch, config.budget.minutes
    length = f"{plural(start.total_steps, 'step')} ({epochs:.4g} epochs)"
    length = f"about {length} in budget.minutes={minutes:g}" if minutes else length
    yield (
        f"{start.images:,} images of {config.data.images}: {plural(start.steps_per_epoch, 'step')} "
        f"per epoch (each image once), {length}, peak lr {state.plan.lr:.3g}"
    )
    if verbose or not is_resumed:  # or its first start has said it
        yield from run.notes
        yield (
            f"{config.model.title} ({start.parameters['backbone'] / 1e6:.1f} M parameters, projection head "
            f"{start.parameters['head'] / 1e6:.1f} M); views {config.views.title}"
        )
        if state.sharded:
            yield "each process holds a part of the weights, their averages and the optimiser's state (FSDP)"
        yield COLUMNS_HELP
    if verbose or len(run.choices) <= FEW_CHOICES:
        for reason, alike in groupby(run.choices, attrgetter("reason")):
            chosen = ", ".join(f"{choice.key}={write_yaml(choice.value)}" for choice in alike)
            yield f"  {chosen}: {reason}"
    else:
        chosen = f"{len(run.choices)} settings were chosen to fit the images and the length of the run"
        yield f"{chosen} (config.yaml; compute.verbose=true and `dino-vit report` give the reasons)"
    path = state.checkpoints.path(state.step)
    if is_resumed and state.is_done:
        larger = "a larger budget with compute.resume=changed goes on from"
        yield f"all {state.total_steps:,} steps were taken before; {larger} {path}"
    elif is_resumed:
        yield f"resuming after step {state.step:,} from {path}"

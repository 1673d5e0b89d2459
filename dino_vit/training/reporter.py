"""Log a run on rank 0: its start, its readings, its result. Nothing here changes the state."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Self

import torch

from dino_vit import __version__
from dino_vit.config import yaml
from dino_vit.config.display import to_yaml
from dino_vit.config.settings import values
from dino_vit.core import log
from dino_vit.core.progress import plural
from dino_vit.core.runtime import cores_of_a_process, device_name
from dino_vit.core.storage import StorageError, write_bytes
from dino_vit.core.text import printable
from dino_vit.training.diagnosis import PATIENCE, begins_to_wait
from dino_vit.training.readings import (
    BASELINE,
    Baseline,
    ParameterCounts,
    Reading,
    Start,
    append_record,
    drop_later_readings,
    read_records,
    to_json,
)
from dino_vit.training.setup import ReadyRun
from dino_vit.training.terminal import RunProgress
from dino_vit.training.verdict import Circumstances, circumstances, diagnose, summarise
from dino_vit.views.costs import advice_on_waiting

NAMES = {
    "knn": "k-NN",
    "rankme": "effective rank",
    "best_knn": "k-NN of the best features",
    "raw_pixels": "raw pixels",
    "largest_class": "largest class",
}


class Reporter:
    """Log a run to the terminal, to its folder and to trackers; do nothing on other ranks."""

    def __init__(
        self,
        run: ReadyRun,
        *,
        on_reading: Callable[[Reading], object] | None = None,
        on_checkpoint: Callable[[Path], object] | None = None,
    ) -> None:
        self.run, self.state = run, run.state
        self.on_reading, self.on_checkpoint = on_reading, on_checkpoint
        config, accelerator = self.state.config, self.state.accelerator
        self.main = bool(accelerator.is_main_process)
        self.progress = RunProgress(
            total_steps=self.state.plan.total_steps,
            step=self.state.step,
            stream=sys.stderr if log.isEnabledFor(logging.INFO) else StringIO(),
        )
        self.metrics = self.state.folder / "metrics.jsonl"
        self.readings: list[Reading] = []
        self.path_of_baseline = self.state.folder / "baseline.json"
        self.baseline: Baseline | None = None
        if self.main:
            self._write_config(to_yaml(config))
            # A run that was killed may have logged steps that come after its last checkpoint.
            self.readings = drop_later_readings(self.metrics, self.state.step)
            if self.state.step:
                self.baseline = next(iter(read_records(self.path_of_baseline, BASELINE)), None)
        # Trackers take numbers and text only.
        plain = {key: v if isinstance(v, int | float) else printable(v) for key, v in values(config).items()}
        accelerator.init_trackers("logs", config=plain)

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(*error)
        for tracker in self.state.accelerator.trackers:
            tracker.finish()

    def _write_config(self, text: str) -> None:
        """Write the settings unless they are unchanged: on a full disk a good file must stay untouched."""
        path = self.state.folder / "config.yaml"
        if not path.exists() or path.read_bytes() != text.encode():
            write_bytes(path, text.encode())

    def start(self) -> None:
        """Describe the run, and record this start in `starts.jsonl`."""
        for line in describe_start(self.run):
            self.progress.notice(line)
        if self.main and self.state.step < self.state.plan.total_steps:
            try:
                append_record(self.state.folder / "starts.jsonl", asdict(start_record(self.run)))
            except OSError as error:  # a full disk may be freed before the next checkpoint
                self.progress.notice(f"starts.jsonl could not be written: {error}")

    def log_baseline(self, baseline: Baseline) -> None:
        """Log the evaluation before the first step."""
        self.baseline, figures = baseline, baseline.figures()
        queries = figures.pop("queries", 0)
        text = ", ".join(f"{NAMES.get(name, name)} {value:.1f}" for name, value in figures.items())
        of = f", of {plural(int(queries), 'image')} in per cent" if queries else ""
        self.progress.notice(f"before the first step: {text}{of}")
        self.progress.start_clock()
        self.state.accelerator.log({f"eval/{name}": value for name, value in figures.items()}, step=0)
        if self.main:
            try:
                write_bytes(self.path_of_baseline, to_json(asdict(baseline)))
            except StorageError as error:  # a full disk may be freed before the next checkpoint
                self.progress.notice(str(error))

    def log(self, reading: Reading) -> None:
        """Log a reading, with what it says about the run."""
        if not self.main:
            return
        self.readings.append(reading)
        diagnosis = diagnose(self.readings, self._circumstances())
        self.readings[-1] = replace(reading, state=diagnosis.state)
        self.progress.show(reading, diagnosis)
        if begins_to_wait(self.readings):
            self.progress.notice(self._advice_on_waiting())
        try:
            append_record(self.metrics, self.readings[-1].to_record())
            self.state.accelerator.log(reading.scalars(), step=reading.step)
        except OSError as error:  # a full disk may be freed before the next checkpoint
            self.progress.notice(f"step {reading.step:,}: the reading could not be written. {error}")
        if self.on_reading:
            self.on_reading(self.readings[-1])

    def _advice_on_waiting(self) -> str:
        state, last = self.state, self.readings[-PATIENCE:]
        advice = advice_on_waiting(
            state.config,
            state.interval.loading,
            self.run.sizes,
            workers=state.loader.workers,
            cores=cores_of_a_process(state.accelerator.num_processes),
        )
        share = sum(reading.data_wait for reading in last) / len(last)
        return f"step {state.step:,}: the run waits for images {share:.0%} of its time; {advice}"

    def saved(self, path: Path) -> None:
        """Note that a checkpoint is on the disk."""
        self.progress.saved_step = self.state.saved_step
        if self.on_checkpoint:
            self.on_checkpoint(path)

    def _circumstances(self) -> Circumstances:
        return circumstances(self.state.config, self.readings, self.baseline, len(self.state.source))

    def stop(self) -> None:
        """Say how a run that was asked to stop resumes."""
        if self.state.saved_step == self.state.step:
            self.progress.notice(f"saved at step {self.state.step:,}; run the same command to resume")

    def finish(self) -> None:
        """Say what has come of the run, and where it is."""
        if self.main:
            self.progress.notice(summarise(self.readings, self._circumstances()))
        best = self.state.best
        text = (
            f", the best by {best['figure']} ({best['value']:.1f}) at step {best['step']:,}" if best else ""
        )
        self.progress.notice(f"done: {self.state.checkpoints.folder} holds the last step{text}")


def parameter_counts(run: ReadyRun) -> ParameterCounts:
    """Return the number of parameters of the backbone and of its heads."""
    student = run.state.student
    whole, backbone = (sum(p.numel() for p in part.parameters()) for part in (student, student.backbone))
    return ParameterCounts(backbone=backbone, head=whole - backbone)


def start_record(run: ReadyRun) -> Start:
    """Return what is recorded of a start."""
    state, plan = run.state, run.state.plan
    return Start(
        step=state.step,
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        torch=torch.__version__,
        device=device_name(state.device),
        cores=cores_of_a_process(state.accelerator.num_processes),
        processes=state.accelerator.num_processes,
        precision=state.precision,
        workers=state.loader.workers,
        global_batch=plan.global_batch,
        images=len(state.source),
        steps_per_epoch=plan.steps_per_epoch,
        total_steps=plan.total_steps,
        parameters=parameter_counts(run),
        reasons={choice.key: choice.reason for choice in run.choices},
    )


def describe_start(run: ReadyRun) -> Iterator[str]:
    """Yield lines on the devices, the images, the network, and the reason for each choice."""
    state, config, plan = run.state, run.state.config, run.state.plan
    processes = state.accelerator.num_processes
    loaders = plural(state.loader.workers, "loader process", "loader processes")
    factors = (
        f"{plural(config.data.batch_size, 'image')} × {plural(config.optim.accumulate, 'pass', 'passes')} "
        f"× {plural(processes, 'process', 'processes')}"
    )
    yield (
        f"dino-vit {__version__}: {plural(processes, 'process', 'processes')} on {state.device.type}, "
        f"precision {state.precision}, {loaders}{' each' if processes > 1 else ''}, "
        f"global batch {plan.global_batch} = {factors}"
    )
    yield (
        f"{len(state.source):,} images of {config.data.source}: {plural(plan.steps_per_epoch, 'step')} "
        f"per epoch, {plural(plan.total_steps, 'step')} ({plan.epochs:.4g} epochs), peak lr {plan.lr:.3g}"
    )
    yield from run.notes
    parameters = parameter_counts(run)
    views = config.views
    yield (
        f"{config.model.title} ({parameters.backbone / 1e6:.1f} M parameters, projection head "
        f"{parameters.head / 1e6:.1f} M); views {views.global_count} × {views.global_size} px and "
        f"{views.local_count} × {views.local_size} px"
    )
    if state.sharded:
        yield "each process holds a part of the weights, their averages and the optimiser's state (FSDP)"
    for choice in run.choices:
        yield f"  {choice.key}={yaml.write(choice.value)}: {choice.reason}"
    if run.resumed:
        yield f"resuming after step {state.step:,} from {run.resumed}"

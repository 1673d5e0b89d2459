"""What a run tells while it runs: measured on the device, read at intervals, with what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from torch import Tensor

from dino_vit.config.display import to_yaml
from dino_vit.config.settings import values
from dino_vit.core.checkpoint import NotFinite
from dino_vit.core.distributed import all_reduce_mean, world_size
from dino_vit.core.runtime import DTYPES
from dino_vit.core.storage import StorageError, write_bytes
from dino_vit.eval.online import OnlineEvaluation
from dino_vit.method.loss import LossStatistics, loss_statistics
from dino_vit.models.pair import embedding_std
from dino_vit.training.diagnosis import Reading, diagnose
from dino_vit.training.feeding import build_preparation
from dino_vit.training.introduction import introduction, start_record
from dino_vit.training.meter import Meter
from dino_vit.training.monitor import MetricsFile, Progress, append_record, to_json
from dino_vit.training.opening import Opened
from dino_vit.training.unreadable import Unreadable
from dino_vit.views.loader import Batch


class Reporter:
    """Log, evaluate and save when it is time; only the first process speaks and writes."""

    def __init__(self, opened: Opened) -> None:
        self.opened, self.session = opened, opened.session
        config, accelerator = self.session.config, self.session.accelerator
        self.main = bool(accelerator.is_main_process)
        self.meter = Meter(self.session.device)
        self.readings: list[Reading] = []
        self.outputs: tuple[LossStatistics, Tensor, int] | None = None
        self.nonfinite_in_a_row = 0
        self.rolled_back_to: int | None = None
        plan = self.session.plan
        self.settled_step = max(plan.warmup_steps, plan.freeze_steps, plan.head_steps)
        self.saved_at: int | None = self.session.step if opened.resumed else None
        self.unreadable = Unreadable(self.session.folder, limit=config.data.max_unreadable)
        every = config.run.eval_every
        self.eval_steps = every * self.session.plan.steps_per_epoch if every else None
        precision = self.session.precision
        self.evaluation = OnlineEvaluation(
            source=self.session.source,
            preparation=build_preparation(config),
            seed=config.seed,
            autocast=DTYPES[precision] if precision != "no" else None,
        )
        self.stack = ExitStack()
        self.progress: Progress | None = None
        self.metrics: MetricsFile | None = None
        if self.main:
            self.session.folder.mkdir(parents=True, exist_ok=True)
            self._write_config(to_yaml(config))
            self.metrics = MetricsFile(self.session.folder, step=self.session.step)
            self.readings = [Reading.from_record(record) for record in self.metrics.read()]
            total, step = self.session.plan.total_steps, self.session.step
            self.progress = Progress(total_steps=total, step=step)
        plain = {key: v if isinstance(v, int | float) else str(v) for key, v in values(config).items()}
        accelerator.init_trackers("logs", config=plain)

    def __enter__(self) -> Self:
        if self.progress:
            self.stack.enter_context(self.progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.close()

    def _write_config(self, text: str) -> None:
        """Lay down the settings; on a disk that is full by now, a file that has them must stay untouched."""
        path = self.session.folder / "config.yaml"
        if not path.exists() or path.read_text() != text:
            write_bytes(path, text.encode())

    def _write_start(self) -> None:
        """Add this start to those of the run; on a disk that is full by now, the run goes on all the same."""
        try:
            append_record(self.session.folder / "starts.jsonl", start_record(self.opened))
        except OSError as error:
            self.notice(f"this start could not be written down. {error}")

    def notice(self, text: str) -> None:
        """Say a sentence that is to stay on the screen."""
        if self.progress:
            self.progress.notice(text)

    def start(self) -> None:
        """Say and write down what is about to run, and evaluate it as it stands if it is new."""
        for line in introduction(self.opened):
            self.notice(line)
        if self.main and self.session.step < self.session.plan.total_steps:
            self._write_start()
        if self.opened.resumed or not self.eval_steps:
            return
        figures = self._evaluate()
        pixels = self.evaluation.raw_pixels() if self.main else None
        if pixels is not None:
            figures["raw_pixels"] = pixels
        said = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in figures.items())
        self.notice(f"before the first step: {said}")
        self.session.accelerator.log({f"eval/{name}": value for name, value in figures.items()}, step=0)
        if self.main:
            write_bytes(self.session.folder / "baseline.json", to_json(figures))
        self.meter.restart()
        if self.progress:
            self.progress.start_clock()

    def wait(self, batches: Iterator[Batch]) -> Batch:
        """Take the next batch, and write down once what could not be read."""
        batch = self.meter.wait(batches)
        self.unreadable.count(batch)
        return batch

    def observe_outputs(self, loss: Tensor, cls: Tensor, teacher_logits: Tensor, temperature: float) -> None:
        """Take the measures of a pass that cost something, if its step is one that is logged."""
        if not self._is_logged(self.session.step + 1):
            return
        center = self.session.center.center
        statistics = loss_statistics(loss, teacher_logits, center, teacher_temperature=temperature)
        self.outputs = statistics, all_reduce_mean(embedding_std(cls)), len(teacher_logits) * world_size()

    def observe_step(self, loss: Tensor, norm: Tensor, finite: Tensor) -> None:
        """Count a step that was just taken or, not being finite, skipped."""
        self.meter.add(loss, norm, finite, self.session.plan.global_batch)

    def report(self) -> None:
        """Log, evaluate and save what is due after a step."""
        step = self.session.step
        if self.progress:
            self.progress.advance(step)
        if self._is_logged(step):
            self._log()
        is_best = self.session.best is not None and self.session.best["step"] == step
        if is_best or step % self.session.config.run.checkpoint_every == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint; one that cannot be written is said, and the last good one stays."""
        if self.saved_at == self.session.step:
            return
        try:
            self.session.save()
        except (NotFinite, StorageError) as error:
            self.notice(f"step {self.session.step:,}: no checkpoint was written. {error}")
        else:
            self.saved_at = self.session.step
            if self.progress:
                self.progress.saved(self.session.step)

    def leave(self) -> None:
        """Save because the run was asked to leave, and say how it goes on."""
        self.save()
        if self.saved_at == self.session.step:
            self.notice(f"saved at step {self.session.step:,}, as asked; the same command goes on from there")

    def finish(self) -> None:
        """Save the last step, and say where everything lies."""
        self.save()
        if self.saved_at != self.session.step:
            raise StorageError(
                f"the run is done but its last step is not saved; free space for {self.session.folder} "
                "and run the same command again"
            )
        best = self.session.best
        said = (
            f", the best by {best['figure']} ({best['value']:.1f}) at step {best['step']:,}" if best else ""
        )
        self.notice(f"done: {self.session.checkpoints.folder} holds the last step{said}")

    def rolled_back(self, step: int) -> None:
        """Begin anew after a step that was gone back to."""
        self.notice(
            f"{self.nonfinite_in_a_row} steps in a row were not finite: went back to the checkpoint of step "
            f"{step:,}"
        )
        self.rolled_back_to, self.saved_at, self.nonfinite_in_a_row = step, step, 0
        self.readings = [reading for reading in self.readings if reading.step <= step]
        self.meter = Meter(self.session.device)
        if self.main:
            self.metrics = MetricsFile(self.session.folder, step=step)

    def _log(self) -> None:
        """Read the interval, evaluate if it is time, and tell what came of it."""
        session, measured = self.session, self.meter.read()
        # While the scale of float16 can fall, losing steps is how it is found.
        searching = session.scaler.get_scale() > 1
        self.nonfinite_in_a_row = 0 if searching else measured.lost_in_a_row
        session.nonfinite_steps += measured.lost
        assert self.outputs is not None, "a step that is logged was not observed"
        statistics, spread, rows = self.outputs
        rates = session.rates(session.step - 1)
        reading = Reading(
            step=session.step,
            total_steps=session.plan.total_steps,
            epoch=session.step / session.plan.steps_per_epoch,
            loss=measured.loss,
            prototypes=session.config.head.prototypes,
            mean_output_entropy=float(statistics.mean_output_entropy),
            output_entropy=float(statistics.output_entropy),
            entropy_gap=float(statistics.entropy_gap),
            student_divergence=float(statistics.student_divergence),
            prototypes_in_use=int(statistics.prototypes_in_use),
            rows=rows,
            embedding_std=float(spread),
            gradient_norm=measured.gradient_norm,
            lr=rates.lr,
            weight_decay=rates.weight_decay,
            momentum=rates.momentum,
            teacher_temp=rates.teacher_temp,
            images_per_second=measured.images_per_second,
            data_wait=measured.data_wait,
            nonfinite_steps=session.nonfinite_steps,
        )
        if self._is_evaluated(session.step):
            figures = self._evaluate()
            reading = replace(reading, knn=figures.get("knn"), rankme=figures["rankme"])
        self.readings.append(reading)
        diagnosis = diagnose(self.readings, settled_step=self.settled_step)
        if self.metrics and self.progress:
            self.progress.show(reading, diagnosis)
            try:
                self.metrics.append(reading, diagnosis.state)
                session.accelerator.log(reading.scalars(), step=session.step)
            except OSError as error:  # a full disk may be freed before the next checkpoint
                self.notice(f"step {session.step:,}: the reading could not be written down. {error}")
        self.meter.restart()

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the teacher, and remember the best: by k-NN where there are labels, else by rank."""
        session = self.session
        figures = self.evaluation(session.teacher.backbone)
        figure = "knn" if "knn" in figures else "rankme"
        value = figures[figure]
        if session.step == 0:
            session.baseline = value if math.isfinite(value) else None
        elif math.isfinite(value) and (session.best is None or value > session.best["value"]):
            session.best = {"figure": figure, "value": value, "step": session.step}
        if session.config.init and session.baseline is not None and value < session.baseline:
            self.notice(
                f"step {session.step:,}: {figure} {value:.1f} is below the {session.baseline:.1f} of the "
                "weights it began with. Lower optim.lr or optim.layer_decay, or bring teacher.momentum "
                "nearer to 1"
            )
        return figures

    def _is_logged(self, step: int) -> bool:
        return step % self.session.config.run.log_every == 0 or self._is_evaluated(step)

    def _is_evaluated(self, step: int) -> bool:
        if self.eval_steps is None:
            return False
        return step % self.eval_steps == 0 or step == self.session.plan.total_steps

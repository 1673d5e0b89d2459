"""The state of a run between two steps: everything that a step touches or a checkpoint holds."""

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import BackgroundWriter, Checkpoint, Checkpoints, NotFinite, collect, restore
from dino_vit.core.distributed import broadcast_int, full_tensor
from dino_vit.core.runtime import DTYPES, Precision
from dino_vit.core.storage import digest
from dino_vit.data.image_set import ImageSet
from dino_vit.eval.online import OnlineEvaluation
from dino_vit.method.objective import Objective, output_statistics
from dino_vit.models.student_teacher import Masks, Network
from dino_vit.reports.metrics import DECISIVE, Baseline, MetricsRecord, OnlineFigures
from dino_vit.training.interval import Interval
from dino_vit.training.plan import Pace, Plan, ScheduleValues
from dino_vit.views.loader import PREFETCH, Batch, Loader, UnreadableImages

# What to do about a state that is not finite.
RESUME_ADVICE = (
    "Run it again with compute.resume=changed, and compute.precision=no or a lower optim.lr, optim.clip or "
    "loss.teacher_temp; it goes on from its last good checkpoint"
)
SLOW_STEPS = 2  # of a start: workers begin, networks are compiled
GROWTH = 1.1  # of the steps of this start, before the length is fitted again without a log line
# A run of some minutes changes its length if that is off by more than this share of the steps that are left.
REFIT_TOLERANCE = 0.1
MIN_EXTENSION = 0.01  # of the steps so far, when a run of some minutes ends


@dataclass(kw_only=True)
class TrainingState:
    """A run between two steps; `step` counts the optimiser steps taken."""

    config: PretrainConfig
    plan: Plan
    accelerator: Accelerator
    precision: Precision
    source: ImageSet
    loader: Loader
    augment: nn.Module
    student: Network
    wrapped: nn.Module  # the student, wrapped for distributed training
    sharded: bool  # whether each process has a part of the weights
    teacher: Network
    objective: Objective
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    evaluation: OnlineEvaluation
    checkpoints: Checkpoints
    unreadable: UnreadableImages
    weights_read: Mapping[str, str | None]  # digests of networks that stay as they are
    interval: Interval = field(init=False)
    writer: BackgroundWriter = field(init=False)
    rates: ScheduleValues = field(init=False)  # of the last step
    output_sums: dict[str, Tensor] = field(default_factory=dict)  # over the micro-batches of a logged step
    step: int = 0
    saved_step: int | None = None
    evaluated_by: str | None = None  # the digest of what the evaluations use
    best: dict[str, Any] | None = None  # figure, value, step
    best_written: dict[str, Any] | None = None  # with its checkpoint; counts if `best` cannot be written
    seconds_before: float = 0.0  # of the starts before this one
    began: float | None = None  # when this start began to train
    evaluation_seconds: float = 0.0  # that the last evaluation took
    evaluating: float = 0.0  # seconds of all evaluations in this start
    pace: Pace | None = None  # of a run of some minutes
    fitted: int = 0  # steps of this start after which the length was fitted

    def __post_init__(self) -> None:
        self.interval = Interval(self.device)
        self.writer = BackgroundWriter(self.checkpoints)

    @property
    def folder(self) -> Path:
        return Path(self.config.output)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    # To search the networks for their tensors in each step would cost the host as much as clipping.
    @cached_property
    def parameters(self) -> list[list[nn.Parameter]]:
        """The student's parameters: those of the backbone, and of each head."""
        return [list(part.parameters()) for part in self.student.children()]

    @cached_property
    def statistics(self) -> list[Tensor]:
        """The running statistics of BatchNorm in both networks."""
        return [*self.student.buffers(), *self.teacher.buffers()]

    @cached_property
    def ema_pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The teacher's tensors that follow the student's; also statistics, if the teacher sees no image."""
        networks, is_fixed = (self.teacher, self.student), self.objective.fixed_teacher is not None
        named = ([*n.named_parameters(), *(n.named_buffers() if is_fixed else ())] for n in networks)
        ours, theirs = map(dict, named)
        return [*ours.values()], [theirs[name] for name in ours]  # the student may have a head of its own

    def autocast(self) -> torch.autocast:
        dtype = DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "no")

    def views_of(self, batch: Batch) -> list[Tensor]:
        """Return a batch's views by size, ready for the networks."""
        on_device = {size: views.to(self.device, non_blocking=True) for size, views in batch.views.items()}
        if not batch.augment:  # the loader's workers did it
            return list(on_device.values())
        return [self.augment(views, batch.augment[size]) for size, views in on_device.items()]

    def masks_of(self, batch: Batch) -> Masks | None:
        """Return a batch's masks on the device."""
        return None if batch.masks is None else batch.masks.to(self.device)

    def evaluate(self) -> OnlineFigures:
        """Evaluate the teacher; update the best result: k-NN by labels, otherwise the rank."""
        figures = self._timed_evaluation()
        figure = next(name for name in DECISIVE if getattr(figures, name) is not None)
        value, best = getattr(figures, figure), self.best
        # A NaN is never the best. Rank 0 decides, since figures of others may differ by rounding, and a
        # checkpoint of shards needs all.
        if broadcast_int(math.isfinite(value) and (best is None or value > best["value"])):
            self.best = {"figure": figure, "value": value, "step": self.step}
        return figures

    def _timed_evaluation(self) -> OnlineFigures:
        start = time.perf_counter()
        with torch.compiler.set_stance("force_eager"):  # its batches would be compiled size by size
            figures: OnlineFigures = self.teacher.run_unsharded(self.evaluation)
        self.evaluation_seconds = time.perf_counter() - start
        self.evaluating += self.evaluation_seconds
        return figures

    def evaluation_digest(self) -> str:
        """Return a digest of the images and labels that evaluations use."""
        evaluation = self.evaluation
        facts = {
            "images": [evaluation.source.fingerprint, evaluation.indices],
            "labels": evaluation.targets.tolist(),
            "classes": list(evaluation.source.labels.names) if evaluation.has_labels else [],
        }
        return digest({}, {"labels": json.dumps(facts)})

    @property
    def is_best(self) -> bool:
        """Whether the best evaluation is that of this step."""
        return self.best is not None and self.best["step"] == self.step

    def evaluate_baseline(self) -> Baseline:
        """Evaluate the network before the first step and, on rank 0, what needs no network."""
        figures = self._timed_evaluation()
        guesses = self.evaluation.guesses() if self.accelerator.is_main_process else None
        return Baseline(**asdict(figures), **(asdict(guesses) if guesses else {}))

    @property
    def seconds(self) -> float:
        """The seconds of training so far, in all starts."""
        return self.seconds_before + (0.0 if self.began is None else time.monotonic() - self.began)

    @property
    def seconds_left(self) -> float | None:
        """The seconds that are left of `budget.minutes`."""
        minutes = self.config.budget.minutes
        return None if minutes is None else 60 * minutes - self.seconds

    @property
    def steps_ahead(self) -> int:
        """The steps whose images workers may have made ahead."""
        return math.ceil(self.loader.workers * PREFETCH / self.config.optim.accumulate)

    def begin_pace(self) -> None:
        """Begin to time steps, if the length is to fit `budget.minutes`."""
        if self.seconds_left is None or self.config.budget.minutes is None:
            return
        left, evaluations = self._without_evaluations(self.seconds_left)
        planned = left / max(self.plan.total_steps - self.step, 1) - evaluations
        budget, untimed = 60 * self.config.budget.minutes, SLOW_STEPS + self.steps_ahead
        self.pace = Pace(max(planned, 1e-6), budget=budget, untimed=untimed)

    def refit(self, *, logged: bool = False) -> None:
        """Count the step that was taken, and fit the length to what is left of `budget.minutes`.

        That is at a log line, and before as the steps of a start become more: all processes do so at the same
        steps.
        """
        if self.pace is None:
            return
        self.pace.count(self.seconds - self.evaluating)
        if logged or self.pace.taken >= GROWTH * self.fitted:
            self.fitted = self.pace.taken
            # The last step must be one that is logged.
            self._fit(self.pace.seconds, least=0 if logged else 1)

    def _without_evaluations(self, left: float) -> tuple[float, float]:
        """Return the time left without the evaluation at the end, and what the others add to each step."""
        interval = self.plan.steps_between_evaluations
        if interval is None:
            return left, 0.0
        return left - self.evaluation_seconds, self.evaluation_seconds / float(interval)

    def _fit(self, pace: float, *, least: int) -> None:
        """Fit the length to the time that is left, at some seconds per step, if it is clearly off."""
        left, evaluations = self._without_evaluations(self.seconds_left or 0.0)
        more = int(max(left, 0.0) / max(pace + evaluations, 1e-6))
        planned = self.plan.total_steps - self.step
        # A step or two at the end would only be evaluated again.
        more = max(more if more > MIN_EXTENSION * self.step else 0, least)
        is_off = abs(more - planned) > max(REFIT_TOLERANCE * planned, MIN_EXTENSION * self.plan.total_steps)
        total = broadcast_int(self.step + (more if is_off else planned))
        self.plan = self.plan.with_total(total, self.step)

    def read_interval(self) -> MetricsRecord:
        """Return the numbers of a log line; the host waits for the device here."""
        statistics = output_statistics(self.output_sums, self.config.optim.accumulate)
        outputs: dict[str, Any] = {name: value.item() for name, value in statistics.items()}
        return MetricsRecord(
            step=self.step,
            total_steps=self.plan.total_steps,
            epoch=self.step / self.plan.steps_per_epoch,
            prototypes=self.objective.prototypes,
            **self.interval.read(),
            **self.rates._asdict(),
            **outputs,
        )

    def check_skipped(self) -> None:
        """End the run after too many skipped steps in a row; the host waits for the device here.

        Going back to a checkpoint would not help: the batch and the state are functions of the step, so the
        same steps would fail again.
        """
        if most := self.interval.too_many_skipped():
            raise NotFinite(
                f"by step {self.step}, {most} steps in a row were not finite and were skipped. "
                f"{RESUME_ADVICE}. See unreadable.txt for damaged images"
            )

    def begin_save(self) -> None:
        """Begin to write a checkpoint on rank 0; the state may change as soon as this returns."""
        main = self.accelerator.is_main_process
        if main or self.sharded:  # then all processes must give their parts
            tensors = collect(self._modules(), self.optimizer)
            # One at a time, since the device may not hold all gathered ones.
            parts = ((name, full_tensor(tensor)) for name, tensor in tensors.items())
            if main:
                self.writer.begin(self.step, parts, self._metadata())
            else:
                deque(parts, maxlen=0)
        if not main:
            self.saved_step = self.step

    def _metadata(self) -> dict[str, Any]:
        return {
            "architecture": self.teacher.backbone.architecture,
            **self.config.data.model_dump(include={"mean", "std", "bits", "range"}),
            "network": None,  # a checkpoint holds two; who loads it chooses
            "config": self.config.model_dump(mode="json"),
            "global_batch": self.plan.global_batch,
            "source": self.source.fingerprint,
            "stamp": self.source.stamp,
            "precision": self.precision,
            **self.weights_read,
            "evaluated_by": self.evaluated_by,
            "scaler": self.scaler.state_dict(),
            "nonfinite_steps": int(self.interval.skipped),
            "interval": self.interval.sums(),
            "best": self.best,
            "total_steps": self.plan.total_steps,
            "schedule": {name: getattr(self.plan, name) for name in ("length", "since", "position")},
            "seconds": self.seconds,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore from a checkpoint."""
        restore(checkpoint, self._modules(), self.optimizer)
        if checkpoint.metadata["scaler"]:  # empty except in float16
            self.scaler.load_state_dict(checkpoint.metadata["scaler"])
        self.step = self.saved_step = checkpoint.step
        self.checkpoints.kept_steps |= {*checkpoint.metadata["kept_steps"]}
        self.interval.restore(checkpoint.metadata["interval"], checkpoint.metadata["nonfinite_steps"])
        self.best = self.best_written = checkpoint.metadata["best"]
        self.evaluated_by = checkpoint.metadata["evaluated_by"]
        self.seconds_before = checkpoint.metadata["seconds"]
        was = checkpoint.metadata["config"]["budget"]["minutes"]
        if self.config.budget.minutes is not None:
            self.plan = replace(self.plan, **checkpoint.metadata["schedule"])
        if self.config.budget.minutes not in (None, was) and self.step:
            is_done = self.step >= self.plan.total_steps
            self._fit(self.seconds / self.step, least=0)
            if is_done:  # at the end of its schedules the teacher would stay as it is
                self.plan = replace(self.plan, length=self.plan.total_steps, since=0, position=0.0)

    def _modules(self) -> dict[str, nn.Module]:
        return {"student": self.student, "teacher": self.teacher, **self.objective.centers}

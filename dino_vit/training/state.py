"""The state of a run between two steps: everything that a step touches or a checkpoint holds."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.config.complete import DecidedRun
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import BackgroundWriter, Checkpoint, Checkpoints, collect, restore
from dino_vit.core.distributed import full_tensor
from dino_vit.core.runtime import DTYPES
from dino_vit.data.image_set import ImageSet
from dino_vit.method.objective import Objective
from dino_vit.models.student_teacher import Network
from dino_vit.training.evaluations import Evaluations
from dino_vit.training.interval import Interval
from dino_vit.training.plan import Clock, Plan, PlannedStep, ScheduleValues
from dino_vit.views.loader import Batch, Loader, UnreadableImages


@dataclass(kw_only=True)
class TrainingState:
    """A run between two steps; `step` counts the optimiser steps taken."""

    run: DecidedRun
    plan: Plan
    clock: Clock
    accelerator: Accelerator
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
    evaluations: Evaluations
    checkpoints: Checkpoints
    unreadable: UnreadableImages
    weights_read: Mapping[str, str | None]  # digests of networks that stay as they are
    interval: Interval = field(init=False)
    writer: BackgroundWriter = field(init=False)
    planned: PlannedStep = field(default_factory=PlannedStep)  # of the last step
    rates: ScheduleValues = field(init=False)  # of the last step
    step: int = 0
    # The first step of this start, and the share of the minutes by then.
    first: tuple[int, float] | None = None
    saved_step: int | None = None

    def __post_init__(self) -> None:
        self.interval = Interval(self.device)
        self.writer = BackgroundWriter(self.checkpoints)

    @property
    def config(self) -> PretrainConfig:
        return self.run.config

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
        """The teacher's tensors and those of the student that they follow.

        With a frozen teacher in its place, the average sees no images, so BatchNorm statistics follow too.
        """
        networks, is_frozen = (self.teacher, self.student), self.objective.frozen_teacher is not None
        named = ([*n.named_parameters(), *(n.named_buffers() if is_frozen else ())] for n in networks)
        teacher, student = map(dict, named)
        return [*teacher.values()], [student[name] for name in teacher]  # the student may have another head

    def autocast(self) -> torch.autocast:
        precision = self.run.precision
        return torch.autocast(self.device.type, dtype=DTYPES[precision], enabled=precision != "no")

    def views_of(self, batch: Batch) -> list[Tensor]:
        """Return a batch's views by size, ready for the networks."""
        on_device = {size: views.to(self.device, non_blocking=True) for size, views in batch.views.items()}
        return [self.augment(views, batch.augment[size]) for size, views in on_device.items()]

    @property
    def is_done(self) -> bool:
        """Whether all steps were taken: as many as were planned, or the last one of the minutes."""
        return self.planned.is_last if self.clock.budget else self.step >= self.plan.length

    @property
    def total_steps(self) -> int:
        """The steps of the run; with `budget.minutes` as many as are expected by now."""
        share, (first, start) = self.clock.share, self.first or (0, 1.0)
        if share is None or self.is_done:
            return self.plan.length if share is None else self.step
        if share <= start:
            return max(self.plan.length, self.step + 1)
        return self.step + max(1, round((1 - share) * (self.step - first) / (share - start)))

    def begin_step(self) -> None:
        """Look up what is planned for the next step."""
        if (share := self.clock.share) is None:
            self.planned = self.plan.by_step(self.step)
        else:
            self.first = self.first or (self.step, share)
            is_last, before = self.clock.is_last, self.planned.at
            self.planned = self.plan.by_clock(share, before, is_last=is_last)
        self.rates = self.plan.rates(self.planned.at)

    def begin_save(self) -> None:
        """Begin to write a checkpoint on rank 0; the state may change as soon as this returns."""
        main = self.accelerator.is_main_process
        self.clock.saved = self.clock.elapsed
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
            "chosen": sorted(self.run.chosen),
            "global_batch": self.run.global_batch,
            "source": self.source.fingerprint,
            "precision": self.run.precision,
            **self.weights_read,
            "evaluated_by": self.evaluations.measured_on,
            "scaler": self.scaler.state_dict(),
            "nonfinite_steps": int(self.interval.skipped),
            "interval": self.interval.sums(),
            "best": self.evaluations.best,
            "total_steps": self.total_steps,
            "length": self.plan.length,
            "planned_step": list(self.planned),
            "seconds": self.clock.seconds,
            "evaluated_images": self.run.evaluated_images,
            "evaluation_seconds": self.clock.reserve,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore from a checkpoint."""
        metadata = checkpoint.metadata
        restore(checkpoint, self._modules(), self.optimizer)
        if metadata["scaler"]:  # empty except in float16
            self.scaler.load_state_dict(metadata["scaler"])
        self.step = self.saved_step = checkpoint.step
        self.checkpoints.kept_steps |= {*metadata["kept_steps"]}
        self.interval.restore(metadata["interval"], metadata["nonfinite_steps"])
        self.evaluations.best = self.evaluations.best_written = metadata["best"]
        self.evaluations.measured_on = metadata["evaluated_by"]
        self.clock.before = self.clock.elapsed = self.clock.saved = metadata["seconds"]
        self.clock.reserve = metadata["evaluation_seconds"]
        self.planned = PlannedStep(*metadata["planned_step"])
        if self.config.budget.minutes not in (None, metadata["config"]["budget"]["minutes"]):
            share = self.clock.share or 0.0  # the schedules are those of other minutes
            self.planned = PlannedStep(share * self.plan.length, is_last=share >= 1)

    def _modules(self) -> dict[str, nn.Module]:
        return {"student": self.student, "teacher": self.teacher, **self.objective.state}

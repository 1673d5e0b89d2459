"""A run between two steps: everything that a step touches, and its state on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.config.checks import Plan
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoint, Checkpoints, collect, optimizer_names, restore
from dino_vit.core.runtime import DTYPES, Precision
from dino_vit.data.sampling_weights import fingerprint
from dino_vit.data.sources.open import Source
from dino_vit.method.loss import Center
from dino_vit.method.schedules import warmup_constant, warmup_cosine
from dino_vit.models.pair import Network
from dino_vit.views.loader import Batch, Loader
from dino_vit.views.photometry import Augment


class Rates(NamedTuple):
    """What the schedules say of one step."""

    lr: float
    weight_decay: float
    momentum: float
    teacher_temp: float


@dataclass(kw_only=True)
class Session:
    """A run between two steps; `step` counts the optimiser steps that are done."""

    config: PretrainConfig
    plan: Plan
    accelerator: Accelerator
    precision: Precision
    source: Source
    loader: Loader
    augment: Augment
    student: Network
    wrapped: nn.Module  # the student, as the processes share it
    teacher: Network
    center: Center
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    checkpoints: Checkpoints
    step: int = 0
    nonfinite_steps: int = 0
    best: dict[str, Any] | None = None  # figure, value, step
    baseline: float | None = None  # that figure before the first step

    @property
    def folder(self) -> Path:
        return Path(self.config.output)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def views(self) -> int:
        return self.config.views.global_count + self.config.views.local_count

    def autocast(self) -> torch.autocast:
        dtype = DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "no")

    def views_of(self, batch: Batch) -> list[Tensor]:
        """Return a batch's views by size, ready for the networks."""
        there = {size: cut.to(self.device, non_blocking=True) for size, cut in batch.views.items()}
        if not batch.photometry:  # a worker saw to it
            return list(there.values())
        return [self.augment(cut, batch.photometry[size]) for size, cut in there.items()]

    def rates(self, step: int) -> Rates:
        """Return what the schedules say of a step."""
        optim, teacher, loss, total = (
            self.config.optim,
            self.config.teacher,
            self.config.loss,
            self.plan.total_steps,
        )
        return Rates(
            lr=warmup_cosine(
                step, base=self.plan.lr, final=optim.min_lr, total=total, warmup=self.plan.warmup_steps
            ),
            weight_decay=warmup_cosine(
                step, base=optim.weight_decay, final=optim.weight_decay_end, total=total
            ),
            momentum=warmup_cosine(step, base=teacher.momentum, final=teacher.momentum_end, total=total),
            teacher_temp=warmup_constant(
                step // self.plan.steps_per_epoch,
                start=loss.warmup_teacher_temp,
                final=loss.teacher_temp,
                warmup=loss.warmup_teacher_temp_epochs,
            ),
        )

    def save(self) -> Path | None:
        """Write a checkpoint of this moment from the first process, if the state is sound."""
        if not self.accelerator.is_main_process:
            return None
        tensors = collect(self._modules(), self.optimizer, self._names())
        metadata = {
            "architecture": self.teacher.backbone.architecture,
            "mean": self.config.data.mean,
            "std": self.config.data.std,
            "bits": self.config.data.bits,
            "range": self.config.data.range,
            "network": None,
            "config": self.config.model_dump(mode="json"),
            "global_batch": self.plan.global_batch,
            "source": self.source.fingerprint,
            "weights": fingerprint(self.loader.sampler.weights),
            "precision": self.precision,
            "scaler": self.scaler.state_dict(),
            "nonfinite_steps": self.nonfinite_steps,
            "best": self.best,
            "baseline": self.baseline,
        }
        return self.checkpoints.save(self.step, tensors, metadata)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Become what a checkpoint says."""
        restore(checkpoint, self._modules(), self.optimizer, self._names())
        if checkpoint.metadata["scaler"]:  # empty but for float16
            self.scaler.load_state_dict(checkpoint.metadata["scaler"])
        self.step = checkpoint.step
        self.nonfinite_steps = checkpoint.metadata["nonfinite_steps"]
        self.best = checkpoint.metadata["best"]
        self.baseline = checkpoint.metadata["baseline"]

    def _modules(self) -> dict[str, nn.Module]:
        return {"student": self.student, "teacher": self.teacher, "loss": self.center}

    def _names(self) -> list[str]:
        return optimizer_names(self.optimizer, self.student)

"""The state of a run between two steps: everything that a step touches or a checkpoint holds."""

import math
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import BackgroundWriter, Checkpoint, Checkpoints, NotFinite, collect, restore
from dino_vit.core.distributed import of_first_process, whole
from dino_vit.core.runtime import DTYPES, Precision
from dino_vit.core.text import brief
from dino_vit.data.sampling_weights import sampling_fingerprint
from dino_vit.data.sources.source import Source
from dino_vit.eval.classification.online import Figures, OnlineEvaluation
from dino_vit.method.objective import Objective
from dino_vit.models.masks import Masks
from dino_vit.models.student_teacher import Network
from dino_vit.training.measures import Interval, UnreadableImages
from dino_vit.training.plan import Plan
from dino_vit.training.readings import Baseline, Count, Reading
from dino_vit.views.loader import Batch, Loader

SHORTEST = 1e-3  # seconds of a pace
TOO_FEW = 0.01  # of the steps so far, when a run of some minutes ends


class Best(BaseModel):
    """The best evaluation of a run."""

    figure: str
    value: float
    step: Count


class Resumed(BaseModel):
    """What a run resumes from, in the metadata of a checkpoint."""

    step: Count
    global_batch: Annotated[Count, Field(gt=0)]
    nonfinite_steps: Count
    precision: str
    source: str
    config: PretrainConfig
    architecture: dict[str, Any]
    scaler: dict[str, float]
    interval: dict[str, FiniteFloat] | None = None  # checkpoints of 0.1.0 have none
    total_steps: Annotated[Count, Field(gt=0)] | None = None  # nor this
    seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    frozen: str | None = None  # digest of the weights of a frozen teacher
    best: Best | None = None


def check_resumable(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose metadata has what a run resumes from, or raise."""
    try:
        checked = Resumed.model_validate(checkpoint.metadata, strict=False)  # JSON has no tuples
    except ValidationError as error:
        wrong = dict.fromkeys(".".join(map(str, one["loc"])) for one in error.errors())
        raise ValueError(
            f"{checkpoint.path} is not a checkpoint of a pretraining: its metadata has no valid "
            f"{brief(', '.join(wrong))}; give another output, or move that folder away"
        ) from error
    values = checked.model_dump(exclude={"config"})
    return replace(checkpoint, metadata={**checkpoint.metadata, **values})


@dataclass(kw_only=True)
class TrainingState:
    """A run between two steps; `step` counts the optimiser steps taken."""

    config: PretrainConfig
    plan: Plan
    accelerator: Accelerator
    precision: Precision
    source: Source
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
    frozen_sha256: str | None = None  # of the teacher of `teacher.weights`
    interval: Interval = field(init=False)
    writer: BackgroundWriter = field(init=False)
    outputs: dict[str, Tensor] = field(default_factory=dict)  # measures of the teacher at a logged step
    step: int = 0
    saved_step: int | None = None
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best: dict[str, Any] | None = None  # figure, value, step
    seconds_before: float = 0.0  # of the starts before this one
    began: float | None = None  # when this start began to train
    first: tuple[float, int] | None = None  # when its first step began, and which that was

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

    def autocast(self) -> torch.autocast:
        dtype = DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "no")

    def views_of(self, batch: Batch) -> list[Tensor]:
        """Return a batch's views by size, ready for the networks."""
        on_device = {size: views.to(self.device, non_blocking=True) for size, views in batch.views.items()}
        if not batch.photometry:  # the loader's workers did it
            return list(on_device.values())
        return [self.augment(views, batch.photometry[size]) for size, views in on_device.items()]

    def masks_of(self, batch: Batch) -> Masks | None:
        """Return a batch's masks on the device."""
        if batch.masks is None or self.loader.masking is None:
            return None
        masks = batch.masks
        if self.config.run.compile:  # which wants the same shapes in all steps
            masks = masks.padded(self.loader.masking.most(len(batch.samples)))
        return masks.to(self.device)

    def evaluate(self) -> Figures:
        """Evaluate the teacher; update the best result: by k-NN where there are labels, otherwise by rank."""
        figures = self.teacher.use(self.evaluation)
        figure, value = ("rankme", figures.rankme) if figures.knn is None else ("knn", figures.knn)
        # A NaN is never the best.
        if math.isfinite(value) and (self.best is None or value > self.best["value"]):
            self.best = {"figure": figure, "value": value, "step": self.step}
        return figures

    def evaluate_baseline(self) -> Baseline:
        """Evaluate the network before the first step and, on rank 0, what needs no network."""
        figures = self.teacher.use(self.evaluation)
        guesses = self.evaluation.guesses() if self.accelerator.is_main_process else None
        return Baseline(**figures._asdict(), **(guesses._asdict() if guesses else {}))

    def start_clock(self) -> None:
        """Begin to count the seconds of training; call it again right before the first step."""
        self.first = time.monotonic(), self.step
        self.began = self.began or self.first[0]

    @property
    def seconds(self) -> float:
        """The seconds of training so far, in all starts."""
        return self.seconds_before + (0.0 if self.began is None else time.monotonic() - self.began)

    def refit(self) -> None:
        """Fit the schedules to the time that is left of `budget.minutes`, at the pace of this start."""
        minutes = self.config.budget.minutes
        if minutes is None or not self.step:
            return
        seconds, steps = self.seconds, self.step
        if self.first and self.step > self.first[1]:
            seconds, steps = time.monotonic() - self.first[0], self.step - self.first[1]
        if seconds < SHORTEST:  # of a checkpoint that does not say how long it took
            return
        left = max(60 * minutes - self.seconds, 0.0)
        more = int(left * steps / seconds)
        # A step or two at the end would only be evaluated again.
        total = of_first_process(self.step + (more if more > TOO_FEW * self.step else 0))
        self.plan = replace(self.plan, total_steps=total)

    def read_interval(self) -> Reading:
        """Return the numbers of a log line; the host waits for the device here."""
        interval = self.interval.read()
        outputs: dict[str, Any] = {name: value.item() for name, value in self.outputs.items()}
        # While float16's scale can still fall, skipped steps are how it is found.
        searching = self.scaler.get_scale() > 1
        self.skipped_in_a_row = 0 if searching else interval.skipped_in_a_row
        self.skipped_steps += interval.skipped
        return Reading(
            step=self.step,
            total_steps=self.plan.total_steps,
            epoch=self.step / self.plan.steps_per_epoch,
            prototypes=self.objective.prototypes,
            loss=interval.loss,
            gradient_norm=interval.gradient_norm,
            images_per_second=interval.images_per_second,
            data_wait=interval.data_wait,
            nonfinite_steps=self.skipped_steps,
            **self.plan.rates(self.step - 1)._asdict(),
            **outputs,
        )

    def check_skipped(self) -> None:
        """End the run after too many skipped steps in a row.

        Going back to a checkpoint would not help: the batch and the state are functions of the step, so the
        same steps would fail again.
        """
        if self.skipped_in_a_row >= self.config.run.max_nonfinite_steps:
            raise NotFinite(
                f"{self.skipped_in_a_row} steps in a row up to step {self.step} were not finite and were "
                f"skipped. {self.advice}; see unreadable.txt for damaged images"
            )

    @property
    def advice(self) -> str:
        """What to do about a state that is not finite."""
        settings = "run.precision=no, or a lower optim.lr, optim.clip or loss.teacher_temp"
        if not self.checkpoints.paths():
            return f"There is no checkpoint yet: start again with {settings}"
        folder = self.checkpoints.folder
        return (
            f"{folder} holds the last good checkpoint. Resume from it with run.resume=changed and {settings}"
        )

    def begin_save(self) -> None:
        """Begin to write a checkpoint on rank 0; the state may change as soon as this returns."""
        main = self.accelerator.is_main_process
        if main or self.sharded:  # then all processes must give their parts
            tensors = collect(self._modules(), self.optimizer)
            # One at a time, since the device may not hold all whole ones.
            parts = ((name, whole(tensor)) for name, tensor in tensors.items())
            if main:
                self.writer.begin(self.step, parts, self._metadata())
            else:
                deque(parts, maxlen=0)
        if not main:
            self.saved_step = self.step

    def finish_save(self, *, wait: bool) -> Path | None:
        """Return the path of a checkpoint that has come to the disk meanwhile, or raise why it did not."""
        path = self.writer.finish(wait=wait)
        if path is not None:
            self.saved_step = self.writer.step
        return path

    def _metadata(self) -> dict[str, Any]:
        return {
            "architecture": self.teacher.backbone.architecture,
            "mean": self.config.data.mean,
            "std": self.config.data.std,
            "bits": self.config.data.bits,
            "range": self.config.data.range,
            "network": None,  # a checkpoint holds two; who loads it chooses
            "config": self.config.model_dump(mode="json"),
            "global_batch": self.plan.global_batch,
            "source": self.source.fingerprint,
            "weights": sampling_fingerprint(self.loader.sampler.weights),
            "precision": self.precision,
            "frozen": self.frozen_sha256,
            "scaler": self.scaler.state_dict(),
            "nonfinite_steps": self.skipped_steps,
            "interval": self.interval.state(),
            "best": self.best,
            "total_steps": self.plan.total_steps,
            "seconds": self.seconds,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore from a checkpoint."""
        restore(checkpoint, self._modules(), self.optimizer)
        if checkpoint.metadata["scaler"]:  # empty except in float16
            self.scaler.load_state_dict(checkpoint.metadata["scaler"])
        self.step = self.saved_step = checkpoint.step
        self.skipped_steps = checkpoint.metadata["nonfinite_steps"]
        if interval := checkpoint.metadata["interval"]:
            self.interval.load_state(interval)
        self.best = checkpoint.metadata["best"]
        self.seconds_before = checkpoint.metadata["seconds"]
        self.refit()

    def _modules(self) -> dict[str, nn.Module]:
        return {"student": self.student, "teacher": self.teacher, **self.objective.modules()}

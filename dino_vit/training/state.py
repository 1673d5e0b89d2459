"""The state of a run between two steps: everything that a step touches or a checkpoint holds."""

import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import BackgroundWriter, Checkpoint, Checkpoints, NotFinite, collect, restore
from dino_vit.core.distributed import broadcast_int, full_tensor
from dino_vit.core.runtime import DTYPES, Precision
from dino_vit.core.storage import digest
from dino_vit.data.sources.source import Source, stamp_of
from dino_vit.eval.online import OnlineEvaluation, OnlineFigures
from dino_vit.method.objective import Objective
from dino_vit.models.student_teacher import Masks, Network
from dino_vit.training.metrics import DECISIVE, Baseline, MetricsRecord
from dino_vit.training.plan import Plan, ScheduleValues
from dino_vit.views.loader import Batch, Loader, UnreadableImages
from dino_vit.views.sampler import sampling_fingerprint

if TYPE_CHECKING:
    from dino_vit.eval.maps.online import OnlineSegmentation

# What to do about a state that is not finite.
ADVICE = (
    "Run it again with run.resume=changed, and run.precision=no or a lower optim.lr, optim.clip or "
    "loss.teacher_temp; it goes on from its last good checkpoint"
)
PACES = 9  # of the last log lines, whose median is the pace of a run of some minutes
FEW_PACES = 3  # the first of a start is slow: workers begin, networks are compiled
# A run of some minutes changes its length if that is off by more than this share of the steps that are left.
OFF = 0.1
TOO_FEW = 0.01  # of the steps so far, when a run of some minutes ends
MAX_SKIPPED = 5  # steps in a row; so many end the run
# What a checkpoint holds of an interval.
_SUMS = ("loss", "finite", "skipped_in_a_row")


class Interval:
    """Sums since the last log line; `read` is the only moment when the host waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of the whole run; `most_in_a_row` of this start, without steps by which float16 finds its scale.
        self.skipped, self.skipped_in_a_row, self.most_in_a_row = torch.zeros(3, device=device).unbind()
        self.most_seen = torch.zeros((), pin_memory=device.type == "cuda")  # by the host, some steps later
        self.loading = defaultdict[str, float](float)  # times of all batches since the start
        self.loaded = 0  # images of these
        self.restart()

    def restart(self) -> None:
        """Start a new interval; skipped steps and `loading` carry over."""
        self.loss, self.finite, self.norm = torch.zeros(3, device=self.device).unbind()
        self.start, self.waited, self.images = time.perf_counter(), 0.0, 0

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, and count the time that it took to arrive."""
        start = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - start
        for part, seconds in batch.times.items():
            self.loading[part] += seconds
        self.loaded += len(batch.samples)
        return batch

    def add(self, loss: Tensor, norm: Tensor, finite: Tensor, images: int, scale: Tensor | None = None) -> None:
        """Count a step, with its loss over all processes; `scale` is that of float16 gradients."""
        self.loss = self.loss + torch.where(finite, loss, 0.0)
        self.finite = self.finite + finite
        self.skipped = self.skipped + ~finite
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * ~finite
        # While float16's scale can still fall, skipped steps are how it is found.
        lasting = self.skipped_in_a_row if scale is None else self.skipped_in_a_row * (scale <= 1)
        self.most_in_a_row = torch.maximum(self.most_in_a_row, lasting)
        self.most_seen.copy_(self.most_in_a_row, non_blocking=True)
        self.norm = norm
        self.images += images

    @property
    def seems_stuck(self) -> bool:
        """Whether too many steps in a row were skipped, as far as the host knows without waiting."""
        return bool(self.most_seen >= MAX_SKIPPED)

    def read(self) -> dict[str, Any]:
        """Return the figures of the interval so far, by their names in a `MetricsRecord`."""
        mean = self.loss / self.finite  # of all processes; NaN if every step was skipped
        loss, norm, skipped = torch.stack((mean, self.norm, self.skipped)).tolist()
        seconds = time.perf_counter() - self.start
        return {
            "loss": loss,
            "gradient_norm": norm,  # of the last step
            "nonfinite_steps": int(skipped),
            "images_per_second": self.images / seconds,
            "data_wait": self.waited / seconds,
        }

    def sums(self) -> dict[str, float]:
        """Return the sums for a checkpoint, all but the times."""
        return {name: float(getattr(self, name)) for name in _SUMS}

    def restore(self, sums: Mapping[str, float], skipped: float) -> None:
        """Go on from the sums of a checkpoint."""
        for name in _SUMS:
            setattr(self, name, torch.tensor(sums[name], device=self.device))
        # An earlier version counted the skipped steps since the last log line apart.
        self.skipped = torch.tensor(skipped + sums.get("skipped", 0.0), device=self.device)


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
    segmentation: "OnlineSegmentation | None" = None
    checkpoints: Checkpoints
    unreadable: UnreadableImages
    weights_read: Mapping[str, str | None]  # digests of networks that stay as they are
    interval: Interval = field(init=False)
    writer: BackgroundWriter = field(init=False)
    rates: ScheduleValues = field(init=False)  # of the last step
    outputs: dict[str, Tensor] = field(default_factory=dict)  # statistics of a logged step
    step: int = 0
    saved_step: int | None = None
    evaluated_by: str | None = None  # the digest of what the evaluations use
    best: dict[str, Any] | None = None  # figure, value, step
    best_before: dict[str, Any] | None = None  # the one before, which counts if this one cannot be written
    seconds_before: float = 0.0  # of the starts before this one
    began: float | None = None  # when this start began to train
    evaluation_seconds: float = 0.0  # that the last evaluation took
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES))  # seconds per step, of intervals

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
    def averaged(self) -> tuple[list[Tensor], list[Tensor]]:
        """The teacher's tensors that follow the student's; also statistics, if the teacher sees no image."""
        networks, frozen = (self.teacher, self.student), self.objective.frozen is not None
        ours, theirs = ([*n.parameters(), *(n.buffers() if frozen else ())] for n in networks)
        return ours, theirs

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
        """Evaluate the teacher; update the best result: k-NN by labels, mIoU by masks, otherwise the rank."""
        figures = self._timed_evaluation()
        figure = next(name for name in DECISIVE if getattr(figures, name) is not None)
        value, best = getattr(figures, figure), self.best
        best = best if best and best["figure"] == figure else None  # before, mIoU did not decide
        # A NaN is never the best. Rank 0 decides, since figures of others may differ by rounding, and a
        # checkpoint of shards needs all.
        if broadcast_int(math.isfinite(value) and (best is None or value > best["value"])):
            self.best_before = self.best
            self.best = {"figure": figure, "value": value, "step": self.step}
        return figures

    def _timed_evaluation(self) -> OnlineFigures:
        start = time.perf_counter()
        with torch.compiler.set_stance("force_eager"):  # its batches would be compiled size by size
            figures: OnlineFigures = self.teacher.with_full_weights(self.evaluation)
            if self.segmentation:
                figures = replace(figures, **self.teacher.with_full_weights(self.segmentation))
        self.evaluation_seconds = time.perf_counter() - start
        return figures

    def evaluation_digest(self) -> str:
        """Return a digest of the images and labels, and of the masks, that evaluations use."""
        evaluation, masks = self.evaluation, self.segmentation
        of_masks = {**masks.learned, **masks.judged} if masks else {}
        facts = {
            "images": [evaluation.source.fingerprint, evaluation.indices],
            "labels": evaluation.targets.tolist(),
            "classes": list(evaluation.source.classes) if evaluation.has_labels else [],
            "masks": {index: classes.tolist() for index, classes in of_masks.items()},
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
        of_masks = self.segmentation.guesses if self.segmentation else {}
        return Baseline(**asdict(figures), **(asdict(guesses) if guesses else {}), **of_masks)

    @property
    def seconds(self) -> float:
        """The seconds of training so far, in all starts."""
        return self.seconds_before + (0.0 if self.began is None else time.monotonic() - self.began)

    def refit(self) -> None:
        """Fit the length to what is left of `budget.minutes`, if it is clearly off; called at a log line."""
        if self.config.budget.minutes is None:
            return
        steps = self.interval.images // self.plan.global_batch
        self.paces.append((time.perf_counter() - self.interval.start) / max(steps, 1))
        if len(self.paces) >= FEW_PACES:
            self._fit(median(self.paces))

    def _fit(self, pace: float) -> None:
        """Fit the length to the time that is left, at some seconds per step and with its evaluations."""
        left = 60 * (self.config.budget.minutes or 0.0) - self.seconds
        if interval := self.plan.steps_between_evaluations:
            pace += self.evaluation_seconds / interval
            left -= self.evaluation_seconds  # of the last, at the end
        more, planned = int(max(left, 0.0) / max(pace, 1e-6)), self.plan.total_steps - self.step
        # A step or two at the end would only be evaluated again.
        more = more if more > TOO_FEW * self.step else 0
        is_off = abs(more - planned) > max(OFF * planned, TOO_FEW * self.plan.total_steps)
        total = broadcast_int(self.step + (more if is_off else planned))
        self.plan = replace(self.plan, total_steps=total)

    def read_interval(self) -> MetricsRecord:
        """Return the numbers of a log line; the host waits for the device here."""
        outputs: dict[str, Any] = {name: value.item() for name, value in self.outputs.items()}
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
        most = int(self.interval.most_in_a_row)
        if most >= MAX_SKIPPED:
            raise NotFinite(
                f"by step {self.step}, {most} steps in a row were not finite and were skipped. "
                f"{ADVICE}. See unreadable.txt for damaged images"
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
            "files": stamp_of(self.source),
            "weights": sampling_fingerprint(self.loader.sampler.weights),
            "precision": self.precision,
            **self.weights_read,
            "evaluated_by": self.evaluated_by,
            "scaler": self.scaler.state_dict(),
            "nonfinite_steps": int(self.interval.skipped),
            "interval": self.interval.sums(),
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
        self.interval.restore(checkpoint.metadata["interval"], checkpoint.metadata["nonfinite_steps"])
        self.best, self.evaluated_by = checkpoint.metadata["best"], checkpoint.metadata.get("evaluated_by")
        self.seconds_before = checkpoint.metadata["seconds"]
        was = checkpoint.metadata["config"]["budget"].get("minutes")
        if self.config.budget.minutes not in (None, was) and self.step:
            self._fit(self.seconds / self.step)

    def _modules(self) -> dict[str, nn.Module]:
        return {"student": self.student, "teacher": self.teacher, **self.objective.centers}

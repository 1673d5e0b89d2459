"""Training on augmented batches of labelled images, epoch by epoch, which resumes; where heads start."""

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoints, collect, restore
from dino_vit.core.distributed import is_main_process, rank, to_device, world_size
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.text import plural, progress
from dino_vit.eval.results import to_jsonable
from dino_vit.eval.sets import LabelledSubset
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.views.augment import Augment
from dino_vit.views.geometry import View
from dino_vit.views.loader import Loader, choose_workers
from dino_vit.views.sampler import Sampler

MOMENTUM = 0.9  # of linear heads
_INITIAL_STD = 0.01


def initial_weight(classes: int, inputs: int, seed: int) -> Tensor:
    """Return the weight that every linear head starts from, (c, d)."""
    generator = torch.Generator().manual_seed(derive_seed(seed, RngPurpose.EVALUATION))
    return _INITIAL_STD * torch.randn(classes, inputs, generator=generator)


def require_one_class(images: LabelledSubset, program: str) -> None:
    """Raise an error unless each image has one class."""
    if images.task != "multiclass":
        raise ValueError(f"{program} needs one class for each image; {images.name} has several")


class SupervisedLoader:
    """This process's share of every batch of augmented, normalised images and their classes, on the device.

    A global batch larger than the subset becomes the subset, rounded down to what processes share evenly.
    """

    def __init__(
        self,
        subset: LabelledSubset,
        backbone: FrozenBackbone,
        *,
        view: View,
        seed: int,
        workers: int | None,
        keep_last: bool = False,
    ) -> None:
        self.device, transform, processes = backbone.device, backbone.transform, world_size()
        self.global_batch = processes * min(backbone.batch_size, len(subset) // processes)
        if not self.global_batch:
            raise ValueError(f"{plural(len(subset), 'image')} for {processes} processes: launch fewer")
        sampler = Sampler(
            length=len(subset),
            global_batch=self.global_batch,
            seed=seed,
            rank=rank(),
            world_size=processes,
            keep_last=keep_last,
        )
        self.steps_per_epoch = sampler.steps_per_epoch
        self.loader = Loader(
            source=subset.images,
            views=(view,),
            sampler=sampler,
            pixels=transform.pixels,
            workers=choose_workers(workers, processes),
            pin=self.device.type == "cuda",
        )
        self.size = view.size
        augment = Augment(mean=transform.mean, std=transform.std, sigma_max=view.augment.blur_sigma[1])
        self.augment = augment.to(self.device)
        self.targets = torch.from_numpy(subset.targets)
        self.unreadable = set[str]()

    def batches(self, step: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """Yield batches from a step on, without end; closing the iterator ends the loader's processes."""
        with closing(self.loader.batches(step)) as batches:
            for batch in batches:
                for image in batch.unreadable:
                    if image.name not in self.unreadable:
                        log.warning("replaced by another image: %s", image)
                        self.unreadable.add(image.name)
                views = batch.views[self.size].to(self.device, non_blocking=True)
                targets = to_device(self.targets[batch.read], self.device)
                yield self.augment(views, batch.augment[self.size]), targets


class EpochTraining(ABC):
    """Train a module epoch by epoch; resume after the last epoch in the folder.

    `facts` are all that the training depends on, for JSON; a folder with other facts is refused.
    """

    def __init__(
        self,
        folder: Path,
        loader: SupervisedLoader,
        module: nn.Module,
        optimizer: Optimizer,
        facts: Mapping[str, Any],
    ) -> None:
        self.loader, self.module, self.optimizer = loader, module, optimizer
        self.facts = to_jsonable(facts)
        self.checkpoints = Checkpoints(folder)
        self.history: list[dict[str, Any]] = []  # the figures of every finished epoch
        if checkpoint := self.checkpoints.newest_of_rank_0():
            saved = checkpoint.metadata.get("facts") or {}
            changed = sorted(key for key, value in self.facts.items() if value != saved.get(key))
            if changed:
                text = f"{folder} holds a run with another {' and '.join(changed)}"
                raise ValueError(f"{text}; give another output, or move that folder away")
            restore(checkpoint, {"model": module}, optimizer)
            self.history = checkpoint.metadata["history"]
            log.info("%s: resuming after epoch %d", folder, len(self.history))

    @abstractmethod
    def take_step(self, images: Tensor, targets: Tensor, step: int) -> Tensor:
        """Take one optimiser step; return its loss over all processes, without waiting for the device."""

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Return the figures after an epoch."""

    def run(self, epochs: int) -> None:
        """Take the remaining steps; evaluate and save after every epoch."""
        steps, done = self.loader.steps_per_epoch, len(self.history)
        with (
            closing(self.loader.batches(done * steps)) as batches,
            progress("Training, steps", (epochs - done) * steps) as advance,
        ):
            for epoch in range(done, epochs):
                total = torch.zeros((), device=self.loader.device)
                for step, (images, targets) in enumerate(islice(batches, steps), epoch * steps):
                    total += self.take_step(images, targets, step)
                    advance(1)
                loss = float(total) / steps
                if not math.isfinite(loss):
                    advice = "lower the learning rate or use precision=no"
                    raise ValueError(f"the loss of epoch {epoch + 1} is not finite: {advice}")
                self.history.append(to_jsonable({"epoch": epoch + 1, "loss": loss, **self.evaluate()}))
                if is_main_process():
                    tensors = collect({"model": self.module}, self.optimizer)
                    self.checkpoints.save(epoch + 1, tensors, {"facts": self.facts, "history": self.history})

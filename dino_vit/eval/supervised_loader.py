"""Labelled images as one augmented view each, for supervised training in one process or several."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

from dino_vit.core.distributed import rank, world_size
from dino_vit.core.runtime import cores_of_a_process
from dino_vit.eval.datasets import LabelledSubset
from dino_vit.views.geometry import View
from dino_vit.views.loader import Loader
from dino_vit.views.photometry import Augment
from dino_vit.views.preparation import Preparation
from dino_vit.views.sampler import Sampler


class SupervisedLoader:
    """This process's share of every batch: normalised images and their classes, on the device.

    A global batch larger than the set becomes the set, but for what processes cannot share evenly.
    """

    def __init__(
        self,
        part: LabelledSubset,
        *,
        view: View,
        preparation: Preparation,
        batch_size: int,
        seed: int,
        workers: int | None,
        device: torch.device,
    ) -> None:
        processes = world_size()
        self.global_batch = processes * min(batch_size, len(part) // processes)
        if not self.global_batch:
            raise ValueError(f"{len(part)} images are too few to learn from in {processes} processes")
        sampler = Sampler(
            length=len(part),
            batch_size=self.global_batch,
            seed=seed,
            rank=rank(),
            world_size=processes,
        )
        self.steps_per_epoch = sampler.steps_per_epoch
        self.loader = Loader(
            source=part.images,
            views=(view,),
            sampler=sampler,
            pixels=preparation.pixels,
            workers=min(cores_of_a_process(processes) - 1, 16) if workers is None else workers,
            pin=device.type == "cuda",
        )
        self.size, self.device = view.size, device
        self.augment = Augment(
            mean=preparation.mean, std=preparation.std, sigma_max=view.photometry.blur_sigma[1]
        ).to(device)
        self.targets = torch.from_numpy(part.targets)

    def batches(self, position: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """Yield batches from a step on, without end; closing the iterator ends the loader's processes."""
        with contextlib.closing(self.loader.batches(position)) as batches:
            for batch in batches:
                cut = batch.views[self.size].to(self.device, non_blocking=True)
                targets = self.targets[batch.read].to(self.device, non_blocking=True)
                yield self.augment(cut, batch.photometry[self.size]), targets

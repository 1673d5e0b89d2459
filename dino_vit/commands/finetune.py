"""Supervised training of a whole network with a classifier, from trained weights or from random ones.

AdamW with a rate that falls from the classifier to the patches, a cosine after a warm-up, label smoothing,
and mixup where it is asked for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.core.distributed import all_gather, any_process, rank, share
from dino_vit.core.progress import Advance, progress
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import Interruption, start_processes
from dino_vit.eval.accuracy import Accuracy, top_k_accuracy
from dino_vit.eval.features.extraction import extract_features
from dino_vit.eval.finetuning import FinetuneConfig, Finetuning, facts, open_tuning, save
from dino_vit.eval.linear.probes import TOP_K
from dino_vit.eval.results import write_results
from dino_vit.method.optim import (
    all_finite,
    clip_gradients,
    set_rates,
    step_if_finite,
)
from dino_vit.method.schedules import warmup_cosine
from dino_vit.weights import save_backbone

log = logging.getLogger("dino_vit")


def run(config: FinetuneConfig) -> int:
    """Train from where the output folder stands, trying the network after every epoch."""
    accelerator = start_processes(trackers=(), folder=Path(config.output))
    tuning = open_tuning(config, accelerator)
    total = (config.epochs - tuning.epoch) * tuning.feed.steps_per_epoch
    position = tuning.epoch * tuning.feed.steps_per_epoch
    code = 0
    with (
        Interruption() as interruption,
        closing(tuning.feed.batches(position)) as batches,
        progress("Finetuning, steps", total) as advance,
    ):
        while tuning.epoch < config.epochs:
            loss = _train_epoch(tuning, batches, advance, interruption)
            if loss is None:  # what this epoch did is lost, but no other's
                code = interruption.exit_code
                break
            tuning.history.append({"epoch": tuning.epoch + 1, "loss": loss, **_try(tuning)})
            save(tuning)
    if code == 0:
        _finish(tuning)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return code


def _train_epoch(
    tuning: Finetuning,
    batches: Iterator[tuple[Tensor, Tensor]],
    advance: Advance,
    interruption: Interruption,
) -> float | None:
    """Take the steps of an epoch and return their mean loss, or nothing when asked to leave."""
    steps = tuning.feed.steps_per_epoch
    losses = torch.zeros((), device=tuning.device)
    tuning.wrapped.train()
    for place, (images, targets) in enumerate(islice(batches, steps)):
        losses += _take_step(tuning, images, targets, tuning.epoch * steps + place)
        best = max((one["top1"]["percent"] for one in tuning.history), default=None)
        advance(1, f"epoch {tuning.epoch + 1}" + ("" if best is None else f"  best {best:.1f} %"))
        if any_process(interruption.received is not None):
            return None
    mean = float(all_gather(losses[None]).mean()) / steps
    if not math.isfinite(mean):
        raise ValueError(f"the loss of epoch {tuning.epoch + 1} is not finite; lower lr, or set precision=no")
    return mean


def _take_step(tuning: Finetuning, images: Tensor, targets: Tensor, step: int) -> Tensor:
    """Take one step of the optimiser and return its loss; the host waits for nothing."""
    config, steps = tuning.config, tuning.feed.steps_per_epoch
    # Stochastic depth is a function of (seed, step, rank), so that a resumed run draws the same.
    torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK, step, rank()))
    rate = warmup_cosine(
        step,
        base=config.lr * tuning.feed.global_batch / 256,
        final=config.min_lr,
        total=config.epochs * steps,
        warmup=round(config.warmup_epochs * steps),
    )
    set_rates(tuning.optimizer, lr=rate, weight_decay=config.weight_decay)
    images, shares = mix(
        images,
        targets,
        classes=len(tuning.sets.classes),
        alpha=config.mixup,
        seed=derive_seed(config.seed, RngPurpose.NETWORK, step, rank(), 1),
    )
    with torch.autocast(tuning.device.type, tuning.autocast, enabled=tuning.autocast is not None):
        logits = tuning.wrapped(images)
    loss = F.cross_entropy(logits.float(), shares, label_smoothing=config.smoothing)
    torch.autograd.backward(loss)
    norm = clip_gradients([tuning.model], mode="global", max_norm=config.clip)
    step_if_finite(tuning.optimizer, all_finite(loss, norm))
    tuning.optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def mix(images: Tensor, targets: Tensor, *, classes: int, alpha: float, seed: int) -> tuple[Tensor, Tensor]:
    """Blend each image and its class with those of another by one share of Beta(alpha, alpha)."""
    shares = F.one_hot(targets, classes).to(images.dtype)
    if not alpha:
        return images, shares
    kept = float(np.random.Generator(np.random.PCG64(seed)).beta(alpha, alpha))
    return torch.lerp(images.flip(0), images, kept), torch.lerp(shares.flip(0), shares, kept)


def _try(tuning: Finetuning) -> dict[str, Any]:
    """Return how often the network is right about the images it did not learn from; processes share them."""
    part = tuning.sets.val
    places = share(range(len(part)))
    found = extract_features(
        tuning.model,
        part.images,
        places,
        preparation=tuning.preparation,
        batch_size=tuning.config.batch_size,
        autocast=tuning.autocast,
    )
    with torch.no_grad():
        ranked = tuning.model.head(found.values).topk(min(TOP_K, len(tuning.sets.classes))).indices
    ranked, seen = all_gather(ranked), all_gather(found.indices)
    targets = torch.from_numpy(part.targets).to(tuning.device)[seen]
    return {f"top{k}": top_k_accuracy(ranked, targets, k)._asdict() for k in (1, TOP_K)}


def _finish(tuning: Finetuning) -> None:
    """Write the network and the figures, and say where they are."""
    if rank() > 0:
        return
    folder, last = Path(tuning.config.output), tuning.history[-1]
    described = facts(tuning)
    save_backbone(
        tuning.model,
        folder / "backbone.safetensors",
        mean=tuning.preparation.mean,
        std=tuning.preparation.std,
        bits=tuning.preparation.pixels.bits,
        range=tuning.preparation.pixels.range,
        network="classifier",
        step=tuning.epoch * tuning.feed.steps_per_epoch,
        config={**described["config"], "classes": described["classes"]},
    )
    write_results(folder / "eval" / "finetune.json", {**described, "history": tuning.history, "last": last})
    top1, top5 = (Accuracy(**last[f"top{k}"]) for k in (1, TOP_K))
    print(
        f"after {tuning.epoch} epochs: top-1 {top1}, top-5 {top5} of {top1.images:,} images of "
        f"{len(tuning.sets.classes)} classes\n{folder / 'backbone.safetensors'}: the network, for "
        f"load_backbone({str(folder)!r}, num_classes={len(tuning.sets.classes)})"
    )

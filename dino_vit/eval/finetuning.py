"""A finetuning between two epochs: its settings, everything that a step touches, and its state on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from dino_vit.config.pretrain import Arch
from dino_vit.config.settings import (
    BelowOne,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Probability,
    Problem,
    Settings,
    setting,
    settings_of,
)
from dino_vit.core.checkpoint import Checkpoints, collect, optimizer_names, restore
from dino_vit.core.distributed import all_gather, rank, world_size
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import choose_precision
from dino_vit.core.sizes import VIT_SIZES, height_width
from dino_vit.eval.datasets import LabelledSets, open_sets
from dino_vit.eval.supervised_loader import SupervisedLoader
from dino_vit.method.optim import (
    build_optimizer,
    parameter_groups,
)
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.geometry import View
from dino_vit.views.photometry import ViewPhotometry
from dino_vit.views.preparation import Preparation, preparation_of
from dino_vit.weights import load_backbone

log = logging.getLogger("dino_vit")


class FinetuneConfig(Settings):
    """Train a whole network with a classifier on labelled images."""

    source: str = Field(description="labelled images to try the network on")
    train: str | None = setting(None, "images to learn from; null: source, but for a fifth that is tried on")
    labels: str | None = setting(None, "CSV or JSON file of the images' labels; null: the source's own")
    train_labels: str | None = setting(None, "CSV or JSON file of the labels of train; null: its own")
    weights: str | None = setting(None, "run folder or weights file to start from")
    network: Literal["teacher", "student"] = setting("teacher", "of a checkpoint")
    arch: Arch | None = setting(None, "size of a network to start at random, where there are no weights")
    patch_size: Count = setting(16, "of a network that starts at random")
    size: Count | tuple[Count, Count] | None = setting(
        None, "pixels: side, or [height, width]; null: that of the weights, or 224"
    )
    output: str = setting("runs/finetune", "folder of the run; it goes on there", resumable=True)
    seed: CountOrZero = setting(0, "of every random number")
    batch_size: Count = setting(64, "images per process and step")
    workers: CountOrZero | None = setting(None, "loader processes; null: by the cores", resumable=True)
    epochs: Count = setting(100, "passes over the images")
    lr: Positive = setting(5e-4, "peak learning rate of the classifier at a global batch of 256")
    min_lr: NonNegative = setting(1e-6, "learning rate at the end")
    warmup_epochs: NonNegative = setting(5.0, "epochs of linear warm-up")
    layer_decay: Annotated[float, Field(gt=0, le=1)] = setting(
        0.75, "factor on lr per block towards the input; 1: none"
    )
    weight_decay: NonNegative = setting(0.05, "of matrices, not of biases")
    clip: Positive = setting(1.0, "largest norm of all gradients together")
    drop_path: BelowOne = setting(0.1, "stochastic depth of the last block")
    smoothing: BelowOne = setting(0.1, "share of the target that goes to all classes evenly")
    mixup: NonNegative = setting(0.0, "alpha of the Beta by which images are mixed in pairs; 0: never")
    crop: tuple[Probability, Probability] = setting((0.08, 1.0), "share of the image's area, from and to")
    flip: Probability = setting(0.5, "probability of a horizontal flip")
    jitter: Probability = setting(0.0, "probability of brightness, contrast, saturation and hue jitter")
    precision: Literal["auto", "no", "bf16"] = setting("auto", "auto: bf16 where it is native")

    positional: ClassVar = ("source",)
    also_known_as: ClassVar = {
        "source": "images data data_path val",
        "weights": "checkpoint model run pretrained init",
        "size": "image_size img_size",
        "batch_size": "batch_size_per_gpu",
        "smoothing": "label_smoothing",
        "layer_decay": "layerwise_decay",
        "lr": "learning_rate base_lr",
        "drop_path": "drop_path_rate",
        "workers": "num_workers",
    }

    def contradictions(self) -> Iterator[Problem]:
        """Yield what would leave nothing to train, or no time to."""
        if (self.weights is None) == (self.arch is None):
            text = "give either weights to start from, or arch to start at random"
            yield Problem(text, ("weights", "arch"))
        if self.warmup_epochs >= self.epochs:
            yield Problem(
                f"warmup_epochs={self.warmup_epochs} leaves nothing of epochs={self.epochs}",
                ("warmup_epochs", "epochs"),
            )


@dataclass(kw_only=True)
class Finetuning:
    """A run between two epochs."""

    config: FinetuneConfig
    model: VisionTransformer
    wrapped: nn.Module  # the model, as the processes share it
    optimizer: Optimizer
    feed: SupervisedLoader
    sets: LabelledSets
    preparation: Preparation
    autocast: torch.dtype | None
    device: torch.device
    checkpoints: Checkpoints
    history: list[dict[str, Any]]

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return len(self.history)


def open_tuning(config: FinetuneConfig, accelerator: Any) -> Finetuning:
    """Build everything that a step touches, and become what the newest checkpoint says."""
    sets = open_sets(
        config.source,
        labels=config.labels,
        train=config.train,
        train_labels=config.train_labels,
        seed=config.seed,
    )
    device: torch.device = accelerator.device
    torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK))
    model = _build_model(config, len(sets.classes)).to(device)
    preparation = preparation_of(model)
    precision = choose_precision(config.precision, device)
    photometry = ViewPhotometry(
        flip=config.flip, jitter=config.jitter, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1
    )
    tuning = Finetuning(
        config=config,
        model=model,
        wrapped=accelerator.prepare_model(model) if world_size() > 1 else model,
        optimizer=build_optimizer("adamw", parameter_groups(model, layer_decay=config.layer_decay)),
        feed=SupervisedLoader(
            sets.train,
            view=View(size=preparation.size, scale=config.crop, photometry=photometry),
            preparation=preparation,
            batch_size=config.batch_size,
            seed=config.seed,
            workers=config.workers,
            device=device,
        ),
        sets=sets,
        preparation=preparation,
        autocast=torch.bfloat16 if precision == "bf16" else None,  # without a scaler there is no float16
        device=device,
        checkpoints=Checkpoints(Path(config.output) / "state"),
        history=[],
    )
    _restore(tuning)
    return tuning


def _build_model(config: FinetuneConfig, classes: int) -> VisionTransformer:
    """Return the network that training starts from, with a new classifier."""
    size = None if config.size is None else height_width(config.size)
    if config.weights is None:
        assert config.arch is not None
        shape: dict[str, Any] = VIT_SIZES[config.arch] | {"patch_size": config.patch_size}
        return VisionTransformer(
            **shape, image_size=size or 224, num_classes=classes, drop_path=config.drop_path
        )
    sized: dict[str, Any] = {} if size is None else {"image_size": size}
    model = load_backbone(config.weights, network=config.network, drop_path=config.drop_path, **sized)
    model.add_classifier(classes)
    return model.train()


def facts(tuning: Finetuning) -> dict[str, Any]:
    """Return all that training is a function of, as JSON has it."""
    fixed = {key for key, setting in settings_of(FinetuneConfig).items() if not setting.resumable}
    known = {
        "config": tuning.config.model_dump(mode="json", include=fixed),
        "sets": [part.images.fingerprint for part in (tuning.sets.train, tuning.sets.val)],
        "classes": tuning.sets.classes,
        "global_batch": tuning.feed.global_batch,
        "precision": str(tuning.autocast),
    }
    described: dict[str, Any] = json.loads(json.dumps(known))
    return described


def save(tuning: Finetuning) -> None:
    """Write the state after an epoch from the first process."""
    if rank() == 0:
        names = optimizer_names(tuning.optimizer, tuning.model)
        tensors = collect({"model": tuning.model}, tuning.optimizer, names)
        metadata = {"facts": facts(tuning), "history": tuning.history}
        tuning.checkpoints.save(tuning.epoch, tensors, metadata)


def _restore(tuning: Finetuning) -> None:
    """Go on after the last epoch that the output folder holds, if it is of the same run."""
    found = tuning.checkpoints.newest()
    if found:
        known = facts(tuning)
        changed = sorted(key for key in known if known[key] != found.metadata["facts"].get(key))
        if changed:
            raise ValueError(
                f"{tuning.config.output} holds a run with another {' and '.join(changed)}; give another "
                "output, or move that folder away"
            )
        names = optimizer_names(tuning.optimizer, tuning.model)
        restore(found, {"model": tuning.model}, tuning.optimizer, names)
        tuning.history[:] = found.metadata["history"]
        log.info("%s: going on after epoch %d", tuning.config.output, tuning.epoch)
    epochs = all_gather(torch.tensor([tuning.epoch], device=tuning.device)).tolist()
    if len(set(epochs)) > 1:
        raise ValueError(
            f"the processes found {tuning.config.output} at different epochs ({epochs}): it must be one "
            "folder that all nodes see"
        )

"""A frozen backbone, or a baseline in its place: how images are prepared for it and sent through."""

import json
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dino_vit.config.commands import BackboneConfig, CachedConfig, side_by_side
from dino_vit.config.sections import BASELINES
from dino_vit.core import Size, height_width, log
from dino_vit.core.distributed import world_size
from dino_vit.core.process import in_batches
from dino_vit.core.runtime import DTYPES, choose_precision, cores_of_a_process, start_processes
from dino_vit.core.storage import digest
from dino_vit.core.text import progress
from dino_vit.data.image_set import ImageSet, evenly_spaced
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.labels import NO_LABELS
from dino_vit.data.open import open_source
from dino_vit.data.statistics import (
    INSPECTED_IMAGES,
    MEASURED_IMAGES,
    channel_statistics,
    inspect_images,
)
from dino_vit.features.batches import Features, read_batches
from dino_vit.models.backbone import CLS, Backbone, FeatureSpec, eval_mode
from dino_vit.views.eval_transform import EvalTransform, eval_transform_of
from dino_vit.weights import load_backbone
from dino_vit.weights.backbones import LoadedBackbone


@dataclass(frozen=True, kw_only=True)
class FrozenBackbone:
    """A backbone on this process's device, and how images are prepared for it and sent through.

    Leaves the model as it was: the mode of each module, its gradients, every random state.
    """

    model: Backbone
    transform: EvalTransform
    batch_size: int = 128  # images per forward pass
    autocast: torch.dtype | None = None
    threads: int | None = None  # that read images; None: one per core, at most 8 (commands: 16)
    cache: Path | None = None  # folder of cached features; None: that of all caches
    cache_gb: float = 50.0  # how large all caches may become together
    unreadable: set[str] = field(default_factory=set)  # names of images that were said to be
    beside: tuple["FrozenBackbone", ...] = ()  # others, whose features `joined_features` adds to its own

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def precision(self) -> str:
        """The type that the features are computed in."""
        return str(self.autocast or torch.float32).removeprefix("torch.")

    @cached_property
    def weights_digest(self) -> str:
        """A digest of the tensors and the architecture, independent of the file they came from."""
        architecture = json.dumps(self.model.architecture, sort_keys=True)
        return digest(self.model.state_dict(), {"architecture": architecture})

    def describe_weights(self) -> dict[str, Any]:
        """Return where the weights come from and what they are computed in, for a results file."""
        provenance = self.model.provenance
        origin = {name: getattr(provenance, name) for name in ("source", "sha256", "network", "step")}
        beside = {"beside": [each.describe_weights() for each in self.beside]} if self.beside else {}
        return {**origin, "precision": self.precision, **beside}

    def features(
        self, source: ImageSet, batches: Iterable[Sequence[int]], spec: FeatureSpec = CLS
    ) -> Generator[Features]:
        """Yield the features of each batch of indices, on the model's device.

        A batch without readable images is a forward pass too, for which sharded weights are gathered.
        """
        normalise = self.transform.normaliser(self.device)
        pin = self.device.type == "cuda"
        for batch in read_batches(source, self.transform, batches, threads=self.threads, pin=pin):
            images = batch.values if len(batch.values) else self.transform.empty(1).zero_()
            yield replace(batch, values=self.compute(normalise(images), spec)[: len(batch.values)])

    def extract(
        self, source: ImageSet, indices: Sequence[int], spec: FeatureSpec = CLS, passes: int = 0
    ) -> Features:
        """Return the features of images in memory, on the model's device, in the order of the indices.

        It takes at least `passes` forward passes.
        """
        shape = spec.shape(self.model, self.transform.size)
        none = Features(torch.empty(0, *shape, device=self.device), torch.empty(0, dtype=torch.long), ())
        batches = list(in_batches(indices, self.batch_size))
        batches += [[]] * (passes - len(batches))
        with progress("Computing features", len(indices)) as advance:
            parts = [none]
            for part in self.features(source, batches, spec):
                parts.append(part)
                advance(len(part.indices))
        unreadable = tuple(image for part in parts for image in part.unreadable)
        return Features(
            torch.cat([part.values for part in parts]),
            torch.cat([part.indices for part in parts]),
            unreadable,
        )

    def compute(self, images: Tensor, spec: FeatureSpec) -> Tensor:
        """Return the features of normalised images (B, C, H, W)."""
        enabled = self.autocast is not None
        with eval_mode(self.model), torch.autocast(self.device.type, self.autocast, enabled=enabled):
            return spec.extract(self.model, images).float()


def check_finite(values: Tensor, model: Backbone) -> None:
    """Raise if features are NaN or infinite, as every figure of them would be nonsense."""
    if not torch.stack(values.aminmax()).isfinite().all():
        source = model.provenance.source or "the backbone"
        raise ValueError(f"{source} gives features that are NaN or infinite; try precision=no")


def frozen_backbone(config: BackboneConfig) -> FrozenBackbone:
    """Join the processes of the launch, and load the backbone of the config in each."""
    device, precision = start_processes().device, "no"
    size = None if config.size is None else height_width(config.size)
    if config.weights in BASELINES:
        images = open_source(getattr(config, "train", None) or config.source, NO_LABELS)
        model = build_baseline(config.weights, images, size=size).to(device)
    else:
        model = load_backbone(config.weights, network=config.network).to(device)
        precision = choose_precision(config.precision, device)
    if precision != "no":
        log.info("features are computed in %s; precision=no computes them in float32", precision)
    caches: dict[str, Any] = {}
    if isinstance(config, CachedConfig):
        caches = {"cache": None if config.cache is None else Path(config.cache), "cache_gb": config.cache_gb}
    return FrozenBackbone(
        model=model,
        transform=eval_transform_of(model, size=size, resize_mode=config.resize_mode),
        batch_size=config.batch_size,
        autocast=DTYPES[precision] if precision != "no" else None,
        threads=config.num_workers or min(cores_of_a_process(world_size()), 16),
        **caches,
    )


def frozen_backbones(config: BackboneConfig) -> FrozenBackbone:
    """Do the same with weights such as runs/a+edges: return the first, with the others beside it."""
    each = (config.model_copy(update={"weights": weights}) for weights in side_by_side(config.weights))
    first, *others = map(frozen_backbone, each)
    return replace(first, beside=tuple(replace(other, unreadable=first.unreadable) for other in others))


def build_baseline(
    name: str, source: ImageSet, *, pixels: Pixels | None = None, size: Size | None = None
) -> LoadedBackbone:
    """Return a baseline for some images: of their channels and depth, and by their own mean and std."""
    if pixels is None:
        summary = inspect_images(source, evenly_spaced(len(source), INSPECTED_IMAGES))
        pixels = Pixels(channels=summary.channels, bits=summary.bits)
    measured = channel_statistics(source, evenly_spaced(len(source), MEASURED_IMAGES), pixels)
    model = load_backbone(name, channels=pixels.channels, image_size=size)
    std = tuple(max(value, 1e-3) for value in measured.std)  # a channel that is the same everywhere stays so
    model.provenance = replace(
        model.provenance, mean=measured.mean, std=std, bits=pixels.bits, range=pixels.range
    )
    return model

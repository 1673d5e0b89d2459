"""Features of images: read, prepared and sent through a frozen backbone in the order asked for."""

import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dino_vit.core import Size
from dino_vit.core.distributed import all_equal
from dino_vit.core.storage import digest
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.models.backbone import CLS, Backbone, FeatureSpec, Provenance, eval_mode
from dino_vit.views.eval_transform import EvalTransform

T = TypeVar("T")
R = TypeVar("R")


RAW_PIXELS = "raw pixels"
PIXEL_SIDE = 32  # raw pixels of larger images cost memory and classify no better
# Arguments that networks had not always, with which those of before are built.
LATER: dict[str, Any] = {"stem": "patch", "stem_width": None, "resnet_layers": (3, 4, 9), "resnet_width": 64}
LATER |= {"qk_scale": None, "dropout": 0.0, "attention_dropout": 0.0}


def _computing(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a network, so that one of an earlier version has the same digest as before."""
    return {key: value for key, value in architecture.items() if key not in LATER or value != LATER[key]}


@dataclass(frozen=True)
class Features:
    """Features (n, ...) in float32, the indices of their images, and the images that could not be read."""

    values: Tensor
    indices: Tensor  # int64 (n,), on the CPU
    unreadable: tuple[UnreadableImage, ...]


@dataclass(frozen=True, kw_only=True)
class FrozenBackbone:
    """A backbone on this process's device, and how images are prepared for it and sent through.

    Leaves the model as it was: the mode of each module, its gradients, every random state.
    """

    model: Backbone
    transform: EvalTransform
    batch_size: int = 128  # images per forward pass
    autocast: torch.dtype | None = None
    threads: int | None = None  # that read images; None: one per core, at most 8
    cache: Path | None = None  # folder of cached features; None: that of all caches
    cache_gb: float = 50.0  # how large all caches may become together

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
        architecture = json.dumps(_computing(self.model.architecture), sort_keys=True)
        return digest(self.model.state_dict(), {"architecture": architecture})

    def check_all_equal(self) -> None:
        """Check that all processes have the same weights: a run that goes on may have written others."""
        if not all_equal(int(self.weights_digest[:15], 16)):
            raise ValueError("the processes read different weights; give a checkpoint that is kept")

    def describe_weights(self) -> dict[str, Any]:
        """Return where the weights come from and what they are computed in, for a results file."""
        provenance = self.model.provenance
        origin = {name: getattr(provenance, name) for name in ("source", "sha256", "network", "step")}
        return {**origin, "precision": self.precision}

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
        none = Features(self.empty(spec), torch.empty(0, dtype=torch.long), ())
        batches = list(in_batches(indices, self.batch_size))
        batches += [[]] * (passes - len(batches))
        return _concatenate([none, *self.features(source, batches, spec)])

    def compute(self, images: Tensor, spec: FeatureSpec) -> Tensor:
        """Return the features of normalised images (B, C, H, W)."""
        enabled = self.autocast is not None
        with eval_mode(self.model), torch.autocast(self.device.type, self.autocast, enabled=enabled):
            return spec.of(self.model, images).float()

    def empty(self, spec: FeatureSpec) -> Tensor:
        """Return the features of zero images."""
        return torch.empty(0, *spec.shape(self.model, self.transform.size), device=self.device)


class RawPixels(Backbone):
    """A baseline in the place of a backbone: the normalised pixels of small images are their features."""

    has_patches, depth, heads, registers, grad_checkpointing = False, 1, 0, 0, False
    anchor: Tensor

    def __init__(self, size: Size, channels: int) -> None:
        super().__init__()
        self.image_size = self.patch_size = size
        self.channels, self.width = channels, channels * size[0] * size[1]
        self.head = nn.Identity()
        self.register_buffer("anchor", torch.empty(0), persistent=False)  # which device it is on
        self.provenance = Provenance(source=RAW_PIXELS)

    @property
    def architecture(self) -> dict[str, Any]:
        return {RAW_PIXELS: self.image_size, "channels": self.channels}

    @property
    def device(self) -> torch.device:
        return self.anchor.device

    def forward_cls(self, images: Tensor) -> Tensor:
        return images.flatten(1)

    def forward_features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.forward_cls(images)[:, None]

    def get_intermediate_layers(self, images: Tensor, blocks: int | Sequence[int] = 1) -> list[Tensor]:
        return [self.forward_features(images)]

    def grid_of(self, height: int, width: int) -> Size:
        return 1, 1

    def layers(self) -> dict[str, int]:
        return {}


def raw_pixels_like(frozen: FrozenBackbone) -> FrozenBackbone:
    """Return the baseline for a backbone: the pixels of the same images, reduced, prepared alike."""
    size, transform = frozen.transform.size, frozen.transform
    shrink = min(1.0, PIXEL_SIDE / max(size))
    transform = replace(transform, size=(max(1, round(size[0] * shrink)), max(1, round(size[1] * shrink))))
    if transform.shorter_side is not None:
        transform = replace(transform, shorter_side=max(1, round(transform.shorter_side * shrink)))
    model = RawPixels(transform.size, transform.pixels.channels).eval().to(frozen.device)
    return replace(frozen, model=model, transform=transform, autocast=None)


def pixel_features(source: ImageSet, indices: Sequence[int], *, transform: EvalTransform) -> Features:
    """Return the flattened normalised pixels of images: a baseline for any features."""
    normalise = transform.normaliser(torch.device("cpu"))
    batches = read_batches(source, transform, in_batches(indices, 256))
    return _concatenate([replace(batch, values=normalise(batch.values).flatten(1)) for batch in batches])


def _concatenate(parts: Sequence[Features]) -> Features:
    return Features(
        torch.cat([part.values for part in parts]),
        torch.cat([part.indices for part in parts]),
        tuple(image for part in parts for image in part.unreadable),
    )


def check_finite(values: Tensor, model: Backbone) -> None:
    """Raise if features are NaN or infinite, as every figure of them would be nonsense."""
    if not torch.stack(values.aminmax()).isfinite().all():
        source = model.provenance.source or "the backbone"
        raise ValueError(f"{source} gives features that are NaN or infinite; try precision=no")


def in_batches(indices: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    """Split indices into batches; the last may be smaller."""
    return (indices[start : start + batch_size] for start in range(0, len(indices), batch_size))


def read_ahead(
    read: Callable[[T], R], blocks: Iterable[Sequence[T]], threads: int | None
) -> Iterator[list[R]]:
    """Yield what is read of each block by threads, prefetching one while the caller works on another."""
    with ThreadPoolExecutor(threads) as pool:
        try:
            # Each pair starts the block after the one that is yielded.
            for started, _ in pairwise(chain((pool.map(read, block) for block in blocks), [None])):
                assert started is not None
                yield list(started)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # the caller may have stopped early


def read_batches(
    source: ImageSet,
    transform: EvalTransform,
    batches: Iterable[Sequence[int]],
    *,
    threads: int | None = None,
    pin: bool = False,
) -> Iterator[Features]:
    """Yield batches of images as values (n, C, h, w), prefetching one while the caller works on another."""

    buffers = deque[Tensor]()

    def blocks() -> Iterator[Sequence[tuple[Tensor, int]]]:
        for indices in batches:
            buffers.append(transform.empty(len(indices), pin=pin))
            yield list(zip(buffers[-1], indices, strict=True))

    def read(image: tuple[Tensor, int]) -> UnreadableImage | None:
        out, index = image
        try:
            out.copy_(transform.read(source, index))
        except UnreadableImage as error:
            return error
        return None

    # Threads suffice: decoding and resampling, 95 % of the work on an image of 500 × 375, hold no lock. By
    # default there are no more than 8, so that other processes are not crowded out.
    threads, batches = threads or min(8, os.cpu_count() or 1), list(batches)
    for indices, failures in zip(batches, read_ahead(read, blocks(), threads), strict=True):
        images, kept = buffers.popleft(), [row for row, failure in enumerate(failures) if failure is None]
        yield Features(
            images if len(kept) == len(indices) else images[kept],
            torch.tensor([indices[row] for row in kept], dtype=torch.long),
            tuple(failure for failure in failures if failure is not None),
        )

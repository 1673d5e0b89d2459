"""Features of images by a frozen backbone: computed by all processes of a launch, and cached on disk."""

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.config.sections import BASELINES
from dino_vit.core import Size, height_width, log
from dino_vit.core.cache import FEATURES, bound_caches, cache_folder, note_use
from dino_vit.core.distributed import (
    agree,
    all_equal,
    all_gather,
    any_process,
    broadcast_int,
    is_main_process,
    rank,
    world_size,
)
from dino_vit.core.process import in_batches
from dino_vit.core.runtime import DTYPES, choose_precision, cores_of_a_process, start_processes
from dino_vit.core.storage import StorageError, digest, read_tensors, write_tensors
from dino_vit.core.text import progress
from dino_vit.data.image_set import ImageSet, evenly_spaced
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.labels import NO_LABELS
from dino_vit.data.open import open_source
from dino_vit.data.statistics import (
    INSPECTED_IMAGES,
    MEASURED_IMAGES,
    channel_statistics,
    inspect_images,
)
from dino_vit.eval.batches import (
    Features,
    missing_indices,
    read_batches,
    say_what_is_unlike,
    warn_of_unreadable,
)
from dino_vit.models.backbone import CLS, Backbone, FeatureSpec, eval_mode
from dino_vit.views.eval_transform import EvalTransform, eval_transform_of

if TYPE_CHECKING:
    from dino_vit.config.commands import BackboneConfig
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

    def empty(self, spec: FeatureSpec) -> Tensor:
        """Return features without rows, (0, ...), as those of images would be."""
        return torch.empty(0, *spec.shape(self.model, self.transform.size), device=self.device)


def check_finite(values: Tensor, model: Backbone) -> None:
    """Raise if features are NaN or infinite, as every figure of them would be nonsense."""
    if not torch.stack(values.aminmax()).isfinite().all():
        source = model.provenance.source or "the backbone"
        raise ValueError(f"{source} gives features that are NaN or infinite; try precision=no")


_VERSION = 6  # of the files, and of how images are prepared
NOT_CACHED = (
    "the features could not be cached, as changes of these images cannot be detected: URLs in a list, "
    "files of a server without ETag and time of change, or an object of Python code without a fingerprint"
)
_SAID = set[str]()  # by the fingerprint of the images


def frozen_backbone(config: "BackboneConfig") -> FrozenBackbone:
    """Join the processes of the launch, and load the backbone of the config in each."""
    from dino_vit.config.commands import CachedConfig
    from dino_vit.weights import load_backbone  # a run that trains needs neither

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


def build_baseline(
    name: str, source: ImageSet, *, pixels: Pixels | None = None, size: Size | None = None
) -> "LoadedBackbone":
    """Return a baseline for some images: of their channels and depth, and by their own mean and std."""
    from dino_vit.weights import load_backbone

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


def baseline_like(frozen: FrozenBackbone, name: str, source: ImageSet) -> FrozenBackbone:
    """Return a baseline for the same images, in the place of a backbone."""
    model = build_baseline(name, source, pixels=frozen.transform.pixels).to(frozen.device)
    return replace(frozen, model=model, transform=eval_transform_of(model), autocast=None)


def cached_features(
    frozen: FrozenBackbone,
    source: ImageSet,
    *,
    spec: FeatureSpec = CLS,
    indices: Sequence[int] | None = None,
    title: str = "features",
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the features of the readable images of a source, or of some, and the images' indices.

    They are read from the cache file whose name is a hash of all that they depend on (weights, images,
    transform, tokens, precision), or computed and written there first. All processes must call it; they
    share the work. Unreadable images are left out with a warning. Another device or batch
    size may round the last bits differently. What is interrupted starts again. Features are not cached where
    changes of the images cannot be detected (`ImageSet.stamp`).
    """
    chosen = range(len(source)) if indices is None else indices
    if not len(chosen):
        raise ValueError("there are no images to compute features of")
    frozen.check_all_equal()
    subset = "" if indices is None else digest({"indices": torch.as_tensor(indices)}, {})
    agree("images", lambda: source, lambda _: f"{len(chosen):,} of {source.describe()}{subset}")
    if is_main_process():
        say_what_is_unlike(frozen.transform, source, chosen)
    stamp = source.stamp
    keeps = not any_process(stamp is None)
    if not keeps and source.fingerprint not in _SAID and is_main_process():
        _SAID.add(source.fingerprint)
        log.info(NOT_CACHED)
    facts = {"source": source.fingerprint, "files": stamp, "indices": subset or None}
    path, description = _cache_file(frozen, spec, facts)
    tensors = _read(path) if keeps else None
    if any_process(
        tensors is None or _readable_again(frozen, source, missing_indices(chosen, tensors["indices"]))
    ):
        tensors = _compute(frozen, source, chosen, spec, title)
        check_finite(tensors["values"], frozen.model)
        if keeps and is_main_process():
            _write(path, tensors, description)
            bound_caches(frozen.cache_gb, path.parent, spared=path)
    assert tensors is not None
    left_out = {source.name(index): index for index in missing_indices(chosen, tensors["indices"])}
    new = [index for name, index in left_out.items() if name not in frozen.unreadable]
    frozen.unreadable.update(left_out)
    if new and is_main_process():
        warn_of_unreadable(source, frozen.transform, new, len(chosen))
    if keeps:
        note_use(path)
    return tensors["values"].numpy(), tensors["indices"].numpy()


def _cache_file(frozen: FrozenBackbone, spec: FeatureSpec, images: Mapping[str, object]) -> tuple[Path, str]:
    """Return the file of features, and all that they depend on."""
    inputs = {
        "version": _VERSION,
        "weights": frozen.weights_digest,
        **images,
        "transform": asdict(frozen.transform),
        "features": asdict(spec),
        "precision": frozen.precision,
    }
    # That of rank 0, as nodes may have copies of the images, with times of their own.
    key = broadcast_int(int(digest({}, {"features": json.dumps(inputs, sort_keys=True)})[:15], 16))
    return (frozen.cache or cache_folder() / FEATURES) / f"{key:015x}.safetensors", json.dumps(inputs)


def _read(path: Path) -> dict[str, Tensor] | None:
    """Return the features in a file, unless there is none or it is damaged."""
    if not path.exists():
        return None
    try:
        return read_tensors(path)[0]
    except StorageError as error:
        log.warning("the features are computed again: %s", error)
        return None


def _readable_again(frozen: FrozenBackbone, source: ImageSet, left_out: Sequence[int]) -> bool:
    """Tell whether an image that was left out can be read now: a disk may have been away for a moment."""
    batches = in_batches(left_out, frozen.batch_size)
    return any(len(batch.indices) > 0 for batch in read_batches(source, frozen.transform, batches))


def _write(path: Path, tensors: Mapping[str, Tensor], description: str) -> None:
    try:
        write_tensors(path, tensors, description)
    except StorageError as error:
        log.warning("the features could not be cached: %s; see cache=FOLDER", error)


def _compute(
    frozen: FrozenBackbone, source: ImageSet, indices: Sequence[int], spec: FeatureSpec, title: str
) -> dict[str, Tensor]:
    """Compute features in all processes, each a batch in turn; all return all of them."""
    processes, batches = world_size(), list(in_batches(indices, frozen.batch_size))
    # Every process has as many batches, so that each round can be gathered; the last may be empty.
    batches += [[]] * (-len(batches) % processes)
    values = torch.empty(len(indices), *spec.shape(frozen.model, frozen.transform.size))
    kept, unreadable = list[int](), list[UnreadableImage]()
    with (
        progress(title, len(indices)) as advance,
        closing(frozen.features(source, batches[rank() :: processes], spec)) as features,
    ):
        for batch in features:
            rows, row_values = all_gather(batch.indices), all_gather(batch.values)
            values[len(kept) : len(kept) + len(rows)] = row_values.cpu()
            kept += rows.tolist()
            unreadable += batch.unreadable
            advance(len(rows))
    if not kept:
        first = f", the first is {unreadable[0]}" if unreadable else ""  # another rank may have read all
        raise ValueError(f"none of {len(indices):,} images can be read{first}")
    return {"values": values[: len(kept)], "indices": torch.tensor(kept)}

"""A frozen backbone in every process of a launch, and the features of images, which are cached on disk."""

import json
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dino_vit.config.commands import BackboneConfig, CachedConfig
from dino_vit.core import height_width, log
from dino_vit.core.cache import FEATURES, bound_caches, cache_folder, keep
from dino_vit.core.distributed import (
    agree,
    all_gather,
    any_process,
    broadcast_int,
    is_main_process,
    rank,
    wait_for_all,
    world_size,
)
from dino_vit.core.runtime import DTYPES, choose_precision, cores_of_a_process, start_processes
from dino_vit.core.storage import StorageError, digest, read_tensors, write_tensors
from dino_vit.core.text import progress
from dino_vit.data.image_set import ImageSet, spread
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.files import SourceLost
from dino_vit.data.statistics import inspect_images
from dino_vit.eval.features import FrozenBackbone, check_finite, in_batches, read_batches
from dino_vit.models.backbone import CLS, FeatureSpec
from dino_vit.views.eval_transform import FAR, eval_transform_of
from dino_vit.weights import load_backbone

_VERSION = 6  # of the files, and of how images are prepared
NOT_KEPT = (
    "the features are not kept for another time, as nothing tells when these images change: URLs in a list, "
    "files of a server without ETag and time of change, or an object of Python code without a fingerprint"
)
_SAID = set[str]()  # by the fingerprint of the images


def frozen_backbone(config: BackboneConfig) -> FrozenBackbone:
    """Join the processes of the launch, and load the backbone of the config in each."""
    accelerator = start_processes()
    model = load_backbone(config.weights, network=config.network).to(accelerator.device)
    precision = choose_precision(config.precision, accelerator.device)
    if precision != "no":
        log.info("features are computed in %s; precision=no computes them in float32", precision)
    size = None if config.size is None else height_width(config.size)
    caches: dict[str, Any] = {}
    if isinstance(config, CachedConfig):
        caches = {"cache": None if config.cache is None else Path(config.cache), "cache_gb": config.cache_gb}
    return FrozenBackbone(
        model=model,
        transform=eval_transform_of(model, size=size, fit=config.fit),
        batch_size=config.batch_size,
        autocast=DTYPES[precision] if precision != "no" else None,
        threads=config.num_workers or min(cores_of_a_process(world_size()), 16),
        **caches,
    )


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
    size may round the last bits differently. What is interrupted starts again. Features are not kept where
    changes of the images cannot be detected (`ImageSet.stamp`).
    """
    chosen = range(len(source)) if indices is None else indices
    if not len(chosen):
        raise ValueError("there are no images to compute features of")
    frozen.check_all_equal()
    of_some = "" if indices is None else digest({"indices": torch.as_tensor(indices)}, {})
    agree("images", lambda: source, lambda _: f"{len(chosen):,} of {source.describe()}{of_some}")
    if is_main_process():
        _say_what_is_unlike(frozen, source, chosen)
    stamp = source.stamp
    keeps = not any_process(stamp is None)
    if not keeps and source.fingerprint not in _SAID and is_main_process():
        _SAID.add(source.fingerprint)
        log.info(NOT_KEPT)
    inputs = {
        "version": _VERSION,
        "weights": frozen.weights_digest,
        "source": source.fingerprint,
        "files": stamp if keeps else time.time_ns(),
        "indices": of_some or None,
        "transform": asdict(frozen.transform),
        "features": asdict(spec),
        "precision": frozen.precision,
    }
    # That of rank 0, as nodes may have copies of the images, with times of their own.
    key = broadcast_int(int(digest({}, {"features": json.dumps(inputs, sort_keys=True)})[:15], 16))
    path = (frozen.cache or cache_folder() / FEATURES) / f"{key:015x}.safetensors"
    tensors = _read(path)
    if any_process(tensors is None or _readable_again(frozen, source, _left_out(chosen, tensors["indices"]))):
        to = path if keeps or world_size() > 1 else None
        tensors = _compute(to, frozen, source, chosen, spec, title, json.dumps(inputs)) or _read(path)
        if is_main_process():
            bound_caches(frozen.cache_gb, frozen.cache, spared=path)
    if not keeps:
        wait_for_all()  # until each has read them
        path.unlink(missing_ok=True)
    if tensors is None:
        raise ValueError(
            f"{path} was written but is not there; let all processes share the folder of the cache"
        )
    warn_of_unreadable(source, chosen, tensors["indices"])
    check_finite(tensors["values"], frozen.model)
    values = tensors["values"].numpy()
    keep(path, values)  # which may be mapped from the file
    return values, tensors["indices"].numpy()


def _say_what_is_unlike(frozen: FrozenBackbone, source: ImageSet, indices: Sequence[int]) -> None:
    """Warn if images are far smaller than what they are resized to, or of other pixels."""
    try:
        sample = inspect_images(source, [indices[place] for place in spread(len(indices), 5)])
    except (ValueError, SourceLost):  # none of these can be read; others may
        return
    side = min(frozen.transform.size)
    if sample.images and FAR * sample.image_size < side:
        text = "images of about %d pixels are enlarged to %d: they lack details of that size"
        log.warning(text, sample.image_size, side)
    pixels = frozen.transform.pixels
    if steps := sample.conversions(pixels):
        level = logging.WARNING if sample.bits > pixels.bits else logging.INFO
        converted = ", ".join(f"{count} {step}" for step, count in steps.items())
        text = "of %d images that were inspected, %s, as the weights need them"
        log.log(level, text, len(sample.images), converted)


def _read(path: Path) -> dict[str, Tensor] | None:
    """Return the features in a file, unless there is none or it is damaged."""
    if not path.exists():
        return None
    try:
        return read_tensors(path)[0]
    except StorageError as error:
        log.warning("the features are computed again: %s", error)
        return None


def _left_out(chosen: Sequence[int], kept: ArrayLike) -> list[int]:
    return np.setdiff1d(np.asarray(chosen, np.int64), np.asarray(kept)).tolist()


def warn_of_unreadable(source: ImageSet, chosen: Sequence[int], kept: ArrayLike) -> None:
    """Say how many of some images are not among those that were read, by whichever process."""
    if unreadable := _left_out(chosen, kept):
        text = "%d of %d images cannot be read and are left out, the first is %s"
        log.warning(text, len(unreadable), len(chosen), source.name(unreadable[0]))


def _readable_again(frozen: FrozenBackbone, source: ImageSet, left_out: Sequence[int]) -> bool:
    """Tell whether an image that was left out can be read now: a disk may have been away for a moment."""
    batches = in_batches(left_out, frozen.batch_size)
    return any(len(batch.indices) > 0 for batch in read_batches(source, frozen.transform, batches))


def _compute(
    path: Path | None,
    frozen: FrozenBackbone,
    source: ImageSet,
    indices: Sequence[int],
    spec: FeatureSpec,
    title: str,
    description: str,
) -> dict[str, Tensor] | None:
    """Compute features in all processes, each a batch in turn, and write them on rank 0 if there is a path.

    Return them if there is one process, which does not need the file.
    """
    processes, batches = world_size(), list(in_batches(indices, frozen.batch_size))
    # Every process has as many batches, so that each round can be gathered; the last may be empty.
    batches += [[]] * (-len(batches) % processes)
    shape = spec.shape(frozen.model, frozen.transform.size)
    values = torch.empty(len(indices) if is_main_process() else 0, *shape)
    kept, unreadable = list[int](), list[UnreadableImage]()
    with (
        progress(title, len(indices)) as advance,
        closing(frozen.features(source, batches[rank() :: processes], spec)) as features,
    ):
        for batch in features:
            rows, of_rows = all_gather(batch.indices), all_gather(batch.values)
            if is_main_process():
                values[len(kept) : len(kept) + len(rows)] = of_rows.cpu()
            kept += rows.tolist()
            unreadable += batch.unreadable
            advance(len(rows))
    if not kept:
        first = f", the first is {unreadable[0]}" if unreadable else ""  # another rank may have read all
        raise ValueError(f"none of {len(indices):,} images can be read{first}")
    tensors = {"values": values[: len(kept)], "indices": torch.tensor(kept)}
    try:
        if path and is_main_process():
            write_tensors(path, tensors, description)
    except StorageError as error:
        if processes > 1:
            raise
        log.warning("the features are not kept for another time: %s; see cache=FOLDER", error)
    wait_for_all()
    return tensors if processes == 1 else None

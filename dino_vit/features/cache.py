"""Features of images by a frozen backbone: computed by all processes of a launch, and cached on disk."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.cache import FEATURES, bound_caches, cache_folder, note_use
from dino_vit.core.distributed import (
    agree,
    all_gather,
    any_process,
    broadcast_int,
    is_main_process,
    rank,
    world_size,
)
from dino_vit.core.process import in_batches
from dino_vit.core.storage import StorageError, digest, read_tensors, write_tensors
from dino_vit.core.text import progress
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.features.batches import (
    missing_indices,
    read_batches,
    say_what_is_unlike,
    warn_of_unreadable,
)
from dino_vit.features.frozen import FrozenBackbone, check_finite
from dino_vit.models.backbone import CLS, FeatureSpec

_VERSION = 6  # of the files, and of how images are prepared
NOT_CACHED = (
    "the features could not be cached, as changes of these images cannot be detected: URLs in a list, "
    "files of a server without ETag and time of change, or an object of Python code without a fingerprint"
)


def cached_features(
    frozen: FrozenBackbone,
    source: ImageSet,
    *,
    spec: FeatureSpec = CLS,
    title: str = "features",
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the features of the readable images of a source, and the images' indices.

    They are read from the cache file whose name is a hash of all that they depend on (weights, images,
    transform, tokens, precision), or computed and written there first. All processes must call it; they
    share the work. Unreadable images are left out with a warning. Another device or batch
    size may round the last bits differently. What is interrupted starts again. Features are not cached where
    changes of the images cannot be detected (`ImageSet.stamp`).
    """
    if not len(source):
        raise ValueError("there are no images to compute features of")
    agree("weights", lambda: frozen.weights_digest[:12], str)  # a run that goes on writes new ones
    agree("images", lambda: source, ImageSet.describe)
    if is_main_process():
        say_what_is_unlike(frozen.transform, source)
    keeps = not any_process(source.stamp is None)
    if not keeps and is_main_process():
        log.info(NOT_CACHED)
    path, description = _cache_file(frozen, spec, source)
    tensors = _read(path) if keeps else None
    if any_process(
        tensors is None or _readable_again(frozen, source, missing_indices(source, tensors["indices"]))
    ):
        tensors = _compute(frozen, source, spec, title)
        check_finite(tensors["values"], frozen.model)
        if keeps and is_main_process():
            _write(path, tensors, description)
            bound_caches(frozen.cache_gb, path.parent, spared=path)
    assert tensors is not None
    left_out = {source.name(index): index for index in missing_indices(source, tensors["indices"])}
    new = [index for name, index in left_out.items() if name not in frozen.unreadable]
    frozen.unreadable.update(left_out)
    if new and is_main_process():
        warn_of_unreadable(source, frozen.transform, new)
    if keeps:
        note_use(path)
    return tensors["values"].numpy(), tensors["indices"].numpy()


def _cache_file(frozen: FrozenBackbone, spec: FeatureSpec, source: ImageSet) -> tuple[Path, str]:
    """Return the file of features, and all that they depend on."""
    inputs = {
        "version": _VERSION,
        "weights": frozen.weights_digest,
        "source": source.fingerprint,
        "files": source.stamp,
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


def _compute(frozen: FrozenBackbone, source: ImageSet, spec: FeatureSpec, title: str) -> dict[str, Tensor]:
    """Compute features in all processes, each a batch in turn; all return all of them."""
    processes, batches = world_size(), list(in_batches(range(len(source)), frozen.batch_size))
    # Every process has as many batches, so that each round can be gathered; the last may be empty.
    batches += [[]] * (-len(batches) % processes)
    values = torch.empty(len(source), *spec.shape(frozen.model, frozen.transform.size))
    kept, unreadable = list[int](), list[UnreadableImage]()
    with (
        progress(title, len(source)) as advance,
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
        raise ValueError(f"none of {len(source):,} images can be read{first}")
    return {"values": values[: len(kept)], "indices": torch.tensor(kept)}

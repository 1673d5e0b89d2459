"""Features cached on disk: computed once by all processes, shard by shard, and memory-mapped.

They are a function of weights, images, preparation, tokens, precision and batch size, bit for bit, however
many processes computed them and wherever they were interrupted: a shard consists of whole batches, and only
the number of images and the batch size decide which. Another device may round the last bits differently.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.distributed import any_process, is_main_process, share, wait_for_all, world_size
from dino_vit.core.progress import progress
from dino_vit.core.storage import (
    OWN_KEY,
    StorageError,
    digest,
    read_metadata,
    read_tensors,
    replacing,
    write_tensors,
)
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.open import Source
from dino_vit.eval.features.extraction import Extraction, Features, in_batches
from dino_vit.models.backbone import Backbone

Dtype = Literal["float32", "float16"]
VERSION = 2  # of the files
# A shard is the most that an interruption loses, and what a process has in memory at a time.
_SHARD_IMAGES, _SHARD_BYTES, _SHARDS = 4096, 64 * 2**20, 64
_NAMES_SHOWN, _RETRIED = 3, 20


@dataclass(frozen=True, kw_only=True)
class StoredFeatures:
    """Features of the readable images of a source, in its order."""

    values: NDArray[Any]  # memory-mapped, read-only: (n, D), of patches (n, N, D)
    indices: NDArray[np.int64]  # (n,), in the source
    unreadable: tuple[UnreadableImage, ...]
    metadata: dict[str, Any]  # what the features are a function of


def stored_features(
    extraction: Extraction,
    *,
    folder: Path,
    batch_size: int,
    indices: Sequence[int] | None = None,
    dtype: Dtype = "float32",
    title: str = "features",
) -> StoredFeatures:
    """Return the features of a source, or of some indices, from a cache folder or computed into it.

    All processes must call it; they share the work. Unreadable images are left out with a warning.
    """
    source = extraction.source
    chosen = range(len(source)) if indices is None else indices
    if not len(chosen):
        raise ValueError("there are no images to compute features of")
    metadata = {
        "version": VERSION,
        "weights": weights_digest(extraction.model),
        "source": source.fingerprint,
        "images": len(chosen),
        "sample": _digest_of_sample(source, chosen),
        "indices": None if indices is None else digest({"indices": torch.as_tensor(indices)}, {}),
        "preparation": asdict(extraction.preparation),
        "features": asdict(extraction.spec),
        **extraction.described,
        "precision": str(extraction.autocast or torch.float32).removeprefix("torch."),
        "dtype": dtype,
        "batch_size": batch_size,
    }
    key = digest({}, {"features": json.dumps(metadata, sort_keys=True)})[:20]
    entry = _CacheEntry(folder / key, metadata, extraction, chosen)
    stored = entry.open()
    if any_process(stored is None):
        entry.compute(title)
        stored = entry.open()
    if stored is None:
        raise ValueError(
            f"the features were written to {entry.folder} but are not there; the cache must be one folder "
            "that all processes share"
        )
    if unreadable := stored.unreadable:
        names = ", ".join(map(str, unreadable[:_NAMES_SHOWN])) + ", ..." * (len(unreadable) > _NAMES_SHOWN)
        count = len(unreadable)
        log.warning("%d of %d images cannot be read and are left out: %s", count, len(chosen), names)
    return stored


class _CacheEntry:
    """One folder of the cache: `values.npy` and, written last, `features.safetensors`; until then, shards."""

    def __init__(
        self, folder: Path, metadata: dict[str, Any], extraction: Extraction, indices: Sequence[int]
    ) -> None:
        self.folder, self.metadata, self.extraction, self.indices = folder, metadata, extraction, indices
        self.values, self.description = folder / "values.npy", folder / "features.safetensors"
        self.batch_size: int = metadata["batch_size"]
        self.dtype: torch.dtype = getattr(torch, metadata["dtype"])
        self.shape = extraction.spec.shape(extraction.model, extraction.preparation.size)
        length = shard_length(len(indices), self.batch_size, prod(self.shape) * self.dtype.itemsize)
        starts = range(0, len(indices), length)
        self.shards = [range(start, min(start + length, len(indices))) for start in starts]

    def open(self) -> StoredFeatures | None:
        """Return the features if they are complete, undamaged and still up to date."""
        if not self.description.exists():
            return None
        try:
            tensors, written = read_tensors(self.description)
            indices, description = tensors["indices"].numpy(), json.loads(written[OWN_KEY])
            if description["sha256"] != _sha256_of_file(self.values):
                raise StorageError(f"{self.values} is damaged")
        except (OSError, StorageError) as error:
            log.warning("the features are computed again: %s", error)
            return None
        if self._became_readable(indices):
            log.warning("%s: images that could not be read now can be; computing again", self.folder)
            return None
        return StoredFeatures(
            values=np.load(self.values, mmap_mode="c"),  # read-only for the file, yet writable for torch
            indices=indices,
            unreadable=tuple(UnreadableImage(*image) for image in description["unreadable"]),
            metadata=self.metadata,
        )

    def _became_readable(self, kept: NDArray[np.int64]) -> bool:
        """Tell whether an image that was left out can be read now, such as after a network disk is back."""
        extraction = self.extraction
        for index in np.setdiff1d(np.asarray(self.indices, np.int64), kept)[:_RETRIED].tolist():
            with suppress(UnreadableImage):
                extraction.preparation.read(extraction.source, index)
                return True
        return False

    def compute(self, title: str) -> None:
        """Compute the missing shards, each process a share of them, and join all of them on rank 0."""
        missing = self._missing()
        wait_for_all()  # nobody writes before all have looked
        of_rank = f" (rank 0 of {world_size()})" if world_size() > 1 else ""
        self._compute(share(missing), title + of_rank)
        wait_for_all()
        if is_main_process():
            self._compute(self._missing(), title)  # on a network disk rank 0 may not see all of them yet
            self._join()
        wait_for_all()

    def _path(self, shard: range) -> Path:
        return self.folder / "shards" / f"{shard.start:010}-{shard.stop:010}.safetensors"

    def _missing(self) -> list[range]:
        """Return the shards that are not on disk, or damaged."""
        missing = []
        for shard in self.shards:
            try:
                read_tensors(self._path(shard))
            except StorageError:
                missing.append(shard)
        return missing

    def _compute(self, shards: Sequence[range], title: str) -> None:
        """Write shards one by one, prefetching across their borders."""
        batches = [
            list(in_batches(self.indices[shard.start : shard.stop], self.batch_size)) for shard in shards
        ]
        start = time.monotonic()
        with (
            progress(title, sum(map(len, shards))) as advance,
            closing(self.extraction(chain.from_iterable(batches))) as features,
        ):
            for shard, of_shard in zip(shards, batches, strict=True):
                parts = []
                for batch in islice(features, len(of_shard)):
                    parts.append(replace(batch, values=batch.values.to(self.dtype)))
                    waited = self.extraction.waited / max(time.monotonic() - start, 1e-9)
                    note = f"{waited:.0%} of the time waiting for images"
                    advance(len(batch.indices) + len(batch.unreadable), note)
                self._write(shard, parts)

    def _write(self, shard: range, parts: Sequence[Features]) -> None:
        unreadable = [(image.name, image.reason) for part in parts for image in part.unreadable]
        tensors = {
            "values": torch.cat([part.values for part in parts]).cpu(),
            "indices": torch.cat([part.indices for part in parts]),
        }
        write_tensors(self._path(shard), tensors, json.dumps({"unreadable": unreadable}))

    def _join(self) -> None:
        """Concatenate the shards into one file, describe it, then remove the shards."""
        descriptions = [json.loads(read_metadata(self._path(shard))[OWN_KEY]) for shard in self.shards]
        unreadable = [image for description in descriptions for image in description["unreadable"]]
        count = len(self.indices) - len(unreadable)
        if not count:
            name, reason = unreadable[0]
            raise ValueError(f"none of {len(unreadable):,} images can be read, the first is {name}: {reason}")
        dtype = np.dtype(self.metadata["dtype"]).str
        header = {"descr": dtype, "fortran_order": False, "shape": (count, *self.shape)}
        indices = []
        complete = self.folder / "shards" / "values.npy"  # is removed with the shards after an interruption
        # Not a memory map, in which a full disk is a crash.
        with replacing(complete) as partial, partial.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for shard in self.shards:
                tensors, _ = read_tensors(self._path(shard))
                file.write(tensors["values"].numpy().data)
                indices.append(tensors["indices"])
        os.replace(complete, self.values)
        sha256 = _sha256_of_file(self.values)
        description = {"metadata": self.metadata, "sha256": sha256, "unreadable": unreadable}
        write_tensors(self.description, {"indices": torch.cat(indices)}, json.dumps(description))
        shutil.rmtree(self.folder / "shards", ignore_errors=True)


def weights_digest(model: Backbone) -> str:
    """Return a digest of a backbone's tensors and architecture, independent of the file they came from."""
    return digest(model.state_dict(), {"architecture": json.dumps(model.architecture, sort_keys=True)})


def shard_length(images: int, batch_size: int, bytes_each: int) -> int:
    """Return the images of a shard: whole batches, bounded in bytes, and enough shards for many processes."""
    bound = min(_SHARD_IMAGES, _SHARD_BYTES // bytes_each, images // _SHARDS)
    return max(bound // batch_size, 1) * batch_size


def _digest_of_sample(source: Source, indices: Sequence[int]) -> str:
    """Return a digest of three of the images, as a fingerprint may know only names and sizes."""
    state = hashlib.sha256()
    for row in (0, len(indices) // 2, len(indices) - 1):
        try:
            item = source.read(indices[row])
        except OSError as error:
            item = str(error).encode()
        state.update(item.contiguous().numpy().tobytes() if isinstance(item, Tensor) else item)
    return state.hexdigest()


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
